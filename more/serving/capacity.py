"""Serving over time: what Sarathi-Serve's experiments and the planner share. All times in seconds.

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
from dataclasses import dataclass, field, replace

import numpy as np

from batch import LATEST, Batch, Request
from command.checks import UserError, check_number, check_whole, lookup
from configs import GPUS, LINKS
from costmodel import TILE, CostModel, make_batch, tokens_that_fit
from more.loading.priced import priced_model
from more.pipeline import Hop, StageCosts, even_layers, simulate_pipeline
from more.serving.search import percentile
from more.simulate import make_cost_model, simulate
from timeline import Life, Trace

MAX_DELAY = 2.0  # s: up to this median scheduling delay, we call the queue bounded
DECODES, CONTEXT = 32, 4096  # of a decode iteration, in the definition of the SLOs
LONGEST = 8192  # prompt tokens, in the definition of the worst iteration
STRICT, RELAXED = 5, 25  # decode iterations
# tokens that the paper allows a batch of sarathi_serve (Sec 5.1)
BUDGETS = {STRICT: 512, RELAXED: 2048}
MAX_BATCH_SIZE = 128  # B of all policies but Orca (the artefact's osdi-experiments/figure-5-6)
# Orca reserves memory for the longest possible request, for each one: so few fit (same source)
ORCA_BATCH_SIZE = 16
START_SHARE = 0.25  # of the requests: `Load.steady` leaves out as many at the start
LOOKS = 16  # of `overload_of` at a run


@dataclass(frozen=True)
class Deployment:
    """A model on `tp` GPUs of one kind, or on a pipeline of such stages."""

    model: str
    tp: int = 1
    gpu: str = "a100-80gb"
    stages: int = 1
    link: str = "nvlink-a100"  # joins the GPUs of a stage
    hop: str = "ethernet-100g-tcp-4.6"  # joins the stages
    orca_batch_size: int = ORCA_BATCH_SIZE
    max_batch_size: int = MAX_BATCH_SIZE  # of all policies but Orca
    host: str = "none"  # of HOSTS; a pipeline's first stage waits for it
    deal: str = "queue"  # of a pipeline's requests, see `MicroBatches`
    software: str = "vidur-2024"  # whose constants the cost model takes

    def __post_init__(self) -> None:
        priced_model(self.model)
        lookup(GPUS, self.gpu, "GPU")

    @property
    def layout(self) -> str:
        """As the paper writes it: TP4-PP2; and how requests are dealt, where that is not usual."""
        name = f"TP{self.tp}-PP{self.stages}" if self.stages > 1 else f"TP{self.tp}"
        return name if self.deal == "queue" else f"{name} {self.deal}"

    @property
    def hardware(self) -> str:
        """As the `hardware` column names it."""
        count = self.tp * self.stages
        return f"{count} x {self.gpu}" if count > 1 else self.gpu

    @property
    def cost_model(self) -> CostModel:
        return make_cost_model(self.model, self.gpu, self.tp, self.link, self.software, self.host)

    @property
    def cache_tokens(self) -> int:
        """Of all requests together. Each stage holds the keys and values of its own layers."""
        gpu = GPUS[self.gpu]
        return tokens_that_fit(
            priced_model(self.model), replace(gpu, memory=self.stages * gpu.memory), self.tp
        )

    def passage(self, batch: Batch) -> float:
        """Seconds of a batch through all stages, until the first stage knows its tokens.

        No request of the batch gets its next token sooner. The GPUs of a node share its port. Each
        sends its part of the activations, so they pass the port once.
        """
        cost = self.cost_model
        layers = even_layers(cost.model.n_layer, self.stages)
        seconds = sum(StageCosts(cost, layers)(batch))
        if self.stages > 1:
            hop = Hop.over(LINKS[self.hop], cost)
            sent = hop.latency + hop.seconds_per_token * batch.num_tokens
            seconds += (self.stages - 1) * sent + hop.latency
        return seconds

    @property
    def decode_iteration(self) -> float:
        """Seconds of a decode-only batch. The SLOs are multiples of it.

        On a pipeline, this is its time through all stages: a request waits that long for a token.
        """
        return self.passage(make_batch(decodes=DECODES, context=CONTEXT))

    def serve(self, requests: Iterable[Request], policy: str, budget: int) -> Trace:
        """The requests under a policy, with the batch sizes and the memory of the paper.

        A pipeline has as many micro-batches as stages. They share the batch size evenly. They also
        share one pool of memory: the paper's software has one block manager for all batches.
        """
        size = self.orca_batch_size if policy == "orca" else self.max_batch_size
        options = {
            "policy": policy, "chunk_size": budget, "cache_tokens": self.cache_tokens,
            "tp": self.tp, "link": self.link, "software": self.software, "host": self.host,
        }  # fmt: skip
        if self.stages == 1:
            return simulate(requests, self.model, self.gpu, max_batch_size=size, **options)
        pipeline = simulate_pipeline(
            requests, self.model, self.gpu, max_batch_size=size // self.stages,
            stages=self.stages, memory="pool", hop=self.hop, deal=self.deal, keep=True, **options,
        )  # fmt: skip
        return pipeline.requests


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
            [each.seconds for each in self.bounds
             if each.quantity in quantities and (not percents or each.percent in percents)],
            default=math.inf,
        )  # fmt: skip

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
        gaps, delays, requests = [], [], []
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
    most = above(sum(request.max_tokens - 1 for request in requests), 99) + size
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
        due, now = len(trace.lives) + step, trace.iterations[-1].start
        lives = [life for life in trace.lives.values() if life.arrival >= steady[0]]
        new, looked = trace.iterations[looked:], len(trace.iterations)
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
    room, chunks = budget - decodes, []
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
