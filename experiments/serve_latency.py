r"""Latency against load, as a paper prints it: steady state, several windows, each policy's budget.

    python experiments/serve_latency.py
        Sarathi-Serve's Fig 1b, predicted for Yi-34B on two A100s, chat lengths: a minute, no GPU
    python experiments/serve_latency.py --measure
        and the real engine on this machine, in real time: a minute or two

    python experiments/serve_latency.py --requests-file examples/users.csv --by user \
            --policy vtc --policy-file my.py --model llama3.1-8b --gpu h100 --tp 1
        your requests, policies, model and GPU; and the same for each user

All policies serve the same windows of requests, each with the token budget (C) that suits it
(lib/windows.py says how). Lines are medians over the windows, bands the lowest and the highest:
with 8 windows, the true median lies between them in 99 of 100 cases. A promise is kept if no token
comes later than `ttft` + n `tbt` after the arrival, or the last one not later than `ttlt`: tags of
a request, in s. Without tags, `ttft` is 2 s and `tbt` five decode iterations, the strict SLO. The
rates are parts of what the GPU serves if all requests wait from the start.
"""

import enter  # noqa: F401

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from command.flags import Flag
from experiments.lib import measuring
from experiments.lib.claims import Claim, Finding, bounded
from experiments.lib.engines import Real, Sweep, cases, median_row
from experiments.lib.flags import SERVED
from experiments.lib.papers import (
    CHAT,
    OURS,
    RIVALS,
    YI,
    Recorded,
    burst_rate,
    deployments,
)
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study, draw_panels
from experiments.lib.windows import UNITS, Windows, by_tag
from more.serving.capacity import MAX_DELAY, STRICT, Deployment
from more.serving.lengths import length_error
from more.serving.traffic import FASTEST, LogNormal, make_requests, poisson

REQUESTS, WINDOWS = 256, 8
# requests/s; the paper's artefact has 0.55, 0.7 and 1.0
RATES = (0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.45)
QUICK_RATES = (0.3, 1.0, 1.45)  # those of the caption
# of what this machine can serve; the last one for requests of a user: a queue shows who waits
SHARES = {"a third": 1 / 3, "two thirds": 2 / 3, "more than all": 1.1}
SMALL, LARGE = 512, 1536  # token budgets of the paper's Fig 1
# of what is served if all requests wait: the rates, where requests, model or GPU are a user's
PARTS = (0.3, 0.5, 0.7, 0.9, 1.1)
TUNED = 0.9  # of the same: the rate at which each policy takes its budget
FLAGS = {
    "seed": Flag("seed of the predicted requests", 0),
    "rate": Flag("requests per second, in the predicted runs", shown="several", several=True),
    "requests": Flag("requests of each window", shown=f"{REQUESTS}; measured, 24"),
    "chunk_size": Flag("token budgets, of which each policy takes its best", (SMALL, LARGE)),
    "by": Flag(),
    "predicted_lengths": Flag(
        "what the tag predicted_tokens says: oracle, classes=A (right with probability A) or"
        " constant=N (more/serving/lengths.py)"
    ),
} | SERVED
UNITS = {"strict SLO": "s"} | UNITS | {"policy's time": "ms", "length error": "%"}


def at_rate(
    engine: Deployment, rate: float, policy: str, windows: Windows, C: int | None = None
) -> list[Row]:
    """Medians over the windows, at `rate` requests per second; then those of each tag."""
    return [median_row(rows) for rows in by_tag(windows.serve(engine, rate, policy, C))]


def strict_slo(engine: Deployment) -> Row:
    """Seconds."""
    return {"strict SLO": STRICT * engine.decode_iteration}


def error_of(engine: Deployment, lengths: str, data: Recorded, count: int, seed: int) -> Row:
    """%, of the predicted lengths."""
    return {"length error": 100 * length_error(data.window(1, count, 1.0, seed))}


def short_requests(arrivals: Sequence[float], L: int) -> list[Request]:
    """With log-normal lengths, none longer than L tokens."""
    prompts = LogNormal(L / 4, L / 2, 3 * L // 4)
    return make_requests(arrivals, prompts, LogNormal(L / 16, L / 8, L // 4))


@lru_cache(1)  # a model is large
def served_rate(engine: Real, count: int, L: int, budget: int, data: Recorded | None) -> float:
    """Requests per second of this machine, if they all wait from the start."""
    requests = data.requests(count, FASTEST) if data else short_requests([0.0] * count, L)
    measuring.generate(engine.llm, requests, OURS, budget)
    return len(engine.llm.trace.finished) / engine.llm.trace.seconds


def at_share(
    engine: Real, share: str, policy: str, L: int, B: int, budget: int, count: int,
    data: Recorded | None, windows: Windows, C: int = 1,
) -> list[Row]:  # fmt: skip
    """At a part of what this machine can serve under `budget`, with requests of up to L tokens."""
    rate = round(SHARES[share] * served_rate(engine, count, L, budget, data), 3)
    requests = data.requests(count, rate) if data else short_requests(poisson(count, rate), L)
    trace = engine.serve(requests, policy, C)
    spent = {"policy's time": 1e3 * trace.policy_seconds / trace.schedules}
    return [{"rate": rate} | spent | row for row in windows.metrics(trace)]


def sweeps(
    quick: bool,
    seed: int = 0,
    policy: Sequence[str] | None = None,
    requests_file: Path | None = None,
    rate: Sequence[float] | None = None,
    requests: int | None = None,
    chunk_size: Sequence[int] = (SMALL, LARGE),
    by: str | None = None,
    predicted_lengths: str | None = None,
    **named: object,
) -> list[Sweep]:
    """policy: more of them. The rest: see FLAGS."""
    [engine] = deployments([YI], **named)
    own = Recorded(requests_file, predicted_lengths, (engine,)) if requests_file else None
    if not own and (by or predicted_lengths):
        raise UserError(
            "--by and --predicted-lengths need --requests-file, whose requests have tags"
        )
    if by:
        own.values(by)
    data, windows, count = own or CHAT, 2 if quick else WINDOWS, 64 if quick else REQUESTS
    windows, count = data.divide(windows, requests or count)
    rates = rate or (QUICK_RATES if quick else RATES)
    theirs = bool(own or engine != YI)  # else it is the paper's figure
    most = burst_rate(engine, data, count, SMALL) if theirs or policy else 0.0
    if not rate and theirs:
        rates = [float(f"{part * most:.3g}") for part in PARTS]
    promise = MAX_DELAY, STRICT * engine.decode_iteration
    others = [name for name in dict.fromkeys(policy or ()) if name != OURS]
    ours = cases(policy=OURS) if theirs else cases(policy=OURS, C=chunk_size)
    chosen = Windows(data, count, windows, seed, tuple(chunk_size), TUNED * most, promise, by)
    run = partial(at_rate, windows=chosen)
    every = cases(policy=RIVALS) + ours + cases(policy=others)
    priced = [r | each for r in cases(rate=rates) for each in every]
    (L, B, C), few = ((64, 3, 16), 6) if quick else ((512, 8, 64), 24)
    L, B = own.max_length if own else L, named.get("max_batch_size") or B
    shares = list(SHARES)[: 3 if own else 2]
    several = cases(policy=RIVALS) + cases(policy=[OURS, *others], C=C)
    here = [s | each for s in cases(share=shares, L=L, B=B) for each in several]
    real = partial(at_share, budget=C, count=requests or few, data=own, windows=chosen)
    stated = cases(lengths=[predicted_lengths] if predicted_lengths else [])
    return [
        Sweep(strict_slo, [engine], [{}]),
        Sweep(run, [engine], priced, processes=True),
        Sweep(partial(error_of, data=data, count=count, seed=seed), [engine], stated),
        Sweep(real, [], [], measured=here),
    ]


def who_keeps_the_slo(rows: Rows) -> list[Finding]:
    """vLLM misses it under a high load; a small token budget never does."""
    slo = rows.one("strict SLO")
    stalls = bounded("P99 TBT", slo, math.inf, policy="vllm_v0", rate=(1.0, 1.45))
    return stalls(rows) + bounded("P99 TBT", 0, slo, policy=OURS, C=SMALL)(rows)


def by_policy(rows: Rows) -> None:
    """A line for each load and policy; with --by, what each value of the tag waits."""
    for source, own in rows.newest().where("P99 TTFT").by("source").items():
        columns = ("rate", "policy", "C", *(name for name in UNITS if any(own.column(name))))
        print_rows(Rows([row for row in own if "tag" not in row], UNITS), columns, source)
        if tags := dict.fromkeys(own.where("tag").column("tag")):
            every = Rows([{"tag": "all"} | row for row in own], own.units)
            for quantity in ("median TTFT", "promises kept"):
                title = f"{quantity} ({UNITS[quantity]}), {source}"
                wide = every.across("tag", quantity)
                print_rows(wide, ("rate", "policy", "C", "all", *tags), title)


def draw(rows: Rows) -> plt.Figure:
    """Six panels. Where real runs stand beside, or users of a file, fewer quantities."""
    rows, tagged = rows.newest(), bool(rows.where("tag"))
    names = ("P99 TTFT", "P99 TBT", "P99 E2E", "promises kept", "preemptions", "output tokens")
    names = ("P99 TTFT", "P99 TBT", "promises kept") if rows.where(source="measured") else names
    names = ("P99 TTFT",) if tagged else names
    seconds = {name: "y" for name in names if UNITS[name] == "s"}
    panels = [
        Panel("rate", name, ("policy", "C"), facet="tag", log=seconds.get(name, ""),
              rule="strict SLO" if name == "P99 TBT" else None)
        for name in names
    ]  # fmt: skip
    own = tagged or rows[0]["model"] != YI.model
    title = STUDY.title.rpartition(": ")[-1] if own else STUDY.title
    return draw_panels(rows, panels, title, columns=3)


STUDY = Study(
    "serve_latency",
    __doc__,
    sweeps,
    units=UNITS,
    title="Sarathi-Serve Fig 1b: latency against load",
    draw=draw,
    claims=[Claim("a token budget keeps the SLO, and vLLM does not", who_keeps_the_slo)],
    flags=FLAGS,
    measure=True,
    repeats=1,
    shown=None,
    report=by_policy,
    printed=True,
)

if __name__ == "__main__":
    STUDY.main()
