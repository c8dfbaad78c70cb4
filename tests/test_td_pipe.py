"""TD-Pipe: its rules worked out on paper, its predictors, and what must hold for every workload."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import requests_of

from batch import Batch, Request
from more.pipeline import Hop, PipelineTrace, make_micro_batches, run_pipeline
from more.pipeline.phases import STEALING, Intensity, LookAhead, Rules
from more.pipeline.predictors import Classes, Constant, Predictor, oracle
from more.pipeline.td_pipe import Ledger, TDPipe
from scheduler import Memory


def rows(count: int) -> float:
    """Made-up seconds of an iteration of so many rows."""
    return 0.01 + 0.001 * count


class Watched(TDPipe):
    """The controller, and after each of its steps what must hold for all of them."""

    def __init__(self, *arguments: object, **options: object):
        super().__init__(*arguments, **options)
        self.batches: dict[int, Batch] = {}  # in flight
        self.most = 0  # tokens in memory, with those in flight

    def next(self, number: int, now: float) -> tuple[Batch | None, str]:
        batch, shortage = super().next(number, now)
        if batch is not None:
            assert number not in self.batches and not (batch.chunks and batch.decodes)
            assert all(chunk.start == 0 and chunk.is_last for chunk in batch.chunks)
            assert len(batch.decodes) <= self.max_batch_size
            self.batches[number] = batch
        self.check()
        return batch, shortage

    def done(self, number: int, batch: Batch, tokens: list[int]) -> list[Request]:
        assert self.batches.pop(number) is batch
        ended = super().done(number, batch, tokens)
        self.check()
        return ended

    def check(self) -> None:
        memory = self.ledger.memory
        running = self.ledger.running
        flying = [request for batch in self.batches.values() for request in batch.decodes]
        flying += [each.request for batch in self.batches.values() for each in batch.chunks]
        at_hand = [request for group in self.at_hand for request in self.own[group]]
        places = [*flying, *at_hand, *self.withheld]
        assert len(places) == len(set(places)) == len(running), "a request has one place"
        assert set(places) == set(running)
        assert len(self.batches) <= self.count
        assert memory.flying == sum(len(batch.decodes) for batch in self.batches.values())
        assert memory.taken == sum(r.prefill_length if r.in_prefill else r.context for r in running)
        self.most = max(self.most, memory.taken + memory.flying)
        assert memory.capacity is None or self.most <= memory.capacity


def run(
    requests: list[Request],
    stages: int,
    *arguments: object,
    hop: Hop | None = None,
    costs: Callable | None = None,
    **options: object,
) -> tuple[PipelineTrace, Watched]:
    """These requests to their end, at made-up costs. The rest is for the controller."""
    controller = Watched(rows, stages, *arguments, **options)
    for request in requests:
        controller.add(request)
    costs = costs or (lambda batch: [rows(batch.num_tokens) / stages] * stages)
    trace = PipelineTrace(stages, controller.count, keep=True)
    return run_pipeline(controller, costs, trace, hop), controller


# TD-Pipe's Fig 9: four decode micro-batches of 128. The first comes back with 48 requests that have
# ended, and the second with 8, so that the average falls from 128 to 116 and to 114. Of each that
# comes back: requests that go on, and requests that are withheld after it.
BALANCED = [(80, 0), (114, 6), (114, 20), (114, 34), (114, 0)]
FIG9 = {
    "window": BALANCED,
    "pool": BALANCED,
    "off": [(80, 0), (120, 0), (128, 0), (128, 0), (80, 0)],
}


@pytest.mark.parametrize("stealing", STEALING)
def test_worked_example(stealing: str) -> None:
    """By the controller itself."""
    ends_at_once = [*range(48), *range(128, 136)]
    controller = Watched(rows, 4, 128, rules=Rules(stealing=stealing, pack=1000))
    for request in requests_of(*[(1, 2 if i in ends_at_once else 99) for i in range(512)]):
        controller.add(request)

    def end(number: int, batch: Batch) -> int:
        return len(controller.done(number, batch, [0] * len(batch.sampled)))

    prompts, _ = controller.next(0, 0.0)
    assert len(prompts.chunks) == 512 and end(0, prompts) == 0
    flying = [controller.next(number, 0.0)[0] for number in range(4)]
    numbers = [[request.request_id for request in batch.decodes] for batch in flying]
    assert numbers == [[*range(first, first + 128)] for first in range(0, 512, 128)]
    for turn, expected in enumerate(FIG9[stealing]):
        number = turn % 4
        assert end(number, flying[number]) == (48, 8, 0, 0, 0)[turn]
        flying[number], _ = controller.next(number, 0.0)
        assert (len(flying[number].decodes), len(controller.withheld)) == expected


def look_ahead(futures: list[tuple[int, int]], points: list[int], between: bool) -> LookAhead:
    ahead = LookAhead(points, between)
    for cached, steps in futures:
        ahead.add(cached, steps)
    return ahead


def test_look_ahead_by_hand() -> None:
    """Tokens at each decode step from now. D ends at a point.

    step  0   1   2   3   4   5   6
    A     10  11
    B     5   6   7   8
    C     7   8   9   10  11  12  13
    D     2   3   4   5   6
    """
    futures = [(10, 1), (5, 3), (7, 6), (2, 4)]
    # at 2: B 7, C 9, D 4; at 4: C 11, D 6. It misses A, which ends before
    assert look_ahead(futures, [2, 4], between=False).usage() == [20, 17]
    # until 2: A 11, B 7, C 9, D 4; until 4: B 8, C 11, D 6; after: C 13
    ahead = look_ahead(futures, [2, 4], between=True)
    assert ahead.usage() == [31, 25, 13] and ahead.peak() == 31
    assert not ahead.admits(4, 1, limit=35) and ahead.usage() == [31, 25, 13]
    assert ahead.admits(4, 1, limit=36) and ahead.usage() == [36, 25, 13]


def test_intensity_by_hand() -> None:
    """t(n) = 4 + n seconds over four stages."""
    intensity = Intensity(lambda n: 4.0 + n, stages=4)
    assert intensity.spatial(16, 16) == intensity.spatial(40, 16) == 1
    # 4 of 8 s against 16 of 20 s
    assert intensity.spatial(4, 16) == pytest.approx((4 / 8) / (16 / 20))
    assert intensity.spatial(0, 16) == 0
    stairs = Intensity(lambda n: 1.0 if n < 5 else 3.0, stages=4)
    assert stairs.spatial(4, 5) == 1, "no better than the peak"
    # Prompts take 16, 32 and 8 s, so 14 s on a stage, and 3 x 8 s more until the longest has left.
    # The decode before them takes 2 s there: every stage but one waits for 8 - 2 s.
    assert intensity.temporal([12, 28, 4], 4) == pytest.approx(1 - 3 * 6 / (14 + 24))
    assert intensity.temporal([12, 28, 4], 100) == 1  # it takes 26 s: no bubble, and none below 0
    assert Intensity(lambda n: 4.0 + n, stages=1).temporal([12], 1) == 1  # one stage never waits


def test_when_to_prefill_again() -> None:
    """t(n) = 4 + n seconds, four stages, four decode micro-batches. A batch of 16 counts as 1. 16
    requests are left, 4 each: the spatial intensity is 0.625, as above. 48 of 64 have ended.
    """
    intensity = Intensity(lambda n: 4.0 + n, stages=4)

    def ledger(waiting: list[int], cache_tokens: int | None = None) -> Ledger:
        made = Ledger(64, cache_tokens=cache_tokens)
        for number in range(16):  # 5 tokens each in memory, and one decode to go
            made.running.append(Request(number, [0] * 5, 2, prefilled=5, context=5, output=[0]))
            made.memory.taken += 5
        made.waiting.extend(requests_of(*[(prompt, 1) for prompt in waiting]))
        return made

    def pays(waiting: list[int], peak_rows: int | None = 16, **options: float) -> bool:
        rules = Rules(peak_rows=peak_rows, **options)
        return rules.prefill_pays(ledger(waiting), 4, 0.75, intensity)

    assert not pays([12, 28, 4])  # the temporal intensity is 0.53
    assert pays([4, 4, 4]) and not pays([4, 4, 4], 4)  # it is 1: prompts as short as a decode
    assert pays([12], finished=0.75) and not pays([12], finished=0.76) and not pays([])
    # the peak is what a prefill phase would bring now: 19 requests, and no batch grows; or 52
    assert not pays([4, 4, 4], None) and pays([4] * 36, None)
    # who are to be admitted count: 80 tokens are there, and half of 200 may be taken
    assert Rules(occupied=0.5).pending(ledger([12, 28, 4], 200)) == [12, 28]
    # 80 tokens and 16 next ones, and for each prompt one more: 109, 138, 143
    for capacity, pending in ((143, [12, 28, 4]), (142, [12, 28]), (138, [12, 28]), (137, [12])):
        assert Rules().pending(ledger([12, 28, 4], capacity)) == pending


@pytest.mark.parametrize("early", [1, 3, 8])
def test_late_arrivals_do_not_wait_for_the_early_to_end(early: int) -> None:
    """A few long requests began the decode phase; there is room for 40 more."""
    requests = requests_of(*[(50, 400)] * early + [(50, 10, 0.5)] * 40)
    trace, _ = run(requests, 4, 64)
    end = dict(trace.finished)
    assert max(end[r.request_id] for r in requests[early:]) < end[0] / 2


def test_who_fits_the_memory() -> None:
    ahead = LookAhead([32])
    for output, fits in ((11, True), (12, False)):  # 80 tokens, and 10 or 11 more
        request = Request(0, range(80), output)
        assert Rules(limit=0.9).admits(request, LookAhead([32]), Memory(100)) == fits
    for taken, fits in ((49, True), (50, False)):
        request = Request(0, range(80), 99)
        assert Rules(occupied=0.5).admits(request, ahead, Memory(100, taken)) == fits
    assert Rules().admits(Request(0, range(80), 99), ahead, Memory(None))


@pytest.mark.parametrize("memory, of_all", [("split", 300), ("pool", 100)])
def test_one_pool_has_the_cache_of_all(memory: str, of_all: int) -> None:
    filled = make_micro_batches("td_pipe", 3, 2, 4, 8, 100, memory=memory, seconds_of=rows)
    assert filled.ledger.memory.capacity == of_all


def test_predictors_by_name() -> None:
    def named(text: str) -> Predictor:
        return make_micro_batches(f"td_pipe:{text}", 2, 2, 4, 8, seconds_of=rows).rules.predict

    assert named("constant=7")(Request(0, [1], 1)) == 7 and named("oracle") is oracle


# -------------------------------------------------------------------------------- what always holds


def liar(request: Request) -> int:
    """Far too short, or far too long."""
    return (1, 5, 200)[request.request_id % 3]


PREDICTORS: dict[str, Predictor] = {
    "oracle": oracle,
    "constant": Constant(1),
    "classes": Classes(range(1, 41), accuracy=0.5),
    "liar": liar,
}


RULES = st.fixed_dictionaries(
    {
        "predict": st.sampled_from(sorted(PREDICTORS)).map(PREDICTORS.get),
        "stealing": st.sampled_from(STEALING),
        "between": st.booleans(),
        "pack": st.sampled_from([1, 60, 192]),
    }
)
FIXED = st.sampled_from([{}, {}, {"occupied": 0.5}, {"finished": 0.3}, {"peak_rows": 3}])
ARRIVING = st.tuples(st.integers(1, 60), st.integers(1, 40), st.sampled_from([0.0, 0.0, 0.1, 4.0]))


@settings(max_examples=100, deadline=None)
@given(
    work=st.lists(ARRIVING, min_size=1, max_size=30),
    spare=st.one_of(st.none(), st.just(0), st.integers(0, 40), st.integers(0, 800)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    rules=RULES,
    fixed=FIXED,
    latency=st.sampled_from([0.0, 0.005]),
)
def test_every_workload(
    work: list[tuple[int, int, float]],
    spare: int | None,
    sizes: tuple[int, int, int],
    rules: dict[str, object],
    fixed: dict[str, float],
    latency: float,
) -> None:
    """Every request ends, and `Watched` finds every rule kept at each step: nobody is lost at a
    switch or withheld for ever, the memory holds all, and no batch mixes prefills and decodes.
    """
    stages, groups, batch_size = sizes
    requests = requests_of(*work)
    largest = max(request.most_cached for request in requests)
    memory = None if spare is None else largest + spare
    hop = Hop(latency, latency / 10)
    options = Rules(**rules, **fixed)
    trace, controller = run(requests, stages, batch_size, memory, groups, options, hop=hop)
    assert sorted(request for request, _ in trace.finished) == list(range(len(work)))
    assert [len(request.output) for request in requests] == [output for _, output, _ in work]
    assert not controller.busy and not controller.withheld and controller.ledger.memory.taken == 0
    preemptions = sum(request.preemptions for request in requests)
    assert len(trace.requests.preempted) == preemptions and (spare is not None or not preemptions)
    assert sum(trace.busy) + sum(trace.idle.values()) == pytest.approx(stages * trace.seconds)
    assert all(seconds >= 0 for seconds in trace.idle.values())
    for request, life in trace.requests.lives.items():
        assert life.scheduled >= requests[request].arrival, "it runs before it has arrived"


def test_wrong_predictions_preempt_and_everything_ends() -> None:
    for rules, preempts in ((Rules(predict=Constant(1)), True), (Rules(), False)):
        requests = requests_of(*[(10, 60)] * 24)
        trace, controller = run(requests, 3, 8, 400, rules=rules)
        assert len(trace.finished) == 24 and 380 < controller.most <= 400
        assert (sum(request.preemptions for request in requests) > 10) == preempts


def test_the_newest_is_preempted() -> None:
    """A cache of 12 tokens, two prompts of 4: when both contexts are 6 it is full, and B leaves."""
    requests = requests_of(*[(4, 6), (4, 5)])
    trace, _ = run(requests, 1, 2, 12, rules=Rules(predict=Constant(1)))
    assert [request.preemptions for request in requests] == [0, 1]
    # B's 4 + 3 tokens
    together = [(8, 8), (0, 2), (0, 2)]
    alone = [(0, 1)] * 3
    again = (7, 7)
    found = [(step.num_prefill_tokens, step.num_tokens) for step in trace.steps]
    assert found == [*together, *alone, again, (0, 1)]


def test_a_switch_by_hand() -> None:
    """Two prompts of 9 and two stages: a prefill takes 1 s on a stage, a decode 1 s, too.

    seconds  0   1   2   3   4   5
    stage 0  |A  |B  |A' |B' |
    stage 1      |A  |B  |A' |B' |
    """
    rules = Rules(pack=1)
    trace, _ = run(requests_of(*[(9, 2)] * 2), 2, 1, rules=rules, costs=lambda batch: [1.0, 1.0])
    assert trace.seconds == 5.0 and trace.idle["phase switch"] == 0.0
