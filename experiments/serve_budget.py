"""The token budget: time to first token against time between tokens (Sarathi-Serve, Sec 4.3).

    python experiments/serve_budget.py      predicted for Mistral-7B on an A100: seconds

A small budget keeps each iteration short, and so the time between tokens. But it reads the weights
more often for the same prompts, and at some load the queue grows. Take the largest multiple of the
tile whose worst iteration stays within the SLO: `token_budget` of more/serving/capacity.py finds it
from one profile, without running a request. The curves check it on 512 chat requests at 2.5 per
second. plan.py finds the best budget for your traffic.
"""

import enter  # noqa: F401

from functools import partial

from command.flags import Flag
from experiments.lib.claims import Claims, bounded, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import CHAT, MISTRAL, OURS, YI
from experiments.lib.published import paper_table
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study
from more.serving import capacity
from more.serving.capacity import Deployment, token_budget, worst_iteration

REQUESTS = 512
RATE = 2.5
BUDGETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SLOS = {"strict": capacity.STRICT, "relaxed": capacity.RELAXED}


def latencies(engine: Deployment, C: int, rate: float, count: int, seed: int) -> Row:
    """Seconds, of `count` requests under a token budget of C."""
    trace = engine.serve(CHAT.requests(count, rate, seed), OURS, C)
    return {
        "P99 TBT": capacity.p99_tbt(trace),
        "longest TBT": max(trace.tbts),
        "worst iteration": worst_iteration(engine.cost_model, C),
        "median TTFT": capacity.median_ttft(trace),
        "P90 TTFT": capacity.percentile(trace.ttfts, 90),
    }


def budget_of(engine: Deployment, slo: str) -> Row:
    """An SLO in seconds, and the tokens that it allows."""
    seconds = SLOS[slo] * engine.decode_iteration
    return {"SLO": seconds, "token budget": token_budget(engine.cost_model, seconds)}


def sweeps(quick: bool, seed: int = 0) -> list[Sweep]:
    run = partial(latencies, count=64 if quick else REQUESTS, seed=seed)
    return [
        Sweep(run, [MISTRAL], cases(C=BUDGETS[1::4] if quick else BUDGETS, rate=RATE)),
        Sweep(budget_of, [MISTRAL, YI], cases(slo=list(SLOS))),
    ]


GAPS = ("P99 TBT", "longest TBT", "worst iteration")
SHOW = {"xlabel": "token budget C", "ylabel": "time (s)"}
PANEL = {"where": {"model": MISTRAL.model}, "log": "xy", "show": SHOW}


def claims(rows: Rows) -> Claims:
    last = rows.one("median TTFT", C=BUDGETS[-1])
    shortened = bounded(rows, "median TTFT", last, 1.5 * last, C=BUDGETS[4:])
    return {
        "a larger token budget lengthens the gaps": rises(rows, "P99 TBT", "C"),
        "a large one hardly shortens the time to first token": shortened,
    }


STUDY = Study(
    "serve_budget",
    __doc__,
    sweeps,
    units={
        **dict.fromkeys((*GAPS, "SLO", "median TTFT", "P90 TTFT"), "s"),
        "token budget": "tokens",
    },
    title=f"The token budget, {RATE} requests/s: time between tokens, and time to first token",
    panels=[
        Panel("C", GAPS[::-1], title="time between tokens", rule="SLO", **PANEL),
        Panel("C", ("P90 TTFT", "median TTFT"), title="time to first token", **PANEL),
    ],
    paper=paper_table(
        ("model", "slo", "SLO", "token budget"),
        [
            (YI.model, "relaxed", "ss_slo_relaxed_yi", None),
            (MISTRAL.model, "strict", "ss_slo_strict_mistral", "ss_budget_strict"),
            (MISTRAL.model, "relaxed", "ss_slo_relaxed_mistral", "ss_budget_relaxed"),
        ],
    ),
    claims=claims,
    shown=lambda row, quantity: not quantity.startswith(("longest", "P90")),
    flags={"seed": Flag("seed of arrivals and lengths", 0)},
)


if __name__ == "__main__":
    STUDY.main()
