"""Serving over time: what Sarathi-Serve's experiments and the planner share. All times in seconds.

deployment     a model on GPUs, as one engine serves it: its memory, its batch size, its runs.
capacity       the largest request rate that a policy serves within an SLO with a bounded queue: a
               median scheduling delay of at most 2 s (Sarathi-Serve, Sec 5.1).
               more/serving/planner.py searches it. Start and end of a run do not count
               (`Load.steady`).
strict SLO     a P99 TBT of at most 5 decode iterations; relaxed: 25 (Sec 5.1, Table 3). A decode
               iteration is a batch of 32 decodes with a context of 4096 tokens each.
token budget   for an SLO: the largest multiple of the tile whose worst iteration meets the SLO
               (Sec 4.3). It holds those 32 decodes and the end of the longest prompt, 8192 tokens.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from batch import LATEST, Batch, Request
from command.checks import UserError, check_number, check_whole, lookup
from configs import GPU, GPUS, LINKS, Link, ModelConfig
from configs.constants import Efficiency
from configs.hosts import HOSTS, Host
from costmodel import TILE, CostModel, make_batch, tokens_that_fit
from more.fast_forward import FastForward
from more.loading.priced import priced_model
from more.pipeline import (
    Hop,
    PipelineTrace,
    StageCosts,
    even_layers,
    make_micro_batches,
    run_pipeline,
)
from more.serving.search import percentile
from more.serving.traffic import copy_of
from more.simulate import CostExecutor
from scheduler import make_scheduler
from timeline import Life, Trace

MAX_DELAY = 2.0  # s: up to this median scheduling delay, we call the queue bounded
# of a decode iteration, in the definition of the SLOs
DECODES = 32
CONTEXT = 4096
LONGEST = 8192  # prompt tokens, in the definition of the worst iteration
# decode iterations
STRICT = 5
RELAXED = 25
# tokens that the paper allows a batch of sarathi_serve (Sec 5.1)
BUDGETS = {STRICT: 512, RELAXED: 2048}
MAX_BATCH_SIZE = 128  # B of all policies but Orca (the artefact's osdi-experiments/figure-5-6)
# Orca reserves memory for the longest possible request, for each one: so few fit (same source)
ORCA_BATCH_SIZE = 16
START_SHARE = 0.25  # of the requests: `Load.steady` leaves out as many at the start
LOOKS = 16  # of `overload_of` at a run
WHOLE = ("request_level", "baseline", "orca", "vllm_v0")  # policies that read no token budget


@dataclass(frozen=True)
class Deployment:
    """A model on `tp` GPUs of one kind, or on a pipeline of such stages, as one engine serves it.

    model, gpu, link, hop, host: names, or your own. link: joins the GPUs of a stage; None: the
    GPU's own. hop: joins the stages. Their micro-batches share the batch size evenly, and one pool
    of memory: the paper's software has one block manager for all batches. deal: see `MicroBatches`.
    software: whose constants the cost model takes; efficiency: your own instead.
    cache: tokens, of all requests together; None: all memory that the weights leave. utilization:
    of the cards' memory, which then gives the tokens of cache (`cache_of_engine`).

    Raises UserError for names that are not known, and where tp does not divide the model.
    """

    model: str | ModelConfig
    tp: int = 1
    gpu: str | GPU = "a100-80gb"
    stages: int = 1
    link: str | Link | None = "nvlink-a100"
    hop: str | Link = "ethernet-100g-tcp-4.6"
    orca_batch_size: int = ORCA_BATCH_SIZE
    max_batch_size: int = MAX_BATCH_SIZE  # of all policies but Orca
    host: str | Host = "none"  # a pipeline's first stage waits for it
    deal: str = "queue"
    software: str = "vidur-2024"
    efficiency: Efficiency | None = None
    cache: int | None = None
    utilization: float | None = None
    cost_model: CostModel = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        cost = CostModel(
            priced_model(self.model),
            named(GPUS, self.gpu, "GPU", GPU),
            self.efficiency,
            tp=self.tp,
            link=None if self.link is None else named(LINKS, self.link, "link", Link),
            software=self.software,
            host=named(HOSTS, self.host, "host", Host),
        )
        object.__setattr__(self, "cost_model", cost)  # as a frozen class allows it

    @property
    def layout(self) -> str:
        """As the paper writes it: TP4-PP2."""
        return f"TP{self.tp}-PP{self.stages}" if self.stages > 1 else f"TP{self.tp}"

    @property
    def gpus(self) -> int:
        return self.tp * self.stages

    @property
    def hardware(self) -> str:
        """As the `hardware` column names it."""
        name = self.cost_model.gpu.name
        return f"{self.gpus} x {name}" if self.gpus > 1 else name

    @property
    def cache_tokens(self) -> int:
        """Of all requests together. Each stage holds the keys and values of its own layers."""
        if self.cache is not None:
            return self.cache
        gpu = self.cost_model.gpu
        room = replace(gpu, memory=self.stages * gpu.memory)
        return tokens_that_fit(self.cost_model.model, room, self.tp)

    def size(self, budget: int, policy: str = "") -> int:
        """B with this budget: a batch of C tokens has no more than C decodes."""
        name = policy.partition(":")[0]
        if name == "orca":
            return self.orca_batch_size
        return self.max_batch_size if name in WHOLE else min(self.max_batch_size, budget)

    def holds(self, budget: int) -> int:
        """Tokens of cache with this budget."""
        if self.utilization is None:
            return self.cache_tokens
        own = self.cost_model, self.stages, budget, self.size(budget)
        return cache_of_engine(*own, self.utilization)

    def static_share(self, budget: int) -> float | None:
        """What gives SGLang the cache of `holds`: its --mem-fraction-static, to 0.001 below.

        Weights and cache, as a share of what is free before them: more/serving/engines.py.
        """
        if self.utilization is None:
            return None
        card, weights, outside = bytes_of(self.cost_model, self.stages)
        cache = self.holds(budget) * self.cost_model.kv_bytes / self.stages
        return math.floor(1e3 * (weights + cache) / (card - outside)) / 1e3

    def passage(self, batch: Batch) -> float:
        """Seconds of a batch through all stages, until the first stage knows its tokens.

        No request of the batch gets its next token sooner. The GPUs of a node share its port. Each
        sends its part of the activations, so they pass the port once.
        """
        cost = self.cost_model
        layers = even_layers(cost.model.n_layer, self.stages)
        seconds = sum(StageCosts(cost, layers)(batch))
        if self.stages > 1:
            hop = self._hop
            sent = hop.latency + hop.seconds_per_token * batch.num_tokens
            seconds += (self.stages - 1) * sent + hop.latency
        return seconds

    @property
    def decodes(self) -> Batch:
        """32 decodes with 4096 tokens of context each, or as many of each as there may be."""
        decodes = min(DECODES, self.max_batch_size)
        return make_batch(decodes=decodes, context=min(CONTEXT, self.cost_model.model.max_length))

    @property
    def decode_iteration(self) -> float:
        """Seconds of a decode-only batch. The SLOs are multiples of it.

        On a pipeline, this is its time through all stages: a request waits that long for a token.
        """
        return self.passage(self.decodes)

    @property
    def _hop(self) -> Hop:
        return Hop.over(named(LINKS, self.hop, "link", Link), self.cost_model)

    def serve(
        self,
        requests: Sequence[Request],
        policy: str,
        budget: int,
        clients: int | None = None,
        over: Callable[[Trace], bool] | None = None,
        step: float = 0.0,
    ) -> Trace:
        """The run of these requests. budget: C, in tokens. clients, step: see `run_closed`.

        over: asked with the trace so far, after iterations; True ends the run there.
        """
        cost = self.cost_model
        stages = self.stages
        size = self.size(budget, policy)
        cache_tokens = self.holds(budget)
        if stages == 1:
            scheduler = make_scheduler(policy, size, budget, cache_tokens)
            loop = FastForward(scheduler, CostExecutor(cost))
            if clients is not None:
                return run_closed(loop, requests, clients, step)
            for request in requests:
                loop.add(request)
            while loop.step() and not (over and over(loop.trace)):
                pass
            loop.settle()
            return loop.trace
        filled = make_micro_batches(
            policy,
            stages,
            stages,
            max(1, size // stages),
            budget,
            cache_tokens,
            memory="pool",
            cost=cost.seconds,
            deal=self.deal,
        )
        for request in requests:
            filled.add(request)
        own = StageCosts(cost, even_layers(cost.model.n_layer, stages))
        trace = PipelineTrace(stages, filled.count, keep=True)

        def costs(batch: Batch) -> list[float]:
            if over and over(trace.requests):
                raise StopIteration
            return own(batch)

        with suppress(StopIteration):
            run_pipeline(filled, costs, trace, self._hop)
        return trace.requests


def named(table: dict, each: object, kind: str, own: type) -> Any:
    """What has this name in the table. An object of type `own` is itself."""
    return each if isinstance(each, own) else lookup(table, each, kind)


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
    model = cost.model
    tp = cost.tp
    check_number("utilization", utilization, 0, 1)
    each = 3 * model.intermediate // tp + (model.hidden if model.experts else 0)
    widest = (max(1, model.chosen) * each + 2 * model.hidden) * cost.bytes_per_value
    activations = budget * widest + batch_size * model.vocab_size * LOGIT
    card, weights, outside = bytes_of(cost, stages)
    taken = weights + activations + outside
    free = utilization * (card - taken) if of_free else utilization * card - taken
    return max(0, int(free * stages // cost.kv_bytes))


def run_closed(
    loop: FastForward, requests: Iterable[Request], clients: int, step: float = 0.0
) -> Trace:
    """A closed loop: each of `clients` sends its next request when it has its last token.

    Or when the policy has rejected its last request. It is what `vllm bench serve
    --max-concurrency` does. The requests' own arrivals do not count. Requests of equal lengths
    begin and end together, for ever: all prompts come at once. step: seconds from one client's
    first request to the next one's, so that they do not.
    """
    check_whole("clients", clients)
    left = iter(requests)
    ended = 0
    for place, request in enumerate(islice(left, clients)):
        loop.add(copy_of(request, request.request_id, loop.executor.now() + place * step))
    going = True
    while going:
        iteration = loop.step()
        gone = len(loop.trace.finished) + len(loop.trace.rejected)
        new = list(islice(left, gone - ended))
        for request in new:
            loop.add(copy_of(request, request.request_id, loop.executor.now()))
        ended = gone
        going = bool(new) or iteration is not None
    return loop.trace


# ------------------------------------------------------------------------------------------ metrics


def p99_tbt(trace: Trace) -> float:
    """P99 of the times between tokens of all requests."""
    return percentile(trace.tbts, 99)


def median_ttft(trace: Trace) -> float:
    return percentile(trace.ttfts, 50)


def token_times(trace: Trace) -> list[float]:
    """When each output token of any request came, in order of time."""
    return sorted(moment for life in trace.lives.values() for moment in life.tokens)


def tpot(life: Life) -> float:
    """Seconds per output token after the first one, of one request; NaN where it has no other.

    (latency - TTFT) / (output tokens - 1), as `vllm bench serve` counts it.
    """
    gaps = len(life.tokens) - 1
    return (life.tokens[-1] - life.tokens[0]) / gaps if gaps else math.nan


# ----------------------------------------------------------------------------------------- capacity


# What an SLO may bound: the time of a request to its first token, its mean time per output token,
# its time from arrival to the last token (E2E). And "tbt", single times between tokens, of all
# requests together.
PER_REQUEST = ("ttft", "tpot", "e2e")
PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True)
class Bound:
    """A percentile of a quantity may be `seconds` at most."""

    quantity: str  # "tbt", or one of PER_REQUEST
    percent: float  # of "tbt": one of PERCENTS
    seconds: float

    def __post_init__(self) -> None:
        check_number(f"the SLO of the {self.name}", self.seconds, 1e-9, LATEST, "number of seconds")

    @property
    def name(self) -> str:
        return f"P{self.percent:g} {self.quantity.upper()}"


@dataclass(frozen=True)
class Slo:
    """What users may expect: bounds, all of which hold."""

    bounds: tuple[Bound, ...]

    @staticmethod
    def of(tbt: float, ttft: float = math.inf) -> "Slo":
        """The P99 of the TBT and the P90 of the TTFT, in seconds."""
        first = (Bound("ttft", 90, ttft),) if ttft < math.inf else ()
        return Slo((Bound("tbt", 99, tbt), *first))

    def __str__(self) -> str:
        return ", ".join(
            f"{each.name} at most {1e3 * each.seconds:{'.4g' if each.seconds < 1 else '.0f'}} ms"
            for each in self.bounds
        )

    def least(self, *quantities: str, percents: Sequence[float] = ()) -> float:
        """Seconds of the lowest bound on these quantities, at these percents or at any."""
        return min(
            [
                each.seconds
                for each in self.bounds
                if each.quantity in quantities and (not percents or each.percent in percents)
            ],
            default=math.inf,
        )

    @property
    def gap(self) -> float:
        """Seconds that nearly no single time between tokens may exceed."""
        return self.least("tbt", percents=(99,))


def steady_span(trace: Trace) -> tuple[float, float]:
    """From the first arrival after START_SHARE of the requests to the last arrival, in s.

    Before it, the engine fills up; after it, it runs empty. Both make a load look light.
    """
    arrivals = sorted(life.arrival for life in trace.lives.values())
    return arrivals[int(START_SHARE * len(arrivals))], arrivals[-1]


@dataclass(frozen=True, eq=False)
class Load:
    """What decides whether a rate is served. All in seconds.

    tbts: by percent, of all single times between tokens. requests: (n, 3), PER_REQUEST of each.
    """

    tbts: Mapping[float, float]
    median_delay: float
    requests: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))

    @staticmethod
    def of(trace: Trace, begin: float = -math.inf, end: float = math.inf) -> "Load":
        """Of the tokens between these times, and of the requests that arrived in between."""
        gaps = []
        delays = []
        requests = []
        for life in trace.lives.values():
            moments = np.array(life.tokens)
            gaps.append(np.diff(moments[(begin <= moments) & (moments <= end)]))
            if life.arrival >= begin:
                delays.append(life.scheduling_delay)
                requests.append((life.ttft, tpot(life), life.latency))
        every = np.concatenate(gaps)
        tbts = np.percentile(every, PERCENTS) if len(every) else [0.0] * len(PERCENTS)
        shares = dict(zip(PERCENTS, map(float, tbts), strict=True))
        return Load(shares, percentile(delays, 50), np.array(requests))

    @staticmethod
    def steady(trace: Trace) -> "Load":
        """Without the run's start and its end.

        The requests are those that arrive in the `steady_span`. The times between tokens are those
        that lie in it.
        """
        return Load.of(trace, *steady_span(trace))

    def value(self, quantity: str, percent: float) -> float:
        """A percentile; 0 where there are no values."""
        if quantity == "tbt":
            return self.tbts[percent]
        values = self.requests[:, PER_REQUEST.index(quantity)]
        return percentile(values[~np.isnan(values)].tolist(), percent)

    def meets(self, slo: Slo) -> bool:
        """Within the SLO, and a bounded queue."""
        return self.median_delay <= MAX_DELAY and all(
            self.value(each.quantity, each.percent) <= each.seconds for each in slo.bounds
        )


# when a request has got what a bound is on
REACHED = {
    "delay": lambda life: life.scheduled,
    "ttft": lambda life: life.tokens[0] if life.tokens else math.inf,
}


def above(count: int, percent: float) -> int:
    """With so many of `count` values above a limit, their percentile is above it, too."""
    return count - int(percent / 100 * (count - 1))


def overload_of(
    requests: Sequence[Request], slo: Slo | None = None, size: int = 0
) -> Callable[[Trace], bool]:
    """A function of these requests' trace so far: its `Load.steady` surely misses the SLO.

    None: surely a median delay above MAX_DELAY. A request that still waits is as late as now.
    size: as many run at once. No time between tokens is shorter than the iteration before.
    """
    arrivals = np.sort([request.arrival for request in requests])
    steady = arrivals[arrivals >= arrivals[int(START_SHARE * len(arrivals))]]
    bounds = [Bound("delay", 50, MAX_DELAY), *(slo.bounds if slo else ())]
    most = above(sum(request.ends_after - 1 for request in requests), 99) + size
    gap = slo.gap if slo else math.inf
    step = due = -(-len(arrivals) // LOOKS)
    looked = long = 0

    def late(each: Bound, lives: Sequence[Life], now: float) -> bool:
        reached = REACHED[each.quantity]
        in_time = sum([reached(life) - life.arrival <= each.seconds for life in lives])
        arrived = int(np.searchsorted(steady, now - each.seconds))
        return arrived - in_time >= above(len(steady), each.percent)

    def surely(trace: Trace) -> bool:
        nonlocal due, looked, long
        if len(trace.lives) < due:
            return False
        due = len(trace.lives) + step
        now = trace.iterations[-1].start
        lives = [life for life in trace.lives.values() if life.arrival >= steady[0]]
        new = trace.iterations[looked:]
        looked = len(trace.iterations)
        inside = [each for each in new if steady[0] <= each.start and each.end <= steady[-1]]
        long += sum([each.num_decodes for each in inside if each.end - each.start > gap])
        return long >= most or any(
            late(each, lives, now) for each in bounds if each.quantity in REACHED
        )

    return surely


# --------------------------------------------------------------------------------- the token budget


def worst_iteration(
    cost: CostModel,
    budget: int,
    decodes: int = DECODES,
    context: int = CONTEXT,
    longest: int = LONGEST,
) -> float:
    """Seconds of the longest batch of `budget` tokens.

    It holds that many decodes of that context, and the ends of prompts of `longest` tokens.
    """
    check_whole("longest", longest)
    room = budget - decodes
    chunks = []
    while room > 0:
        chunks.append((max(0, longest - room), min(room, longest), longest))
        room -= longest
    return cost.seconds(make_batch(chunks, decodes, context))


def token_budget(cost: CostModel, slo: float, longest: int = LONGEST) -> int:
    """The largest multiple of the tile whose worst iteration takes at most `slo` seconds.

    It is no larger than the longest prompt (Sarathi-Serve, Sec 4.3).

    cost: of a GPU (CostModel), or of this machine (CalibratedModel of
    more/serving/calibration.py). Raises UserError if no budget meets the SLO.
    """
    check_number("slo", slo, 0, LATEST, "number of seconds")
    first = (DECODES // TILE + 1) * TILE  # with room for a chunk beside the decodes
    budgets = range(first, max(first, longest) + 1, TILE)
    found = [each for each in budgets if worst_iteration(cost, each, longest=longest) <= slo]
    if not found:
        least = worst_iteration(cost, first, longest=longest)
        raise UserError(
            f"no token budget keeps a TBT of {slo:g} s: {first} tokens, the smallest with {DECODES}"
            f" decodes of {CONTEXT} tokens, take {least:.3g} s"
        )
    return max(found)
