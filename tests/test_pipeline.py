"""The simulated pipeline: bubbles worked out on paper, and what must hold for every schedule."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import requests_of

from batch import Batch, Request
from command.checks import UserError
from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, make_batch
from more.pipeline import (
    BUBBLES,
    Hop,
    MicroBatches,
    PipelineTrace,
    StageCosts,
    even_layers,
    make_micro_batches,
    run_pipeline,
    simulate_pipeline,
)
from more.pipeline.account import Step, difference
from more.pipeline.micro_batches import DEALS, MEMORIES
from more.policies import compared
from more.simulate import simulate
from scheduler import POLICIES, SarathiServe

Work = list[tuple]  # as `requests_of` takes it


def run_by_hand(
    work: Work, costs: Callable, micro_batches: int, stages: int = 2, hop: Hop | None = None
) -> PipelineTrace:
    """One request in each micro-batch, dealt out in turn."""
    requests = requests_of(*work)
    filled = filled_with(requests, "orca", micro_batches, stages, 1, 256, deal="turns")
    return run_pipeline(filled, costs, PipelineTrace(stages, micro_batches, keep=True), hop)


def filled_with(requests: list[Request], *arguments: object, **options: object) -> MicroBatches:
    """`make_micro_batches`, and these requests in them."""
    micro_batches = make_micro_batches(*arguments, **options)
    for request in sorted(requests, key=lambda request: request.arrival):
        micro_batches.add(request)
    return micro_batches


def waits(trace: PipelineTrace) -> list[tuple[int, float, float, str]]:
    """(stage, from, to, cause) of every idle interval between two steps."""
    found = []
    for step in trace.steps:
        stages = zip(step.starts, step.waits, step.causes, strict=True)
        for stage, (start, wait, cause) in enumerate(stages):
            if wait > 0:
                found.append((stage, start - wait, start, cause))
    return found


def test_chunks_of_one_prompt_by_hand() -> None:
    """Four chunks of one prompt on two stages, a second each. They wait for each other ("queue",
    "any"), or follow at once:

        seconds  0   1   2   3   4   5   6   7   8         0   1   2   3   4   5
        stage 0  |P0 |///|P1 |///|P2 |///|P3 |...          |P0 |P1 |P2 |P3 |...
        stage 1  |...|P0 |///|P1 |///|P2 |///|P3 |         |...|P0 |P1 |P2 |P3 |
    """
    for deal, seconds, waited in (("queue", 8, 6), ("any", 8, 6), ("ahead", 5, 0)):
        filled = filled_with(requests_of(*[(8, 1)]), "sarathi_serve", 2, 2, 4, 2, deal=deal)
        trace = run_pipeline(filled, lambda batch: [1.0, 1.0], PipelineTrace(2, 2, keep=True))
        assert (trace.seconds, trace.idle["inter-chunk"], trace.bubble) == (seconds, waited, waited)
        assert trace.busy_share == 8 / (2 * seconds)
        assert trace.requests.lives[0].tokens == [seconds]


def test_one_pool_has_the_sum_of_all() -> None:
    """Of B and of the caches; token throttling gives each micro-batch its share of the decodes."""
    requests = requests_of(*[(4, 9)] * 6)
    options = {"deal": "ahead", "memory": "split"}
    filled = filled_with(requests, "token_throttling", 3, 3, 2, 64, 40, **options)
    [scheduler] = filled.schedulers
    assert (scheduler.max_batch_size, scheduler.memory.capacity, filled.count) == (6, 120, 3)
    trace = run_pipeline(filled, lambda batch: [1.0] * 3, PipelineTrace(3, 3, keep=True))
    sizes = [step.num_tokens for step in trace.steps if step.kind == "decode"]
    assert set(sizes[:12]) == {2}, "two of six decodes each, and not all in one"
    assert {step.micro_batch for step in trace.steps} == {0, 1, 2}


def test_three_unequal_micro_batches() -> None:
    """Prompts of 1, 3 and 2 tokens take a second for each token, a decode a second; then one decode
    each.

        seconds  0   1   2   3   4   5   6   7   8   9   10  11  12
        stage 0  |A  |B          |C      |A' |B' |...|C' |
        stage 1      |A  |.......|B          |C      |A' |B' |C' |

    Stage 1 is done with A at 2, and B, three times as long a prompt, comes at 4: PB1. Stage 0 is
    done with the decode B' at 8, and C' has to wait until the prompt C leaves stage 1 at 9: PB2.
    """
    work = [(1, 2), (3, 2), (2, 2)]
    trace = run_by_hand(work, lambda batch: [float(batch.num_tokens)] * 2, 3)
    assert waits(trace) == [(1, 0.0, 1.0, "start-up"), (1, 2.0, 4.0, "PB1"), (0, 8.0, 9.0, "PB2")]
    assert trace.steps[-1].end == trace.seconds == 12.0
    assert trace.busy == [9.0, 9.0] and trace.idle["drain"] == 2.0 and trace.bubble_share == 3 / 24
    assert trace.bubble_of == {0: 0.0, 1: 2.0, 2: 1.0}
    assert trace.finished == [(0, 10.0), (1, 11.0), (2, 12.0)]


def test_contexts_of_different_length() -> None:
    """Prompts cost the same here, decodes their context: A' takes 1 s, B' 3 s.

    seconds  0   1   2   3   4   5   6   7   8   9   10  11  12
    stage 0  |A      |B      |A' |...|B'         |
    stage 1          |A      |B      |A' |.......|B'         |
    """
    work = [(10, 2), (30, 2)]
    trace = run_by_hand(
        work, lambda batch: [batch.decodes[0].context / 10 if batch.decodes else 2.0] * 2, 2
    )
    assert waits(trace) == [(1, 0.0, 2.0, "start-up"), (0, 5.0, 6.0, "PB2"), (1, 7.0, 9.0, "PB3")]
    assert trace.idle["drain"] == 3.0 and trace.seconds == 12.0
    few, many = (Step(0, 0, decodes, [], []) for decodes in (1, 4))
    assert difference(few, many) == "PB3", "the paper has no name for that"


def test_a_wait_that_is_handed_on_keeps_its_cause() -> None:
    """Three stages. A's prompt takes 4 s and everything else 1 s, so that A' comes back late, at 12
    s.
    """
    work = [(4, 3), (1, 3), (1, 3)]
    trace = run_by_hand(work, lambda batch: [float(batch.num_tokens)] * 3, 3, stages=3)
    late = [step for step in trace.steps if step.micro_batch == 0][1]
    assert late.waits == [6.0, 3.0, 0.0]
    # stage 1, too, waits because of the long prompt A, and not because A' is a decode
    assert late.causes == ["PB1", "PB1", ""]


@pytest.mark.parametrize(
    ("micro_batches", "costs", "latency", "causes"),
    [
        (2, [1.0, 3.0], 0.0, {"start-up", "uneven stages"}),
        (2, [1.0, 1.0], 0.25, {"start-up", "link"}),
        (3, [1.0, 1.0], 0.25, {"start-up"}),  # one micro-batch more than stages hides the way
    ],
)
def test_what_equal_micro_batches_wait_for(
    micro_batches: int, costs: list[float], latency: float, causes: set[str]
) -> None:
    work = [(1, 50)] * micro_batches
    trace = run_by_hand(work, lambda batch: costs, micro_batches, hop=Hop(latency))
    assert {cause for *_, cause in waits(trace)} == causes


def test_a_link_takes_its_time() -> None:
    """Half a second, and a tenth for each of two tokens, from stage 0 to stage 1."""
    trace = run_by_hand([(2, 1)], lambda batch: [1.0, 1.0], 1, hop=Hop(0.5, 0.1))
    assert trace.steps[0].starts == pytest.approx([0.0, 1.7])


class Counting(SarathiServe):
    """It counts in plain numbers, and makes its queue anew."""

    admitted = ended = 0

    def schedule(self, now: float) -> Batch | None:
        self.waiting = deque(sorted(self.waiting, key=lambda request: -request.request_id))
        return super().schedule(now)

    def admit(self) -> Request | None:
        request = super().admit()
        self.admitted += request is not None
        return request

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        ended = super().update(batch, tokens)
        self.ended += len(ended)
        self.waiting = deque(self.waiting)
        return ended


@pytest.mark.parametrize("deal", ["queue", "turns"])
def test_what_a_policy_counts_is_one_for_all_micro_batches(deal: str) -> None:
    filled = MicroBatches(Counting(2, 8), 3, 2, deal)
    for i in range(20):
        filled.add(Request(i, range(5), 4, arrival=i // 10))
    trace = run_pipeline(filled, lambda batch: [0.2, 0.1], PipelineTrace(2, 3, keep=True))
    assert sorted(request for request, _ in trace.finished) == list(range(20)), "each runs once"
    assert {step.micro_batch for step in trace.steps} == {0, 1, 2}
    filled.done(1, Batch([], []), [])
    schedulers = filled.schedulers
    assert len({id(each.waiting) for each in schedulers}) == (1 if deal == "queue" else 3)
    for each in schedulers:
        assert (each.admitted, each.ended) == (20, 20)


def test_chunked_only_alternates_in_each_micro_batch() -> None:
    work = [(1, 9)] * 2 + [(40, 9)] * 2
    filled = filled_with(requests_of(*work), "chunked_only", 2, 2, 2, 4, deal="turns")
    kinds: list[list[bool]] = [[], []]
    for number in 6 * [0, 1]:
        batch, _ = filled.next(number, 0.0)
        filled.done(number, batch, [7] * len(batch.sampled))
        kinds[number].append(bool(batch.chunks))
    assert kinds == 2 * [3 * [True, False]]


def test_want_of_requests_is_no_bubble() -> None:
    """Fewer micro-batches than stages, and arrivals with long pauses: stages starve."""
    alone = run_by_hand([(1, 9)], lambda batch: [1.0, 1.0], 1)
    # 9 steps of 2 s; each stage works every other second
    assert alone.bubble == 0 and alone.idle["starved"] == 2 * 8.0
    apart = [(1, 1, 10.0 * i) for i in range(3)]
    trace = run_by_hand(apart, lambda batch: [1.0, 1.0], 2)
    assert trace.bubble == 0 and trace.idle["starved"] > 0 and trace.seconds == 22.0


def most_at_once(filled: MicroBatches) -> int:
    """Run all to the end. How many requests run at once, at most. Micro-batches come back one by
    one, the oldest first, after all others have asked for more.
    """
    free = list(range(filled.count))
    flying = deque()
    most = 0
    while filled.busy or flying:
        for number in free[:]:
            batch, _ = filled.next(number, 0.0)
            most = max(most, sum(len(each.running) for each in filled.schedulers))
            if batch:
                free.remove(number)
                flying.append((number, batch))
        assert flying, "requests are left, and nothing runs"
        number, batch = flying.popleft()
        filled.done(number, batch, [7] * len(batch.sampled))
        free.append(number)
    return most


PRICES = {"cost": lambda batch: 1.0, "seconds_of": lambda rows: 1.0}
DEALT = [(policy, deal) for policy in POLICIES for deal in DEALS] + [("td_pipe", "queue")]


@pytest.mark.parametrize(("policy", "deal"), DEALT)
def test_at_most_B_times_M_run_at_once(policy: str, deal: str) -> None:
    """And as many do, if so many are there: M = 3, B = 2, and 20 requests that stay for long."""
    work = requests_of(*[(4, 9)] * 20)
    assert most_at_once(filled_with(work, policy, 3, 2, 2, 64, deal=deal, **PRICES)) == 6


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("policy", "deal"), DEALT)
def test_what_just_fits_the_micro_batches_runs(policy: str, deal: str, memory: str) -> None:
    """A request that fills the memory to its last token; one that needs a token more is refused.
    Two fill a shared one together, and nobody is preempted.
    """
    together = memory == "split" and (deal in ("any", "ahead") or policy == "td_pipe")
    for prompt, output in ((5, 8), (12, 1), (11, 2)):
        need = prompt + output - 1  # 12
        options = PRICES | {"deal": deal, "memory": memory}
        for count in (1, 2) if memory == "pool" else (1,):
            cache = need * count // (2 if together else 1)
            requests = requests_of(*[(prompt, output)] * count)
            filled = filled_with(requests, policy, 2, 2, 2, 64, cache, **options)
            assert most_at_once(filled) == count or output <= 2
            assert all(len(request.output) == output for request in requests)
            assert sum(request.preemptions for request in requests) == 0
        with pytest.raises(UserError, match="need 13 tokens of cache, and it holds 12"):
            cache = need // (2 if together else 1)
            filled_with(requests_of((prompt, output + 1)), policy, 2, 2, 2, 64, cache, **options)


# -------------------------------------------------------------------------------- what always holds

REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.5, 3.0])),
    min_size=1,
    max_size=14,
)


def price(stages: int, uneven: bool) -> Callable:
    """Made-up costs with everything in them: tokens, contexts, a last stage that has more to do."""

    def costs(batch: Batch) -> list[float]:
        contexts = sum(request.context for request in batch.decodes)
        seconds = 0.01 + 0.01 * batch.num_tokens + 0.001 * contexts
        return [seconds] * (stages - 1) + [seconds * (1.3 if uneven else 1.0)]

    return costs


FILLING = st.fixed_dictionaries(
    {
        "cache_tokens": st.sampled_from([None, 52]),
        "deal": st.sampled_from(["queue", "turns"]),
        "memory": st.sampled_from(["split", "pool"]),
    }
)
POLICY = st.sampled_from(sorted(compared()))
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(REQUESTS, POLICY, SIZES, FILLING, st.sampled_from([0.0, 0.05]), st.booleans())
def test_every_schedule(lengths, policy, sizes, filling, latency, uneven) -> None:
    micro_batches, stages, _ = sizes
    trace = PipelineTrace(stages, micro_batches, keep=True)
    filled = filled_with(requests_of(*lengths), policy, *sizes, 8, **filling)
    run_pipeline(filled, price(stages, uneven), trace, Hop(latency, latency / 10))

    assert sorted(request for request, _ in trace.finished) == list(range(len(lengths)))
    # nothing is lost or counted twice
    assert sum(trace.busy) + sum(trace.idle.values()) == pytest.approx(stages * trace.seconds)
    assert all(seconds >= 0 for seconds in trace.idle.values())
    if latency == 0 and not uneven:
        assert trace.idle["link"] < 1e-9 and trace.idle["uneven stages"] < 1e-9
    ends = [[*map(sum, zip(step.starts, step.seconds, strict=True))] for step in trace.steps]
    for before, after in zip(ends, trace.steps[1:], strict=False):  # no stage runs two at once
        assert all(end <= start for end, start in zip(before, after.starts, strict=True))
    for own, step in zip(ends, trace.steps, strict=True):  # through the stages in order
        assert all(end <= start for end, start in zip(own, step.starts[1:], strict=False))
    for number in range(micro_batches):  # a micro-batch never overtakes itself
        own = [step for step in trace.steps if step.micro_batch == number]
        assert all(before.end <= after.starts[0] for before, after in pairwise(own))
    bubbles = [
        sum(w for w, cause in zip(step.waits, step.causes, strict=True) if cause in BUBBLES[:-1])
        for step in trace.steps
    ]
    members = [len(each.chunks) + len(each.decodes) for each in trace.requests.iterations]
    shares = sum(n * bubble for n, bubble in zip(members, bubbles, strict=True))
    assert sum(trace.bubble_of.values()) == pytest.approx(shares)


@settings(max_examples=60, deadline=None)
@given(
    REQUESTS,
    POLICY,
    st.integers(1, 4),
    st.sampled_from([None, 60]),
    st.sampled_from(["queue", "turns"]),
)
def test_one_stage_is_simulate(lengths, policy, batch_size, cache_tokens, deal) -> None:
    """Bit for bit."""
    options = {"policy": policy, "max_batch_size": batch_size, "cache_tokens": cache_tokens}
    options["chunk_size"] = 16
    flat = simulate(requests_of(*lengths), "llama-13b", "a6000", **options)
    piped = simulate_pipeline(
        requests_of(*lengths), "llama-13b", "a6000", stages=1, deal=deal, keep=True, **options
    )
    assert piped.requests.iterations == flat.iterations
    assert piped.requests.lives == flat.lives
    assert piped.requests.preempted == flat.preempted
    assert piped.finished == flat.finished


# -------------------------------------------------------------------------------------------- costs


def test_stages_add_up_to_the_model() -> None:
    whole = CostModel(MODELS["gpt3-175b"], GPUS["a100-80gb"], tp=8, link=LINKS["nvlink-a100"])
    batch = make_batch(decodes=4, context=9)
    seconds = StageCosts(whole, [40, 30, 26])(batch)
    assert sum(seconds) == pytest.approx(whole.seconds(batch))
    assert seconds[0] / seconds[1] == pytest.approx(40 / 30)
    assert seconds[2] > 26 / 30 * seconds[1]  # the head
    assert even_layers(10, 4) == [3, 3, 2, 2]
