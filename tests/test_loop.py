"""Requests that come and go between two steps of the loop; how long a prefill may take; and one
memory for all micro-batches of a pipeline.
"""

import math

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
from scheduler import (
    POLICIES,
    ChunkedOnly,
    Dynamic,
    RequestLevel,
    Sarathi,
    SarathiServe,
    make_scheduler,
)
from tests.oracle import check_books


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


def check_end(loop: Loop, requests: list[Request], cancelled: list[Request]) -> None:
    """Nothing is left anywhere; who was not cancelled has the tokens that it gets alone."""
    check_books(loop.executor, [loop.scheduler])
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
    check_books(loop.executor, [loop.scheduler])


# ---------------------------------------------------------------------------------------- at random


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
