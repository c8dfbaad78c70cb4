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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

import numpy as np

from batch import Batch, Request
from command.checks import UserError, check_number, check_whole
from configs import LINKS, Link
from costmodel import TILE, CostModel, make_batch
from loop import Loop
from more.pipeline import (
    Hop,
    PipelineTrace,
    StageCosts,
    even_layers,
    make_micro_batches,
    run_pipeline,
)
from more.policies import compared
from more.serving.capacity import (
    CONTEXT,
    DECODES,
    MAX_DELAY,
    Load,
    Slo,
    overload_of,
    worst_iteration,
)
from more.serving.search import AlwaysServed, largest_rate
from more.serving.traffic import at_rate, copy_of
from more.simulate import CostExecutor
from scheduler import POLICIES, make_scheduler
from timeline import Iteration, Trace

# Neighbours that are drawn together, at most, and blocks of a short trace, at least: samples of few
# blocks would hardly differ. NEAR: blocks, see `Traffic.sample`.
BLOCK, BLOCKS, NEAR = 64, 16, 2
MOST_DRAWN = 4096  # requests of the population that one run knows
FEWEST, MOST = 384, 8192  # requests of a run
# Iterations of a run that is not exact, at most and about: at a low rate, long outputs share few.
# FEW: its requests, at least.
ITERATIONS, FEW = 100_000, 48
COARSE, EXACT = 1.2, 1.025  # precision: of short runs, and of the answer
HOPELESS = 32  # if not even so small a part of the throughput is served, the capacity is 0
WHOLE = ("request_level", "baseline", "orca", "vllm_v0")  # policies that read no token budget
KNOWN = {POLICIES[name] for name in compared() if name != "chunked_only"}  # that has a state
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
        starts, needed = np.arange(0, len(self.prompts), block), -(-size // block)
        chosen = np.linspace(0, len(starts) - 1, needed).astype(int)
        if seed is not None:
            chosen += np.random.default_rng(seed).integers(-NEAR, NEAR + 1, needed)
        blocks = starts[chosen.clip(0, len(starts) - 1)][:, None] + np.arange(block)
        places = np.resize(blocks.flatten()[:size] % len(self.prompts), count)
        arrivals = np.cumsum(self.gaps[places]).tolist()
        prompts, outputs = self.prompts[places].tolist(), self.outputs[places].tolist()
        return [
            Request(i, range(prompts[i]), outputs[i], arrival=arrivals[i], tags=self.tags[place])
            for i, place in enumerate(places.tolist())
        ]


LOGIT = 10  # bytes of a logit while tokens are drawn: bf16, then twice fp32
OUTSIDE = {False: 0.1, True: 1.4}  # GiB outside PyTorch: CUDA's; with several GPUs, NCCL's, too


def bytes_of(cost: CostModel, stages: int) -> tuple[float, float, float]:
    """Of each card: all its bytes, those of the weights, and those outside PyTorch."""
    weights = cost.model.weight_bytes(cost.bytes_per_value) / (cost.tp * stages)
    return cost.gpu.card or cost.gpu.memory, weights, OUTSIDE[cost.tp * stages > 1] * 2**30


def cache_of_engine(
    cost: CostModel,
    stages: int,
    budget: int,
    batch_size: int,
    utilization: float = 0.9,
    of_free: bool = False,
) -> int:
    """Tokens of cache that vLLM gives itself, of all requests together; 0: the model does not fit.

    As vLLM's account at its start: of each card, `utilization`; less the weights, the activations
    of its largest iteration (`budget` rows, `batch_size` logits), and what lies outside PyTorch.
    of_free: `utilization` of what these leave free (TensorRT-LLM).

    Three public accounts differ by 1.3 to 2.7 GiB a card (tests/test_beside_benchmarks.py): of
    activations and what lies outside. Two are far off: issue 12330 has 9.4 GiB of activations,
    where we have 1.1; and four GPUs in 2023 (pull 2031) had 12 GiB less cache than we say.
    """
    model, tp = cost.model, cost.tp
    check_number("utilization", utilization, 0, 1)
    each = 3 * model.intermediate // tp + (model.hidden if model.experts else 0)
    widest = (max(1, model.chosen) * each + 2 * model.hidden) * cost.bytes_per_value
    activations = budget * widest + batch_size * model.vocab_size * LOGIT
    card, weights, outside = bytes_of(cost, stages)
    taken = weights + activations + outside
    free = utilization * (card - taken) if of_free else utilization * card - taken
    return max(0, int(free * stages // cost.kv_bytes))


@dataclass(frozen=True, eq=False)
class Replica:
    """A model on `cost.tp` GPUs, or on a pipeline of such stages, as one engine serves it.

    cache_tokens: of all requests together; None: enough for all. utilization: of the cards' memory,
    which then gives the tokens of cache (`cache_of_engine`). hop: joins the stages. The stages'
    micro-batches share the batch size evenly, and one pool of memory. deal: see `MicroBatches`.
    """

    cost: CostModel
    max_batch_size: int
    cache_tokens: int | None
    stages: int = 1
    hop: Link = LINKS["pcie4"]
    utilization: float | None = None
    deal: str = "queue"

    @property
    def layout(self) -> str:
        return f"TP{self.cost.tp}" + (f"-PP{self.stages}" if self.stages > 1 else "")

    @property
    def gpus(self) -> int:
        return self.cost.tp * self.stages

    @property
    def decode_iteration(self) -> float:
        """Seconds of a batch of 32 decodes, or of as many as run at once."""
        decodes = min(DECODES, self.max_batch_size)
        context = min(CONTEXT, self.cost.model.max_length)
        return self.cost.seconds(make_batch(decodes=decodes, context=context))

    def size(self, budget: int, policy: str = "") -> int:
        """B with this budget: a batch of C tokens has no more than C decodes."""
        whole = policy.partition(":")[0] in WHOLE
        return self.max_batch_size if whole else min(self.max_batch_size, budget)

    def holds(self, budget: int) -> int | None:
        """Tokens of cache with this budget; None: enough for all."""
        if self.utilization is None:
            return self.cache_tokens
        own = self.cost, self.stages, budget, self.size(budget)
        return cache_of_engine(*own, self.utilization)

    def static_share(self, budget: int) -> float | None:
        """What gives SGLang the cache of `holds`: its --mem-fraction-static, to 0.001 below.

        Weights and cache, as a share of what is free before them: more/serving/engines.py.
        """
        if self.utilization is None:
            return None
        card, weights, outside = bytes_of(self.cost, self.stages)
        cache = self.holds(budget) * self.cost.kv_bytes / self.stages
        return math.floor(1e3 * (weights + cache) / (card - outside)) / 1e3

    def serve(
        self, requests: Sequence[Request], policy: str, budget: int, clients: int | None = None,
        over: Callable[[Trace], bool] | None = None,
    ) -> Trace:  # fmt: skip
        """The run of these requests. budget: C, in tokens. clients: see `run_closed`.

        over: asked with the trace so far, after iterations; True ends the run there.
        """
        cost, stages = self.cost, self.stages
        size, cache_tokens = self.size(budget, policy), self.holds(budget)
        if stages == 1:
            scheduler = make_scheduler(policy, size, budget, cache_tokens)
            loop = Loop(scheduler, CostExecutor(cost))
            if clients is not None:
                return run_closed(loop, requests, clients)
            for request in requests:
                loop.add(request)
            while loop.step() and not (over and over(loop.trace)):
                decode_on(loop)
            return loop.trace
        filled = make_micro_batches(
            policy, stages, stages, max(1, size // stages), budget, cache_tokens, memory="pool",
            cost=cost.seconds, deal=self.deal,
        )  # fmt: skip
        for request in requests:
            filled.add(request)
        own = StageCosts(cost, even_layers(cost.model.n_layer, stages))
        trace = PipelineTrace(stages, filled.count, keep=True)

        def costs(batch: Batch) -> list[float]:
            if over and over(trace.requests):
                raise StopIteration
            return own(batch)

        with suppress(StopIteration):
            run_pipeline(filled, costs, trace, Hop.over(self.hop, cost))
        return trace.requests


def run_closed(loop: Loop, requests: Iterable[Request], clients: int) -> Trace:
    """A closed loop: each of `clients` sends its next request when it has its last token.

    It is what `vllm bench serve --max-concurrency` does. The requests' own arrivals do not count.
    """
    check_whole("clients", clients)
    left, ended = iter(requests), 0
    for request in islice(left, clients):
        loop.add(copy_of(request, request.request_id, loop.executor.now()))
    while loop.step():
        for request in islice(left, len(loop.trace.finished) - ended):
            loop.add(copy_of(request, request.request_id, loop.executor.now()))
        ended = len(loop.trace.finished)
        decode_on(loop)
    return loop.trace


def decode_on(loop: Loop) -> None:
    """Decode on until a request may arrive, start or end: to the last bit as `Loop.step` would.

    Most iterations of a light load are such. Of a user's own policies it knows nothing.
    """
    scheduler, executor, decodes = loop.scheduler, loop.executor, loop.scheduler.running
    if type(scheduler) not in KNOWN or not decodes:
        return
    if scheduler.can_admit() or scheduler.started():
        return
    memory, cost, trace, count = scheduler.memory, executor.cost_model, loop.trace, len(decodes)
    left = min([request.max_tokens - len(request.output) for request in decodes]) - 1
    if memory.capacity is not None:
        left = min(left, (memory.capacity - memory.taken) // count)
    arrival = loop.arriving[0].arrival if loop.arriving else math.inf
    others, ids = cost.without_attention(count, count), tuple([r.request_id for r in decodes])
    tokens, ends, now = count + sum([r.context for r in decodes]), [], executor.clock
    while len(ends) < left and now < arrival:
        seconds = cost.host.around(others + cost.decode_attention(count, tokens), count)
        trace.iterations.append(Iteration(now, seconds, 0, count, 0, decodes=ids))
        now, tokens = now + seconds, tokens + count
        ends.append(now)
    executor.clock = now
    memory.taken += count * len(ends)
    for request in decodes:
        request.context += len(ends)
        request.output += len(ends) * [0]
        trace.lives[request.request_id].tokens += ends


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
    replica: Replica,
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
        count, most = enough(margin * start, precision, traffic), math.inf
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


def throughput(replica: Replica, requests: Sequence[Request], policy: str, budget: int) -> float:
    """Requests per second that end in the middle of a run, where all of them wait at its start."""
    trace = replica.serve(at_rate(requests, 1e6), policy, budget)
    ends = sorted(moment for _, moment in trace.finished)
    begin, end = ends[len(ends) // 4], ends[3 * len(ends) // 4]
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


def affordable(rate: float, precision: float, replica: Replica, traffic: Traffic) -> int:
    """Requests of a run of about ITERATIONS, or more where so many are `needed`.

    A request has an iteration for each output token: that many, if no two requests share one. And
    the run has no more iterations than fit into its time.
    """
    usual = max(2, int(np.median(traffic.prompts)))  # of a decode: it has a prompt before it
    decode = replica.cost.seconds(make_batch(decodes=1, context=usual))
    shared = max(1 / float(traffic.outputs.mean()), rate * decode)
    return math.ceil(max(FEW, needed(rate, precision), ITERATIONS * shared))


def budgets_of(replica: Replica, traffic: Traffic, slo: Slo, sizes: Sequence[int]) -> list[int]:
    """The `sizes` that are tried as token budgets.

    They end with the first whose iteration is longer than a gap may be, even without a decode:
    still larger ones serve no more. Its tokens are those of usual prompts. Where the SLO bounds
    means, or lower percentiles, some long iterations may be worth it: all sizes are tried.
    """
    usual = int(np.median(traffic.prompts))
    over = [worst_iteration(replica.cost, size, 0, longest=usual) > slo.gap for size in sizes]
    return list(sizes[: over.index(True) + 1] if True in over else sizes)


def beside(budgets: Sequence[int], best: int) -> list[int]:
    """Budgets that were not tried: in the middle between the best and its neighbours, in tiles."""
    place = budgets.index(best)
    middles = [(best + size) // 2 // TILE * TILE for size in budgets[max(0, place - 1) : place + 2]]
    return [size for size in dict.fromkeys(middles) if size and size not in budgets]


def best_budget(
    replica: Replica, traffic: Traffic, slo: Slo, policy: str, budgets: Sequence[int],
    precision: float, first: int,
) -> Found:  # fmt: skip
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
