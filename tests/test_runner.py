"""The bridge between a server and the loop: whatever clients do, each gets its own tokens, and
nothing of a request that has ended is kept.
"""

import asyncio
import json
import random
import threading
from collections.abc import Callable
from unittest import mock

import pytest
from shared import PlainLLM, small_llm
from watch import wait_for

from batch import Batch, Request
from command.checks import UserError
from configs import GPUS, MODELS
from costmodel import requests_that_fit
from loop import Loop
from more.simulate import CostExecutor, make_cost_model, simulate
from more.web.api import Api, router
from more.web.priced import Clock, PricedEngine
from more.web.real import RealEngine
from more.web.runner import Full, Stopping, take_over
from nano_sarathi import LLM, SamplingParams
from scheduler import POLICIES, SarathiServe, make_scheduler
from tests.oracle import PATIENCE, Clients, check_runner

NAMES = ["sarathi", "orca", "hybrid_only", "dynamic:12,6", "vllm_v0:40"]


class FastClock(Clock):
    """Nobody waits: the clock is set forward. In a session of tests a second is nothing."""

    moment = 0.0

    def now(self) -> float:
        return self.moment

    def wait(self, seconds: float) -> None:
        self.moment += seconds


def priced(**options: object) -> Clients:
    return Clients(PricedEngine(clock=FastClock(), **options))


@pytest.fixture
def llm(small: str) -> LLM:
    return small_llm(PlainLLM, max_batch_size=4, max_length=64, chunk_size=8)


def alone(llm: LLM, prompt: list[int], most: int) -> list[int]:
    """What `LLM.generate` gives for this prompt by itself."""
    return llm.generate([prompt], SamplingParams(max_tokens=most))[0].token_ids


def test_half_prefilled_requests_wait_in_their_order_before_all_others() -> None:
    """And the new policy takes over the decodes, the memory and the queue as they are."""
    old, new = [make_scheduler("sarathi_serve", 4, size, 200) for size in (16, 64)]
    requests = [Request(i, range(size), 9) for i, size in enumerate((4, 4, 40, 5, 6, 7))]
    loop = Loop(old, CostExecutor(make_cost_model("llama-13b", "a6000", 1, None, "xformers-2023")))
    for request in requests:
        loop.add(request)
    loop.step()  # 0 and 1 whole, a part of 2
    decoding = requests[:2]
    halved = requests[2:3]
    assert take_over(loop, new) == halved and loop.scheduler is new
    assert new.running == decoding and list(new.waiting) == requests[2:]
    assert new.memory.taken == sum(request.context for request in decoding) == 8
    assert new.memory.capacity == 200 and halved[0].preemptions == 1
    batch = new.schedule(0.0)
    assert batch.decodes == decoding and batch.chunks[0].request is halved[0]
    old = new
    new = make_scheduler("orca", 4, 64, 200)
    new_chunks = [chunk.request for chunk in batch.chunks]
    assert len(new_chunks) == 2 and take_over(loop, new) == []  # admitted, but nothing has run
    assert list(new.waiting) == requests[2:] and new.memory.taken == 8


def test_a_policy_that_is_not_there_changes_nothing() -> None:
    """Nor does a switch that nobody waits for any more."""
    clients = priced()
    assert clients.runner.switch("orca", 64).cancel()
    clients.runner.start()
    with pytest.raises(UserError, match="unknown policy 'sarathy'.*did you mean 'sarathi'"):
        clients.runner.switch("sarathy", 8).result(PATIENCE)
    assert clients.runner.state()["policy"] == "sarathi"
    clients.submit("a", range(300), 3)
    clients.finish()
    assert clients.reason("a") == "length" and not clients.told("failed")


class Strict(SarathiServe):
    """It has a rule of its own, in `check`."""

    name = "strict"

    def check(self, request: Request) -> None:
        super().check(request)
        if request.tags.get("user") == "eve":
            raise UserError("not for eve")


@pytest.mark.parametrize(
    ("policy", "tags", "said"),
    [
        ("qoserve", {"tbt": "soon"}, "the tag tbt is 'soon'; it must be a number of seconds"),
        ("srpt:30", {"predicted_tokens": "12 or so"}, "the tag predicted_tokens is '12 or so'"),
        ("strict", {"user": "eve"}, "not for eve"),
    ],
)
def test_a_switch_refuses_whom_the_new_policy_cannot_serve_and_nobody_else(
    policy: str, tags: dict[str, str], said: str
) -> None:
    """Of two slots: one decodes and one is half prefilled, two wait, one comes just before the
    switch, and one has been let in by the old policy when the new one is in force.
    """
    POLICIES["strict"] = Strict
    clients = Clients(PricedEngine(max_batch_size=2, chunk_size=64, clock=FastClock()))
    runner = clients.runner
    sizes = {"decodes": 9, "half": 300, "waits": 9, "waits, too": 200}

    def come(name: str, size: int) -> None:
        """One that all can serve, and one that the new policy cannot."""
        runner.submit([Request(0, range(size), 9)], [f"good: {name}"])
        runner.submit([Request(0, range(size), 9, tags=tags)], [f"bad: {name}"])

    def change() -> None:
        come("just before", 9)
        runner.switch(policy, 64)
        come("just after", 9)

    for name, size in sizes.items():
        come(name, size)
    clients.at[3].append(change)
    runner.start()
    clients.wait(())
    clients.finish()
    assert runner.state()["failures"] == 0 and runner.state()["policy"] == policy
    for tag, deltas in clients.deltas.items():
        good = str(tag).startswith("good")
        last = deltas[-1]
        assert (last.finish_reason, bool(last.refused)) == (
            ("length", False) if good else ("error", True)
        )
        if good:
            assert len(clients.tokens(tag)) == 9
        else:
            assert last.refused.startswith(f"policy {policy!r} refuses it: ")
            assert said in last.refused and "\n" not in last.refused
    assert len(clients.deltas) == 2 * len(sizes) + 4
    with pytest.raises(UserError, match=said):
        runner.loop.scheduler.check(Request(0, [1], 1, tags=tags))


def test_the_budget_is_told_where_a_policy_has_one() -> None:
    clients = priced()
    wanted = {"sarathi": 64, "vllm_v0": None, "vllm_v0:512": 512, "orca": None, "dynamic:32,8": 32}
    for policy in wanted:
        clients.runner.switch(policy, 64)
    clients.finish()
    assert clients.runner.state()["budget"] == 32
    assert [event["budget"] for event in clients.told("switched")] == list(wanted.values())


def test_cancelling_twice_or_too_late_or_too_soon_does_nothing() -> None:
    clients = priced()
    runner = clients.runner
    request = Request(0, range(9), 50)
    stranger = Request(0, range(9), 3)
    runner.submit([request], ["a"])
    runner.cancel(stranger)  # it has the same id, and was never submitted
    clients.at[3].append(lambda: [runner.cancel(request) for _ in range(3)])
    runner.start()
    clients.wait(["a"])
    runner.cancel(request)
    clients.finish()
    assert len(clients.tokens("a")) == 3 and clients.reason("a") == "abort"
    assert [event["reason"] for event in clients.told("ended")] == ["abort"]


def test_a_full_queue_takes_all_or_none() -> None:
    clients = Clients(PricedEngine(max_batch_size=2, clock=FastClock()), queue=3)
    clients.submit("abcd", range(9), 3)
    with pytest.raises(Full):
        clients.submit("ef", range(9), 3)
    clients.submit("e", range(9), 3)
    with pytest.raises(Full):
        clients.submit("f", range(9), 3)
    with pytest.raises(UserError, match="6 requests at once; the server holds 5"):
        clients.submit("ghijkl", range(9), 3)
    clients.finish()
    assert set(clients.deltas) == set("abcde")
    assert clients.runner.state()["done"] == 5


def test_health_counts_who_runs_and_who_waits() -> None:
    """Step by step, by hand: two slots, and requests of 3, 1, 2 and 1 output tokens. Who has come
    and is not in a slot waits: also before the engine has seen it.
    """
    engine = PricedEngine(max_batch_size=2, policy="orca", clock=FastClock())
    api = Api(engine, "m", None)
    runner = Clients(engine).runner
    api.runner = runner
    [health] = [each.endpoint for each in router(api).routes if each.path == "/health"]
    found = []

    def then(*acts: Callable[[], object]) -> None:
        for act in acts:
            act()
        told = json.loads(asyncio.run(health()).body)
        found.append((told["running"], told["waiting"]))

    step = runner._step, runner._flush
    late = Request(0, range(4), 9)
    then(lambda: runner.submit([Request(0, range(4), n) for n in (3, 1, 2, 1)], "abcd"))
    then(runner._read_inbox)
    then(*step)
    then(*step)
    then(lambda: runner.submit([late], "e"))
    then(lambda: runner.cancel(late), runner._read_inbox, runner._flush)
    then(*step)
    then(*step)
    assert found == [(0, 4), (0, 4), (1, 2), (2, 1), (2, 2), (2, 1), (0, 1), (0, 0)]


def test_draining_runs_what_is_here_and_takes_nothing_new() -> None:
    clients = priced(max_batch_size=2)
    refused = []
    clients.submit(range(6), range(9), 30)

    def come() -> None:
        with pytest.raises(Stopping):
            clients.submit(["late"], range(9), 1)
        refused.append("late")

    drain = threading.Thread(target=clients.runner.drain, args=[PATIENCE])
    clients.at[1].append(drain.start)
    clients.at[60].append(come)
    clients.finish()
    assert refused == ["late"] and "late" not in clients.deltas
    assert [len(clients.tokens(tag)) for tag in range(6)] == [30] * 6


def test_what_is_left_after_the_patience_is_aborted(llm: LLM) -> None:
    clients = Clients(RealEngine(llm))
    drained = []
    runner = clients.runner
    clients.submit(range(9), [3], 60)
    thread = threading.Thread(target=lambda: drained.append(runner.drain(0)))

    def drain() -> None:  # until the engine has been told to cancel all
        thread.start()
        wait_for(lambda: runner.inbox)

    clients.at[8].append(drain)
    runner.start()
    clients.wait(range(9))
    thread.join(PATIENCE)
    runner.close()
    check_runner(runner)
    assert drained == [False] and {clients.reason(tag) for tag in range(9)} == {"abort"}


def test_closing_ends_a_long_batch_and_all_that_waits() -> None:
    """The batch would take minutes. Who waits for an answer gets one, and closing twice is fine."""
    clients = Clients(PricedEngine("gpt3-175b", max_batch_size=8, policy="vllm_v0"))
    runner = clients.runner
    clients.submit(range(20), range(4000), 9)
    runner.start()
    wait_for(lambda: runner.state()["running"])
    change = runner.switch("sarathi", 256)
    runner.close()
    assert {clients.reason(tag) for tag in range(20)} == {"abort"} and change.done()
    with pytest.raises(Stopping):
        clients.submit("x", [1], 9)
    with pytest.raises(Stopping):
        runner.switch("orca", 9)
    runner.close()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 60, "60 prompt tokens .* exceed the 64 tokens"),
        ([1] * 42, "can never run.* 50 tokens of cache, and it holds 40"),
    ],
)
def test_what_can_never_run_is_refused_with_all_that_came_with_it(
    small: str, prompt: list[int], message: str
) -> None:
    clients = Clients(RealEngine(small_llm(max_batch_size=4, cache_tokens=40)))
    with pytest.raises(UserError, match=message):
        clients.runner.submit([Request(0, [1], 3), Request(0, prompt, 9)], ["fine", "bad"])
    clients.finish()
    assert not clients.deltas and not clients.events


def test_an_llm_that_serves_refuses_all_calls(llm: LLM) -> None:
    """Both would write to one cache. Before a runner is there, and after its end, it answers."""
    params = SamplingParams(max_tokens=9)
    said = []
    expected = alone(llm, [5, 6, 7], 9)
    stream = llm.stream([[1], [2]], params)
    late = llm.stream([5, 6, 7], params)

    def ask() -> None:
        for call in (
            lambda: llm.generate([[1]], params),
            lambda: llm.stream([[1]], params),
            lambda: llm.beam_search([[1]]),
            lambda: llm.resize_cache(4),
            lambda: next(late),
            lambda: Clients(RealEngine(llm)),
        ):
            with pytest.raises(UserError) as caught:
                call()
            said.append(str(caught.value))

    next(stream)
    with pytest.raises(UserError, match="who runs the model may not change while requests run"):
        Clients(RealEngine(llm))
    stream.close()
    Clients(RealEngine(llm)).runner.close()  # which was never started
    clients = Clients(RealEngine(llm))
    ask()
    clients.at[3].append(ask)
    clients.submit(["one", "two"], [5, 6, 7], 9)
    clients.finish()
    assert clients.tokens("one") == clients.tokens("two") == expected == alone(llm, [5, 6, 7], 9)
    assert said == ["this LLM is lent to a server: ask the server, or end it first"] * 12
    assert [each.token_id for each in late] == expected


def test_an_engine_that_fails_ends_all_streams_and_serves_the_next(llm: LLM) -> None:
    expected = alone(llm, [5, 6, 7], 9)
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
    assert state["error"] == r"RuntimeError: the device is\nlost" and state["failures"] == 1
    clients.submit(["next"], [5, 6, 7], 9)
    clients.finish()
    assert clients.tokens("next") == expected
    moments = [event["t"] for event in clients.events if event["type"] != "iteration"]
    assert moments == sorted(moments), "the clock goes on"


class Broken(SarathiServe):
    """Sarathi-Serve, spoilt in the way that its name says."""

    def schedule(self, now: float) -> Batch | None:
        batch = super().schedule(now)
        if self.name == "twice" and batch:
            batch.decodes *= 2
        if self.name == "exits":
            raise SystemExit
        return batch

    def update(self, batch: Batch, tokens: list[int]) -> list[Request]:
        ended = super().update(batch, tokens)
        if self.name == "loses":
            self.running.clear()
            self.waiting.clear()
        return ended

    def preempt(self, request: Request | None = None) -> Request:
        if self.name == "holds":
            raise KeyError("mine")
        return super().preempt(request)


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("twice", "exits", "loses", "holds"):
        monkeypatch.setitem(POLICIES, name, type(name.title(), (Broken,), {"name": name}))


def test_a_policy_that_will_not_let_go_is_replaced(llm: LLM) -> None:
    """It is not asked: a switch away from it loses no request."""
    expected = [alone(llm, [tag] * 20, 9) for tag in range(3)]
    clients = Clients(RealEngine(llm))
    changes = []
    clients.runner.submit([Request(0, [tag] * 20, 9) for tag in range(3)], range(3))
    for moment, policy in ((2, "holds"), (5, "orca")):
        clients.at[moment].append(
            lambda policy=policy: changes.append(clients.runner.switch(policy, 8))
        )
    clients.finish()
    assert [len(change.result()) for change in changes] == [1, 1], "both preempt"
    assert [clients.tokens(tag) for tag in range(3)] == expected


@pytest.mark.parametrize(
    ("policy", "message"),
    [("loses", "it has lost request 0: `reject` lets one go"), ("exits", "SystemExit")],
)
def test_a_policy_that_fails_ends_all_streams_and_can_be_replaced(
    llm: LLM, policy: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = alone(llm, [5] * 20, 9)
    clients = Clients(RealEngine(llm))
    runner = clients.runner
    runner.submit([Request(0, [tag] * 20, 30) for tag in range(3)], range(3))
    clients.at[4].append(lambda: runner.switch(policy, 8))
    runner.start()
    clients.wait(range(3))
    assert {clients.reason(tag) for tag in range(3)} == {"error"}
    assert message in runner.state()["error"] and runner.state()["failures"] == 1
    assert message in caplog.text and ("Traceback" in caplog.text) == (policy == "exits")
    runner.switch("sarathi", 8).result(PATIENCE)
    clients.submit(["next"], [5] * 20, 9)
    clients.finish()
    assert clients.tokens("next") == expected


def test_a_policy_of_ones_own_that_fails_gives_way() -> None:
    """Ours stay, whatever fails under them."""
    clients = Clients(PricedEngine(policy="orca", chunk_size=99, clock=FastClock()))
    runner = clients.runner
    runner.start()
    for tag, policy, after in (("a", "twice", "sarathi_serve"), ("b", "orca", "orca")):
        runner.switch(policy, 64).result(PATIENCE)
        if policy == "orca":  # the executor's fault
            runner.loop.executor.execute = lambda batch: 1 / 0
        clients.submit([tag], range(9), 5)
        clients.wait([tag])
        assert clients.reason(tag) == "error"
        assert (runner.state()["policy"], runner.state()["chunk_size"]) == (after, 64)
        assert clients.told("switched")[-1]["policy"] == after
        given = "gives way to sarathi_serve" in clients.told("failed")[-1]["error"]
        assert given == (policy != after)
    clients.submit(["next"], range(9), 5)
    clients.finish()
    assert len(clients.tokens("next")) == 5 and runner.state()["failures"] == 2


def test_who_listens_badly_does_not_stop_the_engine() -> None:
    clients = priced()
    events = []
    runner = clients.runner
    deliver = clients.runner.deliver
    bad = mock.Mock(side_effect=ValueError("a listener of somebody's"))

    def deliver_badly(news: list) -> None:
        deliver(news)
        raise OSError("nobody is there")

    runner.watch(bad)
    clients.at[3].append(runner.watch(events.append))  # which unsubscribes it
    runner.deliver = deliver_badly
    clients.submit("a", range(9), 5)
    clients.finish()
    assert bad.call_count == 1 and len(clients.tokens("a")) == 5
    assert [event["type"] for event in events] == ["queued", "started"] + ["iteration"] * 3
    assert runner.state()["failures"] == 0


@pytest.mark.parametrize("policy", NAMES)
def test_real_time_is_that_of_the_simulator(policy: str) -> None:
    """The same batches at the same moments, and all of the runner's own work takes no time."""
    options = {"policy": policy, "chunk_size": 256, "max_batch_size": 8, "cache_tokens": 9000}
    options["tp"] = 2

    def make() -> list[Request]:
        draw = random.Random(11)
        lengths = [(draw.randint(10, 3000), draw.randint(1, 30)) for _ in range(20)]
        return [Request(i, range(prompt), most) for i, (prompt, most) in enumerate(lengths)]

    trace = simulate(make(), "yi-34b", "a100-80gb", **options)
    engine = PricedEngine("yi-34b", "a100-80gb", max_length=4096, clock=FastClock(), **options)
    clients = Clients(engine)
    clients.runner.submit(make(), range(20))
    clients.finish()
    for event, iteration in zip(clients.told("iteration"), trace.iterations, strict=True):
        assert event["t"] == pytest.approx(iteration.start, abs=1e-9)
        assert (event["seconds"], event["policy"]) == (iteration.seconds, policy)
        ran = [(i, start, n, start + n == whole) for i, start, n, whole in iteration.chunks]
        assert [(i, *rest) for i, _, *rest in event["chunks"]] == ran
        assert tuple(own for own, _ in event["decodes"]) == iteration.decodes
    for tag in range(20):
        moments = [delta.moment for delta in clients.deltas[tag]]
        assert moments == pytest.approx(trace.lives[tag].tokens, abs=1e-9)
        assert set(clients.tokens(tag)) == {0}


def test_the_batch_size_is_what_the_memory_holds() -> None:
    expected = requests_that_fit(MODELS["llama-13b"], GPUS["a6000"], 1024)
    assert PricedEngine(max_length=1024).max_batch_size == expected > 1
    one, two = [PricedEngine(gpu="a100-80gb", tp=tp).max_batch_size for tp in (1, 2)]
    assert two > 2 * one, "the weights are there once"
    assert PricedEngine(max_batch_size=3).max_batch_size == 3


def test_what_it_costs_to_know_the_time_is_part_of_it() -> None:
    """A batch of 2 s ends 2 s after its start, however slowly the cost model thinks."""
    engine = PricedEngine(clock=FastClock())

    def seconds(batch: Batch) -> float:
        engine.clock.moment += 0.25
        return 2.0

    engine.cost_model.seconds = seconds
    clients = Clients(engine)
    clients.submit("a", range(9), 5)
    clients.finish()
    assert [event["t"] for event in clients.told("iteration")] == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_placeholders_stand_for_words() -> None:
    tokenizer = PricedEngine().tokenizer
    assert tokenizer.encode("one two\nthree") == [0, 0, 0] and tokenizer.encode("") == [0]
    assert tokenizer.decode([0, 0]) == " · ·"
