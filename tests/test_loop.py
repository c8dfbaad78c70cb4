"""Requests that come and go between two steps of the loop; how long a prefill may take; and one
memory for all micro-batches of a pipeline.
"""

import math
import random

import pytest
import torch
from conftest import TINY, one_at_a_time, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import PLAIN
from batch import Batch, Request
from command.checks import UserError
from executor import ModelExecutor
from kvcache import KVCache
from loop import Loop, Result
from pipeline import MicroBatches, simulate_pipeline
from scheduler import (
    POLICIES,
    ChunkedOnly,
    Dynamic,
    RequestLevel,
    Sarathi,
    SarathiServe,
    make_scheduler,
)

EVERY_POLICY = [*POLICIES, "dynamic:12,5,2"]


class Clock(ModelExecutor):
    """The real executor under a clock that counts iterations."""

    moment = 0.0

    def now(self) -> float:
        return self.moment

    def wait_until(self, moment: float) -> None:
        self.moment = moment

    def execute(self, batch: Batch) -> Result:
        self.moment += 1.0
        return Result(super().execute(batch).tokens, 1.0)


MODEL = tiny_model("llama-gqa")
PROMPTS = [[(11 * i + 5 * j + j * j) % 97 for j in range(n)] for i, n in enumerate((9, 4, 13, 6))]
ALONE = [one_at_a_time(MODEL, prompt, 8) for prompt in PROMPTS]


def make_loop(
    policy: str = "sarathi",
    batch_size: int = 3,
    chunk_size: int = 8,
    cache_tokens: int | None = None,
) -> Loop:
    cache = KVCache(TINY["llama-gqa"], batch_size, 64, torch.float64)
    scheduler = make_scheduler(policy, batch_size, chunk_size, cache_tokens)
    return Loop(scheduler, Clock(MODEL, cache, PLAIN["sdpa"]))


def make_requests(*arrivals: float) -> list[Request]:
    arrivals = arrivals or (0.0,) * len(PROMPTS)
    return [Request(i, PROMPTS[i], 8, arrival=moment) for i, moment in enumerate(arrivals)]


def check_books(loop: Loop) -> None:
    """Who runs holds what the scheduler, the executor and the cache say that he holds."""
    scheduler, executor = loop.scheduler, loop.executor
    started = [request for request in scheduler.running if request.prefilled]
    assert sorted(executor.slot_of) == sorted(request.request_id for request in started)
    assert len(set(executor.slot_of.values())) == len(started)
    for slot, used in enumerate(executor.cache.used):
        assert (used is None) == (slot not in executor.slot_of.values())
    for request in started:
        assert executor.cache.used[executor.slot_of[request.request_id]] == request.context
    assert scheduler.memory.taken == sum(
        request.prefill_length if request.in_prefill else request.context
        for request in scheduler.running
    )
    capacity = scheduler.memory.capacity
    assert capacity is None or scheduler.memory.taken <= capacity
    assert scheduler.memory.flying == 0 and len(scheduler.running) <= scheduler.max_batch_size


def check_end(loop: Loop, requests: list[Request], cancelled: list[Request]) -> None:
    """Nothing is left anywhere; who was not cancelled has the tokens that it gets alone."""
    check_books(loop)
    scheduler, executor = loop.scheduler, loop.executor
    assert not loop.busy and loop.step() is None
    assert not loop.arriving and not scheduler.waiting and not scheduler.running
    assert executor.slot_of == {} and set(executor.cache.used) == {None}, "a slot leaks"
    assert scheduler.memory.taken == 0
    for request in requests:
        alone = ALONE[PROMPTS.index(list(request.prompt))][: request.max_tokens]
        if request in cancelled:
            assert request.finish_reason == "abort"
            assert request.output == alone[: len(request.output)] and request.output != alone
        else:
            assert request.finish_reason == "length" and request.output == alone
    ended = [request.request_id for request in requests if request not in cancelled]
    assert sorted(request_id for request_id, _ in loop.trace.finished) == sorted(ended)
    left = [request.request_id for request in cancelled]
    assert [request_id for request_id, _ in loop.trace.cancelled] == left


# ------------------------------------------------------------------------------------- step by step


def test_a_step_is_an_iteration_of_the_trace() -> None:
    loop = make_loop()
    assert not loop.busy and loop.step() is None and loop.batch is None
    requests = make_requests()
    for request in requests:
        loop.add(request)
    steps = []
    while loop.busy:
        steps.append(loop.step())
        batch = loop.batch
        assert [c[0] for c in steps[-1].chunks] == [c.request.request_id for c in batch.chunks]
        assert list(steps[-1].decodes) == [request.request_id for request in batch.decodes]
        check_books(loop)
    assert steps == loop.trace.iterations
    check_end(loop, requests, [])


def test_requests_come_between_steps() -> None:
    """In any order of their arrivals; one whose time has passed arrives at once."""
    loop, requests = make_loop(), make_requests(0.0, 20.0, 2.0, 1.0)
    loop.add(requests[0])
    for _ in range(4):
        loop.step()
    for request in requests[1:]:
        loop.add(request)
    assert [request.request_id for request in loop.arriving] == [3, 2, 1]
    while loop.busy:
        loop.step()
    firsts = {i: life.scheduled for i, life in loop.trace.lives.items()}
    assert firsts[3] == 4.0 < firsts[2] < firsts[1] == 20.0
    check_end(loop, requests, [])
    again = Request(9, PROMPTS[0], 8)  # a loop that had come to its end goes on
    loop.add(again)
    loop.run()
    check_end(loop, [*requests, again], [])


def test_equal_arrivals_keep_their_order() -> None:
    loop = make_loop()
    for number, arrival in enumerate((5.0, 1.0, 5.0, 1.0, 5.0, 3.0)):
        loop.add(Request(number, [1], 1, arrival=arrival))
    assert [request.request_id for request in loop.arriving] == [1, 3, 5, 0, 2, 4]


def test_what_can_never_run_is_refused_when_it_is_added() -> None:
    loop = make_loop(cache_tokens=20)
    with pytest.raises(UserError, match="request 0 can never run"):
        loop.add(Request(0, range(20), 2))
    loop.add(request := Request(1, PROMPTS[0], 8))
    loop.run()
    with pytest.raises(UserError, match="request 1 has run before"):
        loop.add(request)
    assert not loop.busy


@pytest.mark.parametrize("when", ["arriving", "waiting", "prefill", "decoding", "preempted"])
@pytest.mark.parametrize("policy", ["sarathi", "sarathi_serve", "dynamic", "chunked_only"])
def test_cancel(policy: str, when: str) -> None:
    """Whatever it is doing: it ends at once, what it held is free, and the others go on."""
    states = {
        "arriving": lambda request: request in loop.arriving,
        "waiting": lambda request: request in loop.scheduler.waiting and not request.preemptions,
        "prefill": lambda request: 0 < request.prefilled < request.prefill_length,
        "decoding": lambda request: not request.in_prefill and len(request.output) > 2,
        "preempted": lambda request: request.preemptions and request in loop.scheduler.waiting,
    }
    arrivals = (0.0, 0.0, 0.0, 1e3) if when == "arriving" else (0.0,) * 4
    loop, requests = make_loop(policy, 3, 4, 34 if when == "preempted" else None), []
    requests = make_requests(*arrivals)
    for request in requests:
        loop.add(request)
    while not (found := [request for request in requests if states[when](request)]):
        loop.step()
    (victim, *_), taken = found, loop.scheduler.memory.taken
    slot, held = loop.executor.slot_of.get(victim.request_id), victim.context
    assert (slot is None) == (when in ("arriving", "waiting", "preempted"))
    assert loop.cancel(victim) is True
    assert victim.finish_reason == "abort"
    assert loop.trace.cancelled == [(victim.request_id, loop.executor.now())]
    everywhere = [*loop.arriving, *loop.scheduler.waiting, *loop.scheduler.running]
    assert victim not in everywhere and victim.request_id not in loop.executor.slot_of
    if slot is not None:
        assert loop.executor.cache.used[slot] is None
        freed = victim.prefill_length if when == "prefill" else held
        assert loop.scheduler.memory.taken == taken - freed
    check_books(loop)
    assert loop.cancel(victim) is False, "it is gone already"
    loop.run()
    assert loop.cancel(victim) is False and loop.cancel(requests[0]) is False
    check_end(loop, requests, [victim])


def test_cancel_of_what_was_never_added() -> None:
    loop = make_loop()
    stranger = Request(0, PROMPTS[0], 8)
    assert loop.cancel(stranger) is False and stranger.finish_reason is None


def test_a_slot_is_taken_again_at_once() -> None:
    """One slot: the next request runs in the very next step."""
    loop, requests = make_loop(batch_size=1, chunk_size=64), make_requests()
    loop.add(requests[0]), loop.add(requests[1])
    loop.step(), loop.step()
    loop.cancel(requests[0])
    loop.step()
    assert [chunk.request for chunk in loop.batch.chunks] == [requests[1]]
    assert loop.executor.slot_of == {1: 0}
    loop.run()
    check_end(loop, requests[:2], [requests[0]])


def test_cancel_before_it_has_a_slot() -> None:
    """Admitted, but without a chunk yet: there is nothing in the cache to free."""
    loop, requests = make_loop(), make_requests()
    for request in requests[:2]:
        loop.add(request)
    loop.step()
    if not loop.scheduler.waiting:
        loop.scheduler.add(requests[2])
    admitted = loop.scheduler.admit()
    assert admitted.prefilled == 0 and admitted in loop.scheduler.running
    assert loop.cancel(admitted) is True
    check_books(loop)


# ---------------------------------------------------------------------------------------- at random


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(EVERY_POLICY),
    batch_size=st.integers(1, 4),
    chunk_size=st.integers(1, 20),
    spare=st.one_of(st.none(), st.integers(0, 25)),
    acts=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "cancel", "step", "step", "steps"]),
            st.integers(0, 10**6),
        ),
        min_size=1,
        max_size=25,
    ),
)
def test_requests_that_come_and_go_at_random(
    policy: str,
    batch_size: int,
    chunk_size: int,
    spare: int | None,
    acts: list[tuple[str, int]],
) -> None:
    """No slot leaks, no memory leaks, nobody starves, and everybody's tokens are those of one
    request at a time.
    """
    capacity = None if spare is None else max(map(len, PROMPTS)) + 7 + spare
    loop = make_loop(policy, batch_size, chunk_size, capacity)
    requests: list[Request] = []
    cancelled: list[Request] = []
    for act, number in acts:
        draw = random.Random(number)
        if act == "add":
            arrival = draw.choice([0.0, loop.executor.now() + draw.random() * 9])
            prompt = draw.choice(PROMPTS)
            requests.append(Request(len(requests), prompt, draw.randint(1, 8), arrival=arrival))
            loop.add(requests[-1])
        elif act == "cancel" and requests:
            victim = draw.choice(requests)
            alive = victim.finish_reason is None
            assert loop.cancel(victim) is alive
            cancelled += [victim] if alive else []
        else:
            for _ in range(1 if act == "step" else draw.randint(2, 9)):
                busy = loop.busy
                assert (loop.step() is None) == (not busy)
        check_books(loop)
    for _ in range(3000):
        if not loop.busy:
            break
        loop.step()
    assert not loop.busy, "a request starves"
    check_end(loop, requests, cancelled)


# ------------------------------------------------------------------------------- how long a prefill


class Placeholders:
    """An executor without a model: every token is 7, every iteration takes a second."""

    moment, cost = 0.0, None

    def now(self) -> float:
        return self.moment

    def wait_until(self, moment: float) -> None:
        self.moment = moment

    def execute(self, batch: Batch) -> Result:
        self.moment += 1.0
        return Result([7] * len(batch.sampled), 1.0)

    def release(self, request: Request) -> None:
        pass


def guaranteed(policy: str, batch_size: int, chunk_size: int) -> float:
    """g: tokens that the first prefill which has started gets at least in a batch with chunks."""
    room = chunk_size - (batch_size - 1)  # beside decodes in all other slots
    scheduler = make_scheduler(policy, batch_size, chunk_size)
    if isinstance(scheduler, Dynamic):
        return min(max(1, scheduler.sizes[-1] // 4), room)
    if isinstance(scheduler, ChunkedOnly):
        return chunk_size  # no decodes beside it
    return room if isinstance(scheduler, Sarathi | SarathiServe) else math.inf  # whole prompts


@settings(max_examples=250, deadline=None)
@given(
    policy=st.sampled_from([*POLICIES, "dynamic:40,30,16"]),
    batch_size=st.integers(2, 24),
    spare=st.integers(0, 60),
    endless=st.integers(0, 23),
    work=st.lists(
        st.tuples(st.integers(1, 250), st.integers(1, 6), st.integers(0, 40)),
        min_size=1,
        max_size=8,
    ),
)
def test_an_admitted_prefill_ends_within_a_bound(
    policy: str,
    batch_size: int,
    spare: int,
    endless: int,
    work: list[tuple[int, int, int]],
) -> None:
    """Nobody starves, however long the others decode. With B < C and no limit of memory, a prefill
    has ended at most

        bound = 2 * sum of ceil(P / g)

    iterations after its admission. The sum is over itself and the prefills that were admitted
    before it and have not ended, P tokens each. g is what the first prefill that has started gets
    at least in a batch with chunks:

        C - (B - 1)                               sarathi, sarathi_serve: all other slots decode
        C                                         chunked_only: no decode is beside it
        min(max(1, last size // 4), C - (B - 1))  dynamic
        the whole prompt                          all others: ceil(P / g) = 1

    The factor 2 is for chunked_only, which has a batch of decodes after each batch of chunks.
    """
    endless = min(endless, batch_size - 1)  # a slot is left for those who come and go
    chunk_size = 40 if ":" in policy else batch_size + 1 + spare
    scheduler = make_scheduler(policy, batch_size, chunk_size)
    loop, size = Loop(scheduler, Placeholders()), guaranteed(policy, batch_size, chunk_size)
    requests = [Request(i, range(2), 10**6) for i in range(endless)]
    for i, (prompt, output, arrival) in enumerate(work, start=endless):
        requests.append(Request(i, range(prompt), output, arrival=float(arrival)))
    for request in requests:
        loop.add(request)
    due: dict[int, int] = {}  # by request id: iterations by which its prefill must have ended
    admit = scheduler.admit

    def admit_and_promise() -> Request | None:
        if (request := admit()) is not None:
            prefills = [each for each in scheduler.running if each.in_prefill]  # itself, too
            bound = 2 * sum(max(1, math.ceil(len(each.prompt) / size)) for each in prefills)
            due[request.request_id] = len(loop.trace.iterations) + bound
        return request

    scheduler.admit = admit_and_promise
    # Request-level scheduling admits nobody beside requests that never end: who is not admitted has
    # no bound.
    stuck = isinstance(scheduler, RequestLevel) and endless > 0
    for _ in range(100 if stuck else 10_000):
        loop.step()
        for request in requests:
            if request.in_prefill and request.request_id in due:
                assert len(loop.trace.iterations) < due[request.request_id]
        if not any(request.in_prefill for request in requests):
            break
    assert stuck or (len(due) == len(requests) and not any(r.in_prefill for r in requests))


# ------------------------------------------------------------------ one memory for a whole pipeline


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(taken, flying) of the pool after every `next` and `done` of a MicroBatches. Fails where the
    two together are more than the pool holds, or are not what its requests say.
    """
    seen: list[tuple[int, int]] = []
    flying: dict[int, int] = {}  # decodes in flight, by micro-batch
    following, finishing = MicroBatches.next, MicroBatches.done

    def check(micro_batches: MicroBatches) -> None:
        memory = micro_batches.schedulers[0].memory
        assert all(scheduler.memory is memory for scheduler in micro_batches.schedulers)
        assert memory.flying == sum(flying.values())
        assert memory.taken == sum(
            request.prefill_length if request.in_prefill else request.context
            for scheduler in micro_batches.schedulers
            for request in scheduler.running
        )
        assert memory.taken + memory.flying <= memory.capacity
        seen.append((memory.taken, memory.flying))

    def next_(micro_batches: MicroBatches, number: int, now: float):
        batch, shortage = following(micro_batches, number, now)
        flying[number] = len(batch.decodes) if batch else 0
        check(micro_batches)
        return batch, shortage

    def done(micro_batches: MicroBatches, number: int, batch: Batch, tokens: list[int]):
        ended = finishing(micro_batches, number, batch, tokens)
        flying[number] = 0
        check(micro_batches)
        return ended

    monkeypatch.setattr(MicroBatches, "next", next_)
    monkeypatch.setattr(MicroBatches, "done", done)
    return seen


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    return watch(monkeypatch)


@pytest.mark.parametrize("deal", ["queue", "turns"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_is_never_overdrawn(policy: str, deal: str, watched: list[tuple[int, int]]) -> None:
    """Three micro-batches share 150 tokens: every request ends, none is forgotten."""
    work = [(40, 30), (10, 60), (25, 25), (60, 12), (5, 50), (33, 33), (18, 40), (50, 20)] * 2
    requests = [
        Request(i, range(prompt), output, arrival=0.02 * i)
        for i, (prompt, output) in enumerate(work)
    ]
    trace = simulate_pipeline(
        requests,
        "llama-13b",
        "a6000",
        stages=3,
        policy=policy,
        chunk_size=32,
        max_batch_size=3,
        cache_tokens=150,
        memory="pool",
        deal=deal,
        keep=True,
    )
    assert sorted(request_id for request_id, _ in trace.finished) == list(range(len(work)))
    assert [len(request.output) for request in requests] == [output for _, output in work]
    assert watched[-1] == (0, 0) and max(taken + flying for taken, flying in watched) > 120
    assert max(flying for _, flying in watched) > 1
    preemptions = sum(request.preemptions for request in requests)
    assert len(trace.requests.preempted) == preemptions
    if policy in ("orca", "sarathi", "sarathi_serve", "dynamic"):
        assert preemptions > 0


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(EVERY_POLICY),
    stages=st.integers(1, 3),
    micro_batches=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    spare=st.integers(0, 60),
    deal=st.sampled_from(["queue", "turns"]),
    work=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 15), st.sampled_from([0.0, 0.1, 2.0])),
        min_size=1,
        max_size=12,
    ),
)
def test_a_pool_serves_everybody(
    policy: str,
    stages: int,
    micro_batches: int,
    batch_size: int,
    spare: int,
    deal: str,
    work: list[tuple[int, int, float]],
) -> None:
    """Even where one request alone fills it."""
    requests = [Request(i, range(p), d, arrival=moment) for i, (p, d, moment) in enumerate(work)]
    with pytest.MonkeyPatch.context() as patch:
        seen = watch(patch)
        trace = simulate_pipeline(
            requests,
            "llama-13b",
            "a6000",
            stages=stages,
            micro_batches=micro_batches,
            policy=policy,
            chunk_size=16,
            max_batch_size=batch_size,
            cache_tokens=max(request.most_cached for request in requests) + spare,
            memory="pool",
            deal=deal,
        )
    assert len(trace.finished) == len(work) and seen[-1] == (0, 0)
