"""Sarathi-Serve, Fig 1b: P99 time between tokens and median time to first token against load.

    python experiments/serve_latency.py
        predicted for Yi-34B on two A100s, chat lengths: seconds, no GPU needed
    python experiments/serve_latency.py --measure
        and the real engine on this machine, in real time: a minute or two

The same 512 requests with Poisson arrivals come at every rate and under every policy; only the
arrival times are scaled. The token budgets are 1536, as in the paper's Fig 1, and 512, its choice
for a strict SLO. The dotted line is that SLO: 5 decode iterations. On this machine three policies
take turns, with a small model, short prompts, B = 8 and a token budget of 64.
"""

import enter  # noqa: F401

import math
from collections.abc import Sequence
from functools import lru_cache, partial

from batch import Request
from command.flags import Flag
from experiments.lib import measuring
from experiments.lib.claims import Claim, Finding, bounded
from experiments.lib.engines import Real, Sweep, cases
from experiments.lib.flags import POLICIES
from experiments.lib.papers import CHAT, OURS, RIVALS, YI
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study
from serving.capacity import STRICT, Deployment, median_ttft, p99_tbt
from serving.traffic import LogNormal, make_requests, poisson
from timeline import Trace

REQUESTS = 512
# requests/s; the paper's artefact has 0.55, 0.7 and 1.0
RATES = (0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.45)
QUICK_RATES = (0.3, 1.0, 1.45)  # those of the caption
SHARES = {"a third": 1 / 3, "two thirds": 2 / 3}  # of what this machine can serve
SMALL, LARGE = 512, 1536  # token budgets; the rivals read none


def metrics(trace: Trace) -> Row:
    tokens = sum(len(life.tokens) for life in trace.lives.values())
    return {
        "P99 TBT": p99_tbt(trace),
        "median TTFT": median_ttft(trace),
        "output tokens": tokens / trace.seconds,
    }


def strict_slo(engine: Deployment) -> Row:
    """Seconds."""
    return {"strict SLO": STRICT * engine.decode_iteration}


def at_rate(engine: Deployment, rate: float, policy: str, count: int, seed: int, C: int = 1) -> Row:
    """Of `count` chat requests, at `rate` per second, under a token budget of C."""
    return metrics(engine.serve(CHAT.requests(count, rate, seed), policy, C))


def short_requests(arrivals: Sequence[float], L: int) -> list[Request]:
    """With log-normal lengths, none longer than L tokens."""
    prompts = LogNormal(L / 4, L / 2, 3 * L // 4)
    return make_requests(arrivals, prompts, LogNormal(L / 16, L / 8, L // 4))


@lru_cache(1)  # a model is large
def served_rate(engine: Real, count: int, L: int, budget: int) -> float:
    """Requests per second of this machine, if they all wait from the start."""
    measuring.generate(engine.llm, short_requests([0.0] * count, L), OURS, budget)
    return count / engine.llm.trace.seconds


def at_share(
    engine: Real, share: str, policy: str, L: int, B: int, budget: int, count: int, C: int = 1
) -> Row:
    """At a part of what this machine can serve under `budget`, with requests of up to L tokens."""
    rate = round(SHARES[share] * served_rate(engine, count, L, budget), 3)
    trace = engine.serve(short_requests(poisson(count, rate), L), policy, C)
    return {"rate": rate} | metrics(trace)


def runs(budgets: Sequence[int], others: Sequence[str] | None) -> list[Row]:
    """Each policy with its budgets. others: more policies, with the first budget."""
    more = [name for name in dict.fromkeys(others or ()) if name != OURS]
    return cases(policy=RIVALS) + cases(policy=OURS, C=budgets) + cases(policy=more, C=budgets[0])


def sweeps(
    quick: bool, seed: int = 0, policy: Sequence[str] | None = None, **_: object
) -> list[Sweep]:
    """policy: more of them, with the token budget of the strict SLO."""
    served = partial(at_rate, count=64 if quick else REQUESTS, seed=seed)
    rates = cases(rate=QUICK_RATES if quick else RATES)
    (L, B, C), count = ((64, 3, 16), 6) if quick else ((512, 8, 64), 24)
    here = [s | each for s in cases(share=list(SHARES), L=L, B=B) for each in runs((C,), policy)]
    return [
        Sweep(strict_slo, [YI], [{}]),
        Sweep(served, [YI], [r | each for r in rates for each in runs((SMALL, LARGE), policy)]),
        Sweep(partial(at_share, budget=C, count=count), [], [], measured=here),
    ]


def who_keeps_the_slo(rows: Rows) -> list[Finding]:
    """vLLM misses it under a high load; a small token budget never does."""
    slo = rows.one("strict SLO")
    stalls = bounded("P99 TBT", slo, math.inf, policy="vllm_v0", rate=(1.0, 1.45))
    return stalls(rows) + bounded("P99 TBT", 0, slo, policy=OURS, C=SMALL)(rows)


STUDY = Study(
    "serve_latency",
    __doc__,
    sweeps,
    units={"strict SLO": "s", "P99 TBT": "s", "median TTFT": "s", "output tokens": "tokens/s"},
    title="Sarathi-Serve Fig 1b: latency against load",
    panels=[
        Panel("rate", "P99 TBT", ("policy", "C"), rule="strict SLO", log="y"),
        Panel("rate", "median TTFT", ("policy", "C"), log="y"),
    ],
    claims=[Claim("a token budget keeps the SLO, and vLLM does not", who_keeps_the_slo)],
    flags={"seed": Flag("seed of the predicted requests", 0)} | POLICIES,
    measure=True,
    repeats=1,
    shown=lambda row, quantity: (
        row["source"] == "measured" or quantity in ("P99 TBT", "strict SLO")
    ),
)

if __name__ == "__main__":
    STUDY.main()
