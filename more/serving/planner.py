"""What a replica can serve under an SLO: one search, of which plan.py makes many. No torch.

traffic     a population of requests. A run draws from it: blocks of neighbours, with their gaps, so
            that bursts stay bursts. A trace that is too short for a run is repeated.
search      short runs find about where the capacity is. Long runs decide. A long run lasts until a
            rate that is too high by the search's precision shows it: then the queue has grown
            beyond 2 s. A run ends early when its median delay is surely longer. Where requests are
            so short that a long run would take more than MOST of them, no rate counts as served
            that exceeds the throughput with all requests waiting.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from batch import Request
from command.checks import UserError, check_whole
from costmodel import TILE, make_batch
from more.serving.capacity import (
    MAX_DELAY,
    Deployment,
    Load,
    Slo,
    overload_of,
    worst_iteration,
)
from more.serving.search import AlwaysServed, largest_rate
from more.serving.traffic import at_rate

# Neighbours that are drawn together, at most, and blocks of a short trace, at least: samples of few
# blocks would hardly differ. NEAR: blocks, see `Traffic.sample`.
BLOCK = 64
BLOCKS = 16
NEAR = 2
MOST_DRAWN = 4096  # requests of the population that one run knows
# requests of a run
FEWEST = 384
MOST = 8192
# Iterations of a run that is not exact, at most and about: at a low rate, long outputs share few.
# FEW: its requests, at least.
ITERATIONS = 100_000
FEW = 48
# precision: of short runs, and of the answer
COARSE = 1.2
EXACT = 1.025
HOPELESS = 32  # if not even so small a part of the throughput is served, the capacity is 0
BUDGETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)


@dataclass(frozen=True, eq=False)
class Traffic:
    """The requests to plan for. gaps: to the request before; their mean is 1."""

    name: str
    prompts: np.ndarray  # tokens, (n,)
    outputs: np.ndarray  # tokens, (n,)
    gaps: np.ndarray  # (n,)
    tags: Sequence[dict[str, str]]

    @staticmethod
    def of(name: str, requests: Sequence[Request]) -> "Traffic":
        """Raises UserError if there are none."""
        if not requests:
            raise UserError(f"{name}: no requests to plan for")
        gaps = np.diff([0.0, *[each.arrival for each in requests]])
        gaps[0] = gaps[1:].mean() if len(gaps) > 1 else 1.0
        mean = gaps.mean()
        return Traffic(
            name,
            np.array([len(each.prompt) for each in requests]),
            np.array([each.max_tokens for each in requests]),
            gaps / mean if mean > 0 else np.ones(len(requests)),
            [each.tags for each in requests],
        )

    def sample(self, count: int, seed: int | None = None) -> list[Request]:
        """`count` requests at about 1 per second, in blocks that are spread evenly over the whole.

        seed: draws each block again, from its neighbours up to NEAR blocks away. So a day's busy
        hours stay busy (the local block bootstrap). None takes each as it is.
        """
        check_whole("count", count)
        size = min(len(self.prompts), count, MOST_DRAWN)
        block = min(BLOCK, -(-len(self.prompts) // BLOCKS))
        starts = np.arange(0, len(self.prompts), block)
        needed = -(-size // block)
        chosen = np.linspace(0, len(starts) - 1, needed).astype(int)
        if seed is not None:
            chosen += np.random.default_rng(seed).integers(-NEAR, NEAR + 1, needed)
        blocks = starts[chosen.clip(0, len(starts) - 1)][:, None] + np.arange(block)
        places = np.resize(blocks.flatten()[:size] % len(self.prompts), count)
        arrivals = np.cumsum(self.gaps[places]).tolist()
        prompts = self.prompts[places].tolist()
        outputs = self.outputs[places].tolist()
        return [
            Request(i, range(prompts[i]), outputs[i], arrival=arrivals[i], tags=self.tags[place])
            for i, place in enumerate(places.tolist())
        ]


@dataclass(frozen=True)
class Found:
    """A capacity, and what the search has seen: the loads of long runs that meet the SLO."""

    rate: float
    budget: int
    requests: int = field(default=0, compare=False)  # of a long run
    loads: dict[float, Load] = field(default_factory=dict, compare=False)

    @property
    def load(self) -> Load | None:
        """At the capacity."""
        return self.loads.get(self.rate)


def find_capacity(
    replica: Deployment,
    traffic: Traffic,
    slo: Slo,
    policy: str,
    budget: int,
    precision: float,
    seed: int | None = None,
    start: float = 0.0,
    least: float = 0.0,
    runs: dict[tuple[int, float, int], Load | None] | None = None,
) -> Found:
    """The largest rate that meets the SLO, within a factor of `precision`; 0 if none does.

    seed: of the sample, see `Traffic.sample`. start: a rate that is near, if one is known. least:
    a smaller capacity is of no use to the caller. It is not searched: the rate that is returned is
    then below `least`, and says no more. runs: of searches that differ in their SLO, or budget
    (budget, rate, requests -> load; None: overloaded). They are not run again.
    """

    sample = cache(lambda count: traffic.sample(count, seed))
    # what is left early for one SLO says nothing of others
    runs, bounds = ({}, slo) if runs is None else (runs, None)

    def met_at(rate: float, count: int) -> Load | None:
        """The load of a run, if it meets the SLO."""
        if (run := (budget, rate, count)) not in runs:
            requests = at_rate(sample(count), rate)
            over = overload_of(requests, bounds, replica.size(budget, policy))
            trace = replica.serve(requests, policy, budget, over=over)
            runs[run] = Load.steady(trace) if len(trace.finished) == count else None
        load = runs[run]
        return load if load and load.meets(slo) else None

    def search(
        start: float, precision: float, factor: float, margin: float = 1.0
    ) -> tuple[float, int, dict[float, Load]]:
        """From `start`: the rate, the requests of each run, and the loads by rate.

        margin: the runs are long enough for a rate so many times `start`.
        """
        loads: dict[float, Load] = {}
        count = enough(margin * start, precision, traffic)
        most = math.inf
        if needed(margin * start, precision) > count:
            most = throughput(replica, sample(count), policy, budget)

        def served(rate: float) -> bool:
            if rate > most or rate < least:
                return rate < least
            few = affordable(rate, precision, replica, traffic)
            if load := met_at(rate, min(count, few) if precision > EXACT else count):
                loads[rate] = load
            return load is not None

        try:
            rate = largest_rate(served, precision, start, factor)
        except AlwaysServed:
            return search(4 * start, precision, factor)
        if most < math.inf or needed(rate, precision) <= count:
            return rate, count, loads
        return search(rate, precision, precision**2, 1.2)  # so it comes to an end

    few = min(enough(start, COARSE, traffic), affordable(start, COARSE, replica, traffic))
    if start and not least and not met_at(start / COARSE, few):
        start = 0.0  # it is not near: long runs on the way would cost more than a start anew
    if not start:
        start = throughput(replica, sample(FEWEST), policy, budget)
        if not met_at(start / HOPELESS, FEWEST // 6):
            return Found(0.0, budget)
        rate, count, loads = search(start, max(COARSE, precision), COARSE)
        if not rate or precision >= COARSE:
            return Found(rate, budget, count, loads)
        start = rate
    rate, count, loads = search(start, precision, precision**2)
    return Found(rate, budget, count, loads)


def throughput(replica: Deployment, requests: Sequence[Request], policy: str, budget: int) -> float:
    """Requests per second that end in the middle of a run, where all of them wait at its start."""
    trace = replica.serve(at_rate(requests, 1e6), policy, budget)
    ends = sorted(moment for _, moment in trace.finished)
    begin = ends[len(ends) // 4]
    end = ends[3 * len(ends) // 4]
    if begin == end:  # most of them end together
        return len(ends) / trace.seconds
    return (bisect_right(ends, end) - bisect_right(ends, begin)) / (end - begin)


def needed(rate: float, precision: float) -> float:
    """Requests until a rate that is too high by `precision` shows it.

    The queue grows by precision - 1 seconds per second. Half of the requests must find it longer
    than MAX_DELAY.
    """
    return rate * 2 * MAX_DELAY / (precision - 1)


def enough(rate: float, precision: float, traffic: Traffic) -> int:
    """Requests of a run: as many as are `needed`, but no more than MOST.

    An exact run has the whole traffic, as often as it takes: a part of it may be quieter.
    """
    count = min(max(FEWEST, needed(rate, precision)), MOST)
    size = min(len(traffic.prompts), MOST_DRAWN)
    if precision > EXACT and count < 4 * size:
        size = 1
    return size * math.ceil(count / size)


def affordable(rate: float, precision: float, replica: Deployment, traffic: Traffic) -> int:
    """Requests of a run of about ITERATIONS, or more where so many are `needed`.

    A request has an iteration for each output token: that many, if no two requests share one. And
    the run has no more iterations than fit into its time.
    """
    usual = max(2, int(np.median(traffic.prompts)))  # of a decode: it has a prompt before it
    decode = replica.cost_model.seconds(make_batch(decodes=1, context=usual))
    shared = max(1 / float(traffic.outputs.mean()), rate * decode)
    most = ITERATIONS if precision < COARSE else ITERATIONS / 4
    return math.ceil(max(FEW, needed(rate, precision), most * shared))


def budgets_of(replica: Deployment, traffic: Traffic, slo: Slo, sizes: Sequence[int]) -> list[int]:
    """The `sizes` that are tried as token budgets.

    They end with the first whose iteration is longer than a gap may be, even without a decode:
    still larger ones serve no more. Its tokens are those of usual prompts. Where the SLO bounds
    means, or lower percentiles, some long iterations may be worth it: all sizes are tried.
    """
    usual = int(np.median(traffic.prompts))
    over = [worst_iteration(replica.cost_model, size, 0, longest=usual) > slo.gap for size in sizes]
    return list(sizes[: over.index(True) + 1] if True in over else sizes)


def beside(budgets: Sequence[int], best: int) -> list[int]:
    """Budgets that were not tried: in the middle between the best and its neighbours, in tiles."""
    place = budgets.index(best)
    middles = [(best + size) // 2 // TILE * TILE for size in budgets[max(0, place - 1) : place + 2]]
    return [size for size in dict.fromkeys(middles) if size and size not in budgets]


def best_budget(
    replica: Deployment,
    traffic: Traffic,
    slo: Slo,
    policy: str,
    budgets: Sequence[int],
    precision: float,
    first: int,
) -> Found:
    """The budget with the largest capacity: from `first` upwards and downwards, until it falls.

    Both ways, because `first` may lie beyond the best: there the capacity is low, and flat but for
    the precision of the searches.
    budgets: in ascending order; first: one of them.
    """

    def find(place: int, start: float = 0.0) -> Found:
        shared = replica, traffic, slo, policy
        return find_capacity(
            *shared, budgets[place], precision, start=start, least=start / precision
        )

    place = budgets.index(first)
    best = find(place)
    for step in (1, -1):
        here = place
        while 0 <= here + step < len(budgets):
            found = find(here := here + step, best.rate)
            if found.rate * precision < best.rate:
                break
            best = max(best, found, key=lambda each: each.rate)  # of equals, the first
    return best
