"""The bridge between a server and the loop: whatever clients do, each gets its own tokens, and
nothing of a request that has ended is kept.
"""

import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch

from batch import Batch, Request
from command.checks import UserError
from configs import GPUS, MODELS
from costmodel import requests_that_fit
from engine import LLM, SamplingParams
from loading.prompts import make_requests
from loop import Loop
from pipeline import simulate_pipeline
from scheduler import POLICIES, SarathiServe, Scheduler, make_scheduler
from simulate import CostExecutor, make_cost_model, simulate
from tests.oracle import check_runner
from web.priced import Clock, PricedEngine
from web.real import MOST_LOGPROBS, RealEngine
from web.recent import RecentTrace
from web.runner import LATEST, SOONEST, Delta, Full, Runner, Stopping, take_over

NAMES = [*POLICIES, "dynamic:12,6", "vllm_v0:40"]
PATIENCE = 60.0  # s until a test gives up


class Clients:
    """Collects what a runner delivers, and what it tells.

    deltas: by tag. events: all of them. at: iteration -> what to do after it (the engine thread
    does it, so that the moment is the same in each run).
    """

    def __init__(self, engine: object, queue: int = 1000, **more: object):
        self.deltas: dict[object, list[Delta]] = defaultdict(list)
        self.events: list[dict] = []
        self.at: dict[int, list[Callable[[], object]]] = defaultdict(list)
        self.ended = threading.Condition()
        self.runner = Runner(engine, queue=queue, deliver=self.deliver, **more)
        self.runner.watch(self.watch)

    def deliver(self, news: list[tuple[object, Delta]]) -> None:
        with self.ended:
            for tag, delta in news:
                self.deltas[tag].append(delta)
            self.ended.notify_all()

    def watch(self, event: dict) -> None:
        self.events.append(event)
        if event["type"] == "iteration":
            for do in self.at.pop(event["n"], ()):
                do()

    def wait(self, tags: Sequence[object]) -> None:
        def done() -> bool:
            return all(self.reason(tag) for tag in tags)

        with self.ended:
            assert self.ended.wait_for(done, PATIENCE), "a stream did not end"

    def reason(self, tag: object) -> str | None:
        return self.deltas[tag][-1].finish_reason if self.deltas[tag] else None

    def tokens(self, tag: object) -> list[int]:
        """Of a stream that has ended: it ended once, at its end."""
        *before, last = self.deltas[tag]
        assert last.finish_reason, f"{tag} goes on"
        assert not any(delta.finish_reason for delta in before), f"{tag} ended twice"
        return [delta.token for delta in self.deltas[tag] if delta.token is not None]

    def told(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["type"] == kind]

    def finish(self) -> None:
        """Run all to its end. Then nothing of any request may be left."""
        runner = self.runner
        if not runner.thread.is_alive():
            runner.start()
        assert runner.drain(PATIENCE), "requests are left"
        runner.close()
        assert not runner.thread.is_alive()
        check_runner(runner)
        assert sorted(event["id"] for event in self.told("queued")) == sorted(
            event["id"] for event in self.told("ended")
        )


class FastClock(Clock):
    """Nobody waits: the clock is set forward. In a session of tests a second is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    def wait(self, seconds: float) -> None:
        self.moment += seconds


@pytest.fixture
def llm(small: str) -> LLM:
    """A model whose greedy tokens vary: weights ten times as large, as in `conftest.tiny_model`."""
    return new_llm(small)


def new_llm(name: str, **options: object) -> LLM:
    options = {"max_batch_size": 4, "max_length": 64, "chunk_size": 8} | options
    made = LLM(name, dtype="float64", fast=False, **options)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    return made


def draw_prompts(draw: random.Random, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 40 tokens, and how to sample: half greedy, half drawn."""
    prompts = [[draw.randrange(97) for _ in range(draw.randint(1, 40))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=draw.randint(1, 20), temperature=draw.choice((0.0, 0.8)), top_p=0.9, seed=i
        )
        for i in range(count)
    ]
    return prompts, params


def requests_for(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
    return make_requests(
        prompts, params, None, encode=None, vocab_size=97, stop_ids=llm.stop_ids, seed=0
    )


def alone(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """What `LLM.generate` gives for each prompt by itself."""
    outputs = [llm.generate([prompt], [own]) for prompt, own in zip(prompts, params, strict=True)]
    return [output[0].token_ids for output in outputs]


# ------------------------------------------------------------------------------------ the policies


def test_half_prefilled_requests_wait_in_their_order_before_all_others() -> None:
    """And the new policy takes over the decodes, the memory and the queue as they are."""
    old, new = [make_scheduler("sarathi_serve", 4, size, 200) for size in (16, 64)]
    requests = [Request(i, range(size), 9) for i, size in enumerate((4, 4, 40, 5, 6, 7))]
    loop = Loop(old, CostExecutor(make_cost_model("llama-13b", "a6000", 1, None, "sarathi")))
    for request in requests:
        loop.add(request)
    loop.step()  # 0 and 1 whole, a part of 2
    decoding, halved = requests[:2], requests[2:3]
    assert take_over(loop, new) == halved and loop.scheduler is new
    assert new.running == decoding and list(new.waiting) == requests[2:]
    assert new.memory.taken == sum(request.context for request in decoding) == 8
    assert new.memory.capacity == 200 and halved[0].preemptions == 1
    batch = new.schedule(0.0)
    assert batch.decodes == decoding and batch.chunks[0].request is halved[0]
    old, new = new, make_scheduler("orca", 4, 64, 200)
    new_chunks = [chunk.request for chunk in batch.chunks]
    assert len(new_chunks) == 2 and take_over(loop, new) == []  # admitted, but nothing has run
    assert list(new.waiting) == requests[2:] and new.memory.taken == 8


def test_a_policy_that_is_not_there_changes_nothing() -> None:
    clients = Clients(PricedEngine(clock=FastClock()))
    clients.runner.start()
    with pytest.raises(UserError, match="unknown policy 'sarathy'.*did you mean 'sarathi'"):
        clients.runner.switch("sarathy", 8).result(PATIENCE)
    assert clients.runner.state()["policy"] == "sarathi"
    clients.runner.submit([Request(0, range(300), 3)], ["a"])
    clients.wait(["a"])
    assert clients.reason("a") == "length" and not clients.told("failed")
    clients.finish()


def test_the_budget_is_told_where_a_policy_has_one() -> None:
    clients = Clients(PricedEngine(clock=FastClock()))
    clients.runner.start()
    wanted = {"sarathi": 64, "vllm_v0": None, "vllm_v0:512": 512, "orca": None, "dynamic:32,8": 32}
    for policy, budget in wanted.items():
        clients.runner.switch(policy, 64).result(PATIENCE)
        assert clients.runner.state()["budget"] == budget
    clients.finish()
    assert [event["budget"] for event in clients.told("switched")] == list(wanted.values())


def test_who_waits_is_told_as_a_prompt_starts_and_after_each_batch() -> None:
    clients = Clients(PricedEngine(max_batch_size=1, clock=FastClock()))
    clients.runner.submit([Request(0, range(9), 2) for _ in range(3)], "abc")
    clients.finish()
    assert [event["waiting"] for event in clients.told("started")] == [2, 1, 0]
    assert [event["waiting"] for event in clients.told("iteration")] == [2, 2, 1, 1, 0, 0]


# ----------------------------------------------------------------------------- clients come and go


def test_a_client_that_goes_away_frees_its_slot_at_the_next_step(llm: LLM) -> None:
    clients = Clients(RealEngine(llm))
    stays, goes, waits = [Request(0, [own], 20) for own in (1, 2, 3)]
    llm.max_batch_size = clients.runner.engine.max_batch_size = 2
    clients.runner._new_loop(clients.runner.engine.scheduler("sarathi", 8))  # with two slots
    clients.runner.submit([stays, goes, waits], ["stays", "goes", "waits"])
    clients.at[5].append(lambda: clients.runner.cancel(goes))
    clients.finish()
    sixth = clients.told("iteration")[5]
    assert [own for own, *_ in sixth["chunks"]] == [waits.request_id], "it has the slot at once"
    assert clients.reason("goes") == "abort" and goes.finish_reason == "abort"
    assert len(clients.tokens("goes")) == 4
    assert len(clients.tokens("stays")) == len(clients.tokens("waits")) == 20


def test_cancelling_twice_or_too_late_or_too_soon_does_nothing() -> None:
    clients = Clients(PricedEngine(clock=FastClock()))
    runner, request, stranger = clients.runner, Request(0, range(9), 50), Request(0, range(9), 3)
    runner.submit([request], ["a"])
    runner.cancel(stranger)  # it has the same id, and was never submitted
    clients.at[3].append(lambda: [runner.cancel(request) for _ in range(3)])
    runner.start()
    clients.wait(["a"])
    runner.cancel(request)
    clients.finish()
    assert len(clients.tokens("a")) == 3 and clients.reason("a") == "abort"
    assert [event["reason"] for event in clients.told("ended")] == ["abort"]


def sizes(*things: object) -> dict[str, int]:
    """The lengths of all containers that these objects have."""
    return {
        f"{type(thing).__name__}.{name}": len(value)
        for thing in things
        for name, value in vars(thing).items()
        if hasattr(value, "__len__") and not isinstance(value, str)
    }


def test_nothing_is_left_of_ten_thousand_clients_of_which_a_third_hang_up() -> None:
    draw, most = random.Random(7), 32 + 100
    engine = PricedEngine(max_batch_size=32, cache_tokens=600, policy="vllm_v0", clock=FastClock())
    largest: dict[str, int] = defaultdict(int)
    wanted: dict[int, int] = {}  # tag -> tokens
    room, reasons, counts = threading.Semaphore(most), {}, defaultdict(int)
    leaves: dict[int, tuple[int, Request]] = {}  # tag -> after so many tokens

    def deliver(news: list[tuple[int, Delta]]) -> None:
        for tag, delta in news:
            counts[tag] += delta.token is not None
            if delta.finish_reason:
                assert tag not in reasons, "it ended twice"
                reasons[tag] = delta.finish_reason
                leaves.pop(tag, None)
                room.release()
            elif tag in leaves and counts[tag] == leaves[tag][0]:
                runner.cancel(leaves.pop(tag)[1])
        loop = runner.loop
        for name, size in sizes(runner, loop, loop.trace, loop.scheduler, loop.executor).items():
            largest[name] = max(largest[name], size)

    runner = Runner(engine, queue=100, deliver=deliver)
    runner.loop.trace = RecentTrace(kept=200)
    runner.start()
    policies = list(POLICIES)
    for tag in range(10_000):
        request = Request(0, range(draw.randint(1, 60)), draw.randint(1, 20))
        wanted[tag] = request.max_tokens
        leaver = draw.random() < 1 / 3
        if leaver and draw.random() < 0.8:
            leaves[tag] = draw.randint(1, 8), request
        room.acquire()
        while True:
            try:
                runner.submit([request], [tag])
                break
            except Full:  # the end is told before the place is free
                threading.Event().wait(0.001)
        if leaver and tag not in leaves:
            runner.cancel(request)
        if tag % 1000 == 999:
            runner.switch(draw.choice(policies), draw.choice((40, 256)))
    assert runner.drain(PATIENCE)
    runner.close()
    check_runner(runner)
    assert set(reasons) == set(wanted) and set(reasons.values()) == {"length", "abort"}
    assert all(counts[tag] == wanted[tag] for tag in wanted if reasons[tag] == "length")
    assert 1500 < list(reasons.values()).count("abort") < 3500
    assert runner.state()["done"] == 10_000 and runner.state()["preemptions"] > 10
    allowed = {"RecentTrace.iterations", "RecentTrace.finished", "RecentTrace.cancelled"}
    assert {name for name, size in largest.items() if size > 2 * most} == set()
    assert {name for name, size in largest.items() if size == 200} == allowed


# ------------------------------------------------------------------- refusals, and how things end


def test_a_full_queue_says_when_to_come_back() -> None:
    """B run and `queue` wait. The next ones are refused, all or none."""
    clients = Clients(PricedEngine(max_batch_size=2, clock=FastClock()), queue=3)
    runner = clients.runner
    runner.submit([Request(0, range(9), 3) for _ in range(4)], "abcd")
    with pytest.raises(Full) as refused:
        runner.submit([Request(0, range(9), 3) for _ in range(2)], "ef")
    assert refused.value.retry_after == SOONEST, "nothing is known yet"
    runner.submit([Request(0, range(9), 3)], "e")
    with pytest.raises(Full):
        runner.submit([Request(0, range(9), 3)], "f")
    with pytest.raises(UserError, match="6 requests at once; the server holds 5"):
        runner.submit([Request(0, range(9), 3) for _ in range(6)], "ghijkl")
    clients.finish()
    assert set(clients.deltas) == set("abcde")
    assert runner.state()["done"] == 5


@pytest.mark.parametrize(("seconds", "waiting"), [(2.5, 1), (2.5, 3), (1e-6, 1), (1e4, 1)])
def test_the_time_to_come_back_is_measured(seconds: float, waiting: int) -> None:
    """Requests of one token that take so many seconds each, one after another."""
    engine = PricedEngine(max_batch_size=1, clock=FastClock())
    engine.cost_model.seconds = lambda batch: seconds
    clients = Clients(engine, queue=9)
    runner, found = clients.runner, []

    def come() -> None:
        with pytest.raises(Full) as refused:
            runner.submit([Request(0, range(9), 1) for _ in range(waiting + 5)], range(90, 99))
        found.append(refused.value.retry_after)

    runner.submit([Request(0, range(9), 1) for _ in range(10)], range(10))
    clients.at[6].append(come)  # five have ended, and one ends now
    runner.start()
    clients.wait(range(10))
    clients.finish()
    likely = math.ceil((waiting + 5) * 6 * seconds / 5)
    assert found == [min(max(SOONEST, likely), LATEST)]


def test_an_hour_without_work_does_not_count() -> None:
    engine = PricedEngine(max_batch_size=1, clock=FastClock())
    engine.cost_model.seconds = lambda batch: 2.0
    clients = Clients(engine, queue=9)
    runner, found = clients.runner, []

    def come() -> None:
        with pytest.raises(Full) as refused:
            runner.submit([Request(0, range(9), 1) for _ in range(8)], range(90, 98))
        found.append(refused.value.retry_after)

    runner.start()
    for round_, first in enumerate((0, 10)):
        clients.at[10 * round_ + 5].append(come)  # four have ended, and one ends now
        runner.submit([Request(0, range(9), 1) for _ in range(10)], range(first, first + 10))
        clients.wait(range(first, first + 10))
        while runner.ends:  # it has gone to sleep
            threading.Event().wait(0.001)
        engine.clock.moment += 3600
    clients.finish()
    assert found == [8 * 5 * 2.0 / 4] * 2


def test_draining_runs_what_is_here_and_takes_nothing_new() -> None:
    clients = Clients(PricedEngine(max_batch_size=2, clock=FastClock()))
    runner = clients.runner
    runner.submit([Request(0, range(9), 30) for _ in range(6)], range(6))
    refused: list[type] = []

    def come() -> None:
        try:
            runner.submit([Request(0, range(9), 1)], ["late"])
        except Stopping as error:
            refused.append(type(error))

    clients.at[1].append(lambda: threading.Thread(target=runner.drain, args=[PATIENCE]).start())
    clients.at[60].append(come)
    clients.finish()
    assert refused == [Stopping] and "late" not in clients.deltas
    assert [len(clients.tokens(tag)) for tag in range(6)] == [30] * 6
    assert not runner.state()["alive"] and runner.state()["draining"]


def test_what_is_left_after_the_patience_is_aborted(llm: LLM) -> None:
    clients = Clients(RealEngine(llm))
    runner = clients.runner
    runner.submit([Request(0, [tag], 60) for tag in range(9)], range(9))
    aborting = threading.Event()
    clients.at[8].append(lambda: aborting.wait(PATIENCE))
    runner.start()
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(runner.drain(0)))
    thread.start()
    while not runner.inbox and thread.is_alive() and not runner.stopping:
        thread.join(0.01)
    aborting.set()
    thread.join()
    runner.close()
    check_runner(runner)
    assert drained == [False]
    assert {clients.reason(tag) for tag in range(9)} == {"abort"}


def test_closing_ends_a_long_batch_and_all_that_waits() -> None:
    """The batch would take minutes. Who waits for an answer gets one, and closing twice is fine."""
    clients = Clients(PricedEngine("gpt3-175b", max_batch_size=8, policy="vllm_v0"))
    runner = clients.runner
    runner.submit([Request(0, range(4000), 9) for _ in range(20)], range(20))
    runner.start()
    while not runner.state()["running"]:
        threading.Event().wait(0.01)
    runner.submit([Request(0, range(9), 9)], ["late"])
    change = runner.switch("sarathi", 256)
    runner.close()
    assert not runner.state()["alive"]
    assert {clients.reason(tag) for tag in [*range(20), "late"]} == {"abort"}
    assert change.done()
    with pytest.raises(Stopping):
        runner.submit([Request(0, range(9), 9)], ["later"])
    with pytest.raises(Stopping):
        runner.switch("sarathi", 256)
    assert runner.drain(0)
    runner.cancel(Request(0, range(9), 9))
    runner.close()


def test_what_comes_as_the_runner_closes_is_answered() -> None:
    """A client hangs up, and another changes the policy, during the last step."""
    clients = Clients(PricedEngine(clock=FastClock()))
    runner, here, go_on = clients.runner, threading.Event(), threading.Event()
    request = Request(0, range(9), 50)
    runner.submit([request], ["a"])
    clients.at[3].append(lambda: here.set() or go_on.wait(PATIENCE))
    runner.start()
    assert here.wait(PATIENCE)
    runner.cancel(request)
    change = runner.switch("orca", 64)
    closing = threading.Thread(target=runner.close)
    closing.start()
    while not runner.closed:
        closing.join(0.01)
    go_on.set()
    closing.join()
    assert [event["reason"] for event in clients.told("ended")] == ["abort"]
    with pytest.raises(Stopping):
        change.result(PATIENCE)
    assert runner.state()["policy"] == "sarathi" and not runner.inbox


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, [1] * 60, 9), "60 prompt tokens .* exceed the 64 tokens"),
        (Request(0, [1] * 30, 21), "can never run.* 50 tokens of cache, and it holds 40"),
        (Request(0, [1, 97], 9), "token id 97 is not in 0 .. 96"),
        (Request(0, [-1, 3], 9), "token id -1 is not in 0 .. 96"),
    ],
)
def test_what_can_never_run_is_refused_with_all_that_came_with_it(
    small: str, request_: Request, message: str
) -> None:
    clients = Clients(RealEngine(new_llm(small, cache_tokens=40)))
    with pytest.raises(UserError, match=message):
        clients.runner.submit([Request(0, [1], 3), request_], ["fine", "bad"])
    clients.finish()
    assert not clients.deltas and not clients.events


# --------------------------------------------------------------------------------- what goes wrong


def test_an_engine_that_fails_ends_all_streams_and_serves_the_next(llm: LLM) -> None:
    expected = alone(llm, [[5, 6, 7]], [SamplingParams(max_tokens=9)])[0]
    clients = Clients(RealEngine(llm))
    runner = clients.runner

    def fails(*_: object) -> None:
        raise RuntimeError("the device is\nlost")

    clients.at[4].append(lambda: setattr(runner.loop.executor, "forward", fails))
    runner.submit([Request(0, [tag], 30) for tag in range(6)], range(6))  # four run, two wait
    runner.start()
    clients.wait(range(6))
    assert {clients.reason(tag) for tag in range(6)} == {"error"}
    assert [len(clients.tokens(tag)) for tag in range(6)] == [4, 3, 2, 1, 0, 0]
    state = runner.state()
    assert state["error"] == r"RuntimeError: the device is\nlost"
    assert state["failures"] == 1 and state["alive"]
    runner.submit([Request(0, [5, 6, 7], 9)], ["next"])
    clients.finish()
    assert clients.tokens("next") == expected
    moments = [event["t"] for event in clients.events if event["type"] != "iteration"]
    assert moments == sorted(moments), "the clock goes on"


def policy_that(name: str, **own: object) -> type[SarathiServe]:
    """Sarathi-Serve, but for these methods and attributes."""
    return type(name.title(), (SarathiServe,), {"name": name, **own})


def forgets(self: Scheduler, batch: Batch, tokens: list[int]) -> list[Request]:
    ended = SarathiServe.update(self, batch, tokens)
    self.running.clear()
    self.waiting.clear()
    return ended


def twice(self: Scheduler, now: float) -> Batch | None:
    batch = SarathiServe.schedule(self, now)
    return batch and Batch(batch.chunks, batch.decodes * 2)


def asks(self: Scheduler, now: float) -> Batch | None:
    batch = SarathiServe.schedule(self, now)
    self.cost(batch)
    return batch


def exits(self: Scheduler, now: float) -> Batch | None:
    raise SystemExit


def keeps(self: Scheduler, request: Request | None = None) -> Request:
    raise KeyError("mine")


def test_a_policy_that_will_not_let_go_is_replaced(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked: a switch away from it loses no request."""
    monkeypatch.setitem(POLICIES, "holds", policy_that("holds", preempt=keeps))
    prompts = [[tag] * 20 for tag in range(3)]
    expected = alone(llm, prompts, [SamplingParams(max_tokens=9)] * 3)
    clients, changes = Clients(RealEngine(llm)), []
    clients.runner.submit([Request(0, prompt, 9) for prompt in prompts], range(3))
    for moment, policy in ((2, "holds"), (5, "orca")):
        clients.at[moment].append(
            lambda policy=policy: changes.append(clients.runner.switch(policy, 8))
        )
    clients.finish()
    assert [len(change.result()) for change in changes] == [1, 1], "both preempt"
    assert [clients.tokens(tag) for tag in range(3)] == expected


def imagines(self: Scheduler, now: float) -> Batch | None:
    """It preempts a request that has never run."""
    self._preempted.append(self.waiting[-1])
    return SarathiServe.schedule(self, now)


LAZY = policy_that("lazy", schedule=lambda self, now: None)
IDLE = policy_that("idle", has_work=False)
TWICE = policy_that("twice", schedule=twice)
ASKS = policy_that("asks", schedule=asks)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (LAZY, "schedules nothing"),
        (IDLE, "policy 'idle' (Idle): has_work is False, while requests wait or run"),
        (
            policy_that("loses", update=forgets),
            "a policy has lost 3 requests: they neither wait nor run",
        ),
        (policy_that("exits", schedule=exits), "SystemExit"),
        (policy_that("imagines", schedule=imagines), "2"),
        (TWICE, "in the batch twice"),
        (ASKS, "asks what a batch costs"),
    ],
)
def test_a_policy_that_fails_ends_all_streams_and_can_be_replaced(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, policy: type[Scheduler], message: str
) -> None:
    monkeypatch.setitem(POLICIES, policy.name, policy)
    expected = alone(llm, [[5] * 20], [SamplingParams(max_tokens=9)])[0]
    clients = Clients(RealEngine(llm))
    runner, futures = clients.runner, []
    runner.submit([Request(0, [tag] * 20, 30) for tag in range(3)], range(3))
    clients.at[4].append(lambda: futures.append(runner.switch(policy.name, 8)))
    runner.start()
    clients.wait(range(3))
    assert {clients.reason(tag) for tag in range(3)} == {"error"}
    assert message in runner.state()["error"] and runner.state()["failures"] == 1
    runner.switch("sarathi", 8).result(PATIENCE)
    runner.submit([Request(0, [5] * 20, 9)], ["next"])
    clients.finish()
    assert clients.tokens("next") == expected
    assert all(future.done() for future in futures)


def test_a_policy_that_denies_its_work_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server, too: `generate` would wait for ever, and a pipeline would end early."""
    monkeypatch.setitem(POLICIES, "idle", IDLE)
    with pytest.raises(UserError, match="has_work is False, while requests wait or run"):
        simulate([Request(0, range(9), 5)], policy="idle")
    with monkeypatch.context() as patch:
        patch.setattr(IDLE, "schedule", lambda self, now: None)
        with pytest.raises(UserError, match="has_work is False, while requests wait or run"):
            simulate_pipeline([Request(0, range(9), 5)], policy="idle", stages=2)
    llm.policy = "idle"
    with pytest.raises(UserError, match="has_work is False, while requests wait or run"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))


def test_a_policy_of_ones_own_that_fails_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First to the one before it, then to the first. Ours stay, whatever fails under them."""
    for policy in (LAZY, TWICE):
        monkeypatch.setitem(POLICIES, policy.name, policy)
    clients = Clients(PricedEngine(policy="orca", chunk_size=99, clock=FastClock()))
    runner = clients.runner
    runner.start()
    for policy, chunk_size in (("vllm_v0", 64), ("lazy", 8), ("twice", 16)):
        runner.switch(policy, chunk_size).result(PATIENCE)
    for tag, policy, chunk_size, before in (
        ("a", "lazy", 8, "twice"), ("b", "orca", 99, "lazy"), ("c", "orca", 99, None),
    ):  # fmt: skip
        if before is None:  # the executor's fault, under a policy of ours
            runner.switch("vllm_v0", 64).result(PATIENCE)
            runner.switch("orca", 99).result(PATIENCE)
            runner.loop.executor.execute = lambda batch: 1 / 0
        caplog.clear()
        runner.submit([Request(0, range(9), 5)], [tag])
        clients.wait([tag])
        assert clients.reason(tag) == "error"
        state, told = runner.state(), f"{before} gives way to {policy}, C = {chunk_size}"
        assert (state["policy"], state["chunk_size"]) == (policy, chunk_size)
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ["the engine failed and was restarted", told][: 1 + bool(before)]
        assert (told in clients.told("failed")[-1]["error"]) == bool(before)
        if before:
            last = clients.told("switched")[-1]
            assert (last["policy"], last["chunk_size"]) == (policy, chunk_size)
    runner.submit([Request(0, range(9), 5)], ["next"])
    clients.finish()
    assert len(clients.tokens("next")) == 5 and runner.state()["failures"] == 3


class Stumbles(SarathiServe):
    """Fails between two steps: as it is asked whether there is work."""

    name = "stumbles"

    @property
    def has_work(self) -> bool:
        if not self.waiting:
            raise KeyError("mine")
        return True


class Once(LAZY):
    """Schedules nothing, and cannot be made a second time."""

    name = "once"
    made = 0

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        Once.made += 1
        if Once.made > 1:
            raise UserError("it is there already")


@pytest.mark.parametrize(
    ("first", "later", "told"),
    [
        ("orca", ["stumbles"], "stumbles gives way to orca, C = 99"),
        ("stumbles", [], None),  # no policy was before it
        ("orca", ["once", "lazy"],
         "lazy gives way to orca, C = 99; once cannot be made again: it is there already"),
        ("once", [],
         "once gives way to sarathi_serve, C = 99; once cannot be made again: it is there already"),
    ],
)  # fmt: skip
def test_the_engine_outlives_a_policy_that_fails_between_steps_or_as_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    first: str,
    later: list[str],
    told: str | None,
) -> None:
    for policy in (Stumbles, Once, LAZY):
        monkeypatch.setitem(POLICIES, policy.name, policy)
    engine = PricedEngine(policy=first, chunk_size=99, clock=FastClock())
    monkeypatch.setattr(Once, "made", 0)  # the engine has tried its policy
    clients = Clients(engine)
    runner = clients.runner
    runner.start()
    for policy in later:
        runner.switch(policy, 8).result(PATIENCE)
    for failures, tag in enumerate(("a", "b") if told is None else ("a",), 1):
        caplog.clear()
        runner.submit([Request(0, range(9), 5)], [tag])
        clients.wait([tag])
        assert clients.reason(tag) == "error" and runner.state()["failures"] == failures
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ["the engine failed and was restarted", *([told] if told else [])]
    if told:
        switched, words = clients.told("switched")[-1], told.replace(",", "").split()
        assert switched["policy"] == runner.state()["policy"] == words[4]
        assert (switched["chunk_size"], switched["preempted"]) == (99, [])
    else:
        runner.switch("orca", 99).result(PATIENCE)
    runner.submit([Request(0, range(9), 5)], ["next"])
    clients.finish()
    assert len(clients.tokens("next")) == 5 and runner.state()["failures"] == failures


def test_a_policy_that_comes_later_can_ask_what_a_batch_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "asks", ASKS)
    clients = Clients(PricedEngine(clock=FastClock()))
    clients.runner.submit([Request(0, range(9), 9)], ["a"])
    clients.at[3].append(lambda: clients.runner.switch("asks", 64))
    clients.finish()
    assert len(clients.tokens("a")) == 9 and clients.reason("a") == "length"


def test_who_listens_badly_does_not_stop_the_engine() -> None:
    clients = Clients(PricedEngine(clock=FastClock()))
    runner, calls = clients.runner, []

    def bad(event: dict) -> None:
        calls.append(event)
        raise ValueError("a listener of somebody's")

    deliver = runner.deliver

    def deliver_badly(news: list) -> None:
        deliver(news)
        raise OSError("nobody is there")

    runner.watch(bad)
    events: list[dict] = []
    unwatch = runner.watch(events.append)
    runner.deliver = deliver_badly
    clients.at[3].append(unwatch)
    runner.submit([Request(0, range(9), 5)], ["a"])
    clients.finish()
    assert len(calls) == 1 and len(clients.tokens("a")) == 5
    assert [event["type"] for event in events] == ["queued", "started"] + ["iteration"] * 3
    assert runner.state()["failures"] == 0


# --------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_the_models_logits(small: str) -> None:
    """Computed apart, without a cache: greedy and drawn tokens, also after a preemption."""
    draw = random.Random(5)
    llm = new_llm(small, cache_tokens=70)
    prompts, params = draw_prompts(draw, 12)
    clients = Clients(RealEngine(llm))
    requests = requests_for(llm, prompts, params)
    for index, request in enumerate(requests):
        clients.runner.submit([request], [index], [None, 0, 3, MOST_LOGPROBS][index % 4])
    clients.finish()
    assert clients.runner.state()["preemptions"]
    for index, prompt in enumerate(prompts):
        tokens, most = clients.tokens(index), [None, 0, 3, MOST_LOGPROBS][index % 4]
        with torch.inference_mode():
            logits = llm.model.forward_full(torch.tensor([prompt + tokens]))[0]
        rows = logits.log_softmax(-1)[len(prompt) - 1 :]  # (tokens + 1, vocab)
        for row, delta in zip(rows, clients.deltas[index], strict=False):
            if most is None:
                assert delta.logprob is None and delta.top == ()
                continue
            assert delta.logprob == pytest.approx(float(row[delta.token]), abs=1e-9)
            best = row.sort(descending=True)
            assert [token for token, _ in delta.top] == best.indices[:most].tolist()
            assert [p for _, p in delta.top] == pytest.approx(best.values[:most].tolist(), abs=1e-9)


# -------------------------------------------------------------------------------- the priced engine


@pytest.mark.parametrize("policy", NAMES)
def test_real_time_is_that_of_the_simulator(policy: str) -> None:
    """The same batches at the same moments, and all of the runner's own work takes no time."""
    draw = random.Random(11)
    options = {"policy": policy, "chunk_size": 256, "max_batch_size": 8, "cache_tokens": 9000}
    options |= {"tp": 2, "link": "nvlink-a100", "software": "sarathi_serve"}

    def make() -> list[Request]:
        draw.seed(11)
        lengths = [(draw.randint(10, 3000), draw.randint(1, 30)) for _ in range(20)]
        return [Request(i, range(prompt), most) for i, (prompt, most) in enumerate(lengths)]

    trace = simulate(make(), "yi-34b", "a100-80gb", **options)
    engine = PricedEngine("yi-34b", "a100-80gb", max_length=4096, clock=FastClock(), **options)
    clients = Clients(engine)
    clients.runner.submit(make(), range(20))
    clients.finish()
    iterations = clients.told("iteration")
    assert len(iterations) == len(trace.iterations)
    for event, iteration in zip(iterations, trace.iterations, strict=True):
        assert event["t"] == pytest.approx(iteration.start, abs=1e-9)
        assert event["seconds"] == iteration.seconds
        assert [(i, *rest) for i, _, *rest in event["chunks"]] == [
            (i, start, n, start + n == whole) for i, start, n, whole in iteration.chunks
        ]
        assert tuple(own for own, _ in event["decodes"]) == iteration.decodes
    for tag in range(20):
        moments = [delta.moment for delta in clients.deltas[tag]]
        assert moments == pytest.approx(trace.lives[tag].tokens, abs=1e-9)
        assert set(clients.tokens(tag)) == {0}


def test_the_batch_size_is_what_the_memory_holds() -> None:
    for model, gpu, length in (
        ("llama-13b", "a6000", 1024), ("llama-13b", "a6000", None), ("llama3.1-8b", "h100", None),
    ):  # fmt: skip
        gpu = next(name for name in GPUS if name.startswith(gpu))
        longest = length or min(MODELS[model].max_length, 8192)
        expected = min(requests_that_fit(MODELS[model], GPUS[gpu], longest), 256)
        assert expected > 1
        assert PricedEngine(model, gpu, max_length=length).max_batch_size == expected
    long = PricedEngine("llama3.1-8b", max_length=MODELS["llama3.1-8b"].max_length)
    assert long.max_batch_size == 1 < PricedEngine("llama3.1-8b").max_batch_size
    one, two = [PricedEngine(gpu="a100-80gb", tp=tp).max_batch_size for tp in (1, 2)]
    assert two > 2 * one, "the weights are there once"
    assert PricedEngine(max_batch_size=3).max_batch_size == 3
    assert PricedEngine("demo", "h200").max_batch_size == 256 if "demo" in MODELS else True


def test_what_it_costs_to_know_the_time_is_part_of_it() -> None:
    """A batch of 2 s ends 2 s after its start, however slowly the cost model thinks."""
    engine = PricedEngine(clock=FastClock())

    def seconds(batch: Batch) -> float:
        engine.clock.moment += 0.25
        return 2.0

    engine.cost_model.seconds = seconds
    clients = Clients(engine)
    clients.runner.submit([Request(0, range(9), 5)], ["a"])
    clients.finish()
    assert [event["t"] for event in clients.told("iteration")] == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_clock_that_is_stopped_waits_no_more() -> None:
    clock = Clock()
    thread = threading.Thread(target=clock.wait, args=[1e6])
    thread.start()
    clock.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_placeholders_stand_for_words() -> None:
    tokenizer = PricedEngine().tokenizer
    assert tokenizer.encode("one two\nthree") == [0, 0, 0] and tokenizer.encode("") == [0]
    assert tokenizer.decode([0, 0]) == " · ·"


def test_a_future_that_nobody_waits_for_changes_nothing() -> None:
    clients = Clients(PricedEngine(clock=FastClock()))
    future: Future = clients.runner.switch("orca", 64)
    assert future.cancel()
    clients.finish()
    assert clients.runner.state()["policy"] == "sarathi"
