"""Serving over time: what Sarathi-Serve's experiments share, and two of its words made exact.

capacity       the largest request rate that a policy serves within an SLO with a bounded queue
               (Sarathi-Serve, Sec 5.1; its artefact's capacity search). A rate is served if the P99
               of all times between tokens is at most the SLO, and the median scheduling delay at
               most 2 s. Where more arrives than is served the queue grows, and that median with it.
               Bisection finds the capacity. Every rate has the same requests with scaled arrival
               times, so that two rates or two policies differ by nothing else.
strict SLO     P99 TBT of at most 5 decode iterations; relaxed: 25 (Sec 5.1, Table 3). A decode
               iteration is a batch of 32 decodes with a context of 4096 tokens each and no prefill
               beside it, as our cost model prices it.
token budget   for an SLO: the largest multiple of the tile whose worst iteration stays within it
               (Sec 4.3). The worst iteration holds those 32 decodes. The rest of its budget is the
               end of the longest prompt (8192 tokens), which attends to all the tokens before it.

All times are in seconds. The constants of the cost model are those of the software that
Sarathi-Serve ran on (costmodel.EFFICIENCY). They come from single operators, so that nothing here
was fitted to any number of its paper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from batch import Request
from configs import GPUS, MODELS, UserError
from costmodel import EFFICIENCY, TILE, CostModel, make_batch, tokens_that_fit
from simulate import simulate
from timeline import Trace

MAX_DELAY = 2.0  # s: the median scheduling delay of a queue that we call bounded
DECODES, CONTEXT = 32, 4096  # of a decode iteration, in the definition of the SLOs
LONGEST = 8192  # prompt tokens, in that of the worst iteration
STRICT, RELAXED = 5, 25  # decode iterations
# tokens that the paper allows a batch of sarathi_serve (Sec 5.1)
BUDGETS = {STRICT: 512, RELAXED: 2048}
MAX_BATCH_SIZE = 128  # B of all policies but Orca (the artefact's osdi-experiments/figure-5-6)
# Orca reserves the longest possible request's memory for each, so that few fit (the same)
ORCA_BATCH_SIZE = 16
# A capacity is known when the rate that is served and the one that is not differ by less than this
# (2.5 %, as in the artefact).
PRECISION = 1.025


@dataclass(frozen=True)
class Deployment:
    """A model on `tp` GPUs of one kind."""

    model: str
    tp: int = 1
    gpu: str = "a100-80gb"

    @property
    def hardware(self) -> str:
        """As the `hardware` column names it."""
        return f"{self.tp} x {self.gpu}" if self.tp > 1 else self.gpu

    @property
    def cost_model(self) -> CostModel:
        return CostModel(
            MODELS[self.model], GPUS[self.gpu], EFFICIENCY["sarathi_serve"], tp=self.tp
        )

    @property
    def cache_tokens(self) -> int:
        return tokens_that_fit(MODELS[self.model], GPUS[self.gpu], self.tp)

    @property
    def decode_iteration(self) -> float:
        """Seconds of the decode-only batch that the SLOs are multiples of."""
        return self.cost_model.seconds(make_batch(decodes=DECODES, context=CONTEXT))

    def serve(self, requests: Sequence[Request], policy: str, budget: int) -> Trace:
        """The requests under a policy, with the batch sizes and the memory of the paper."""
        return simulate(
            requests, self.model, self.gpu, policy=policy, chunk_size=budget,
            max_batch_size=ORCA_BATCH_SIZE if policy == "orca" else MAX_BATCH_SIZE,
            cache_tokens=self.cache_tokens, tp=self.tp, software="sarathi_serve",
        )  # fmt: skip


# ------------------------------------------------------------------------------------------ metrics


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between neighbours; 0 where there are no values.

    Requests of one token have no time between tokens.
    """
    return float(np.percentile(values, percent)) if len(values) else 0.0


def p99_tbt(trace: Trace) -> float:
    """P99 of `trace.tbts`, all times between tokens of all requests together.

    It uses numpy, as a search asks for it often.
    """
    return percentile(np.concatenate([np.diff(life.tokens) for life in trace.lives.values()]), 99)


def median_ttft(trace: Trace) -> float:
    return percentile(trace.ttfts, 50)


def median_delay(trace: Trace) -> float:
    """Median scheduling delay."""
    return percentile([life.scheduling_delay for life in trace.lives.values()], 50)


def token_times(trace: Trace) -> list[float]:
    """When each output token of any request was there, in order of time."""
    return sorted(moment for life in trace.lives.values() for moment in life.tokens)


def composition(trace: Trace, seconds: float) -> list[tuple[float, float, float]]:
    """The batches over time, in windows of `seconds`.

    Each window is (start, prompt tokens per second, decodes per second).
    """
    windows: dict[int, list[int]] = {}
    for iteration in trace.iterations:
        window = windows.setdefault(
            int((iteration.start - trace.iterations[0].start) / seconds), [0, 0]
        )
        window[0] += iteration.num_prefill_tokens
        window[1] += iteration.num_decodes
    return [
        (number * seconds, *[count / seconds for count in windows.get(number, (0, 0))])
        for number in range(max(windows, default=-1) + 1)
    ]


# ----------------------------------------------------------------------------------------- capacity


@dataclass(frozen=True)
class Load:
    """What decides whether a rate is served."""

    p99_tbt: float
    median_delay: float

    @staticmethod
    def of(trace: Trace) -> "Load":
        return Load(p99_tbt(trace), median_delay(trace))

    def meets(self, slo: float) -> bool:
        return self.p99_tbt <= slo and self.median_delay <= MAX_DELAY


def capacity(
    load: Callable[[float], Load], slo: float, precision: float = PRECISION, start: float = 1.0
) -> float:
    """The largest rate at which `load(rate)` meets the SLO, in requests per second.

    It is exact within a factor of `precision`.

    load: what the same requests see at that rate. start: where the search begins. It doubles or
    halves from there until it has a rate on each side, so that searches for several SLOs ask for
    the same rates. Returns 0 if not even 1/1000 of `start` is served. Raises UserError if
    everything is.
    """
    low = high = start
    if load(start).meets(slo):
        while load(high := 2 * high).meets(slo):
            low = high
            if high > 1000 * start:
                raise UserError(
                    "too few requests to find a capacity: the SLO holds even where they all come at"
                    " once"
                )
    else:
        while not load(low := low / 2).meets(slo):
            high = low
            if low < start / 1000:
                return 0.0
    while high / low > precision:
        middle = math.sqrt(low * high)
        if load(middle).meets(slo):
            low = middle
        else:
            high = middle
    return low


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
    room, chunks = budget - decodes, []
    while room > 0:
        chunks.append((max(0, longest - room), min(room, longest), longest))
        room -= longest
    return cost.seconds(make_batch(chunks, decodes, context))


def token_budget(
    cost: CostModel,
    slo: float,
    decodes: int = DECODES,
    context: int = CONTEXT,
    longest: int = LONGEST,
) -> int:
    """The largest multiple of the tile whose worst iteration takes at most `slo` seconds.

    It is no larger than the longest prompt (Sarathi-Serve, Sec 4.3).

    cost: one profile, of a GPU (CostModel) or of this machine (CalibratedModel of
    experiments/lib/calibration.py). Raises UserError if no budget will do.
    """
    first = (decodes // TILE + 1) * TILE  # with room for a chunk beside the decodes
    budgets = [first, *range(first + TILE, longest + 1, TILE)]
    found = [
        budget
        for budget in budgets
        if worst_iteration(cost, budget, decodes, context, longest) <= slo
    ]
    if not found:
        least = worst_iteration(cost, first, decodes, context, longest)
        raise UserError(
            f"no token budget keeps a TBT of {slo:g} s: {first} tokens, the smallest with {decodes}"
            f" decodes of {context} tokens, take {least:.3g} s"
        )
    return max(found)
