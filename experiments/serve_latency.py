r"""Latency against load, as a paper prints it: steady state, several windows, each policy's budget.

    python experiments/serve_latency.py
        Sarathi-Serve's Fig 1b, predicted for Yi-34B on two A100s, chat lengths: a minute, no GPU
    python experiments/serve_latency.py --measure
        and the real engine on this machine, in real time: a minute or two

    python experiments/serve_latency.py --requests-file examples/users.csv --by user \
            --policy vtc --policy-file my.py --model llama3.1-8b --gpu h100 --tp 1
        your requests, policies, model and GPU; and the same for each user

A window is so many requests in a row, of the file or with a seed of its own. All policies serve the
same windows. A quarter of a window's requests, and all that comes after its last arrival, only fill
and empty the engine, and do not count. Lines are medians over the windows, bands the lowest and the
highest: with 8 windows, the true median lies between them in 99 of 100 cases. In one more window,
each policy takes the token budget (C) that keeps most promises. A promise is kept if no token comes
later than `ttft` + n `tbt` after the arrival, or the last one not later than `ttlt`: tags of a
request, in s. Without tags, `ttft` is 2 s and `tbt` five decode iterations, the strict SLO. The
rates are parts of what the GPU serves if all requests wait from the start.
"""

import enter  # noqa: F401

import math
import statistics
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
from experiments.lib.flags import SERVED, word_of
from experiments.lib.papers import (
    CHAT,
    OURS,
    RIVALS,
    YI,
    Data,
    Recorded,
    burst_rate,
    deployments,
)
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study, draw_panels
from more.policies.qoserve import kept
from more.serving.capacity import MAX_DELAY, STRICT, Deployment, Load, steady_span
from more.serving.lengths import length_error
from more.serving.planner import WHOLE
from more.serving.traffic import FASTEST, LogNormal, make_requests, poisson
from timeline import Trace

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
SECONDS = ("strict SLO", "P99 TBT", "median TTFT", "P99 TTFT", "P99 E2E", "mean E2E")
UNITS = dict.fromkeys(SECONDS, "s") | {
    "promises kept": "%", "preemptions": "per request", "recomputed": "%",
    "output tokens": "tokens/s", "useful tokens": "tokens/s", "policy's time": "ms",
    "length error": "%",
}  # fmt: skip


def metrics(trace: Trace, ttft: float, tbt: float, tag: str | None = None) -> list[Row]:
    """Of all requests in the steady state; then of those with each value of the tag."""
    span = begin, end = steady_span(trace)

    def of(part: Trace) -> Row:
        load, every = Load.of(part, *span), part.lives.values()
        lives = [life for life in every if life.arrival >= begin]
        tokens = [moment for life in every for moment in life.tokens if begin <= moment <= end]
        run = sum(life.prompt_tokens + len(life.tokens) for life in lives)
        lost = sum(life.recomputed for life in lives)
        return {
            "P99 TBT": load.value("tbt", 99),
            "median TTFT": load.value("ttft", 50),
            "P99 TTFT": load.value("ttft", 99),
            "P99 E2E": load.value("e2e", 99),
            "mean E2E": statistics.fmean(life.latency for life in lives),
            "promises kept": 100 * sum(kept(life, ttft, tbt) for life in lives) / len(lives),
            "preemptions": sum(life.preemptions for life in lives) / len(lives),
            "recomputed": 100 * lost / (run + lost),
            "output tokens": len(tokens) / (end - begin) if end > begin else 0.0,
            "useful tokens": part.throughput,
        }

    parts = trace.by_tag(tag).items() if tag else ()
    named = [{"tag": word_of(f"{tag}={value}")} | of(part) for value, part in parts]
    return [of(trace), *named]


@lru_cache(64)
def tuned(
    engine: Deployment, policy: str, data: Data, count: int, seed: int, rate: float,
    budgets: tuple[int, ...], promise: tuple[float, float],
) -> int:  # fmt: skip
    """The budget under which most promises are kept, in window 0; then, the shortest latency."""

    def quality(C: int) -> tuple[float, float]:
        requests = data.window(0, count, rate, seed)
        [found] = metrics(engine.serve(requests, policy, C), *promise)
        return found["promises kept"], -found["P99 E2E"]

    return max(budgets, key=quality) if len(budgets) > 1 else budgets[0]


def at_rate(
    engine: Deployment, rate: float, policy: str, data: Data, count: int, windows: int, seed: int,
    tag: str | None, budgets: tuple[int, ...], promise: tuple[float, float], near: float,
    C: int | None = None,
) -> list[Row]:  # fmt: skip
    """Medians over the windows, at `rate` requests per second. near: where C is chosen."""
    windows_of = every_window(
        engine, rate, policy, data, count, windows, seed, tag, budgets, promise, near, C
    )
    found: dict[object, list[Row]] = {}  # by tag: not each window has each value
    for row in (row for rows in windows_of for row in rows):
        found.setdefault(row.get("tag"), []).append(row)
    return [median_row(rows) for rows in found.values()]


def every_window(
    engine: Deployment, rate: float, policy: str, data: Data, count: int, windows: int, seed: int,
    tag: str | None, budgets: tuple[int, ...], promise: tuple[float, float], near: float,
    C: int | None = None,
) -> list[list[Row]]:  # fmt: skip
    """The metrics of each window: of all requests, then of those with each value of the tag."""
    own: Row = {"seed": seed, "requests": count, "windows": windows, "software": engine.software}
    own["cache"] = engine.cache_tokens
    own["B"] = engine.orca_batch_size if policy == "orca" else engine.max_batch_size
    whole = policy.partition(":")[0] in WHOLE
    if not whole:
        own["C"] = C or tuned(engine, policy, data, count, seed, near, budgets, promise)
    found = []
    for number in range(1, windows + 1):
        trace = engine.serve(data.window(number, count, rate, seed), policy, own.get("C", 1))
        found.append([own | row for row in metrics(trace, *promise, tag)])
    return found


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
    data: Recorded | None, tag: str | None, promise: tuple[float, float], C: int = 1,
) -> list[Row]:  # fmt: skip
    """At a part of what this machine can serve under `budget`, with requests of up to L tokens."""
    rate = round(SHARES[share] * served_rate(engine, count, L, budget, data), 3)
    requests = data.requests(count, rate) if data else short_requests(poisson(count, rate), L)
    trace = engine.serve(requests, policy, C)
    spent = {"policy's time": 1e3 * trace.policy_seconds / trace.schedules}
    return [{"rate": rate} | spent | row for row in metrics(trace, *promise, tag)]


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
    run = partial(
        at_rate, data=data, count=count, windows=windows, seed=seed, tag=by,
        budgets=tuple(chunk_size), promise=promise, near=TUNED * most,
    )  # fmt: skip
    every = cases(policy=RIVALS) + ours + cases(policy=others)
    priced = [r | each for r in cases(rate=rates) for each in every]
    (L, B, C), few = ((64, 3, 16), 6) if quick else ((512, 8, 64), 24)
    L, B = own.max_length if own else L, named.get("max_batch_size") or B
    shares = list(SHARES)[: 3 if own else 2]
    several = cases(policy=RIVALS) + cases(policy=[OURS, *others], C=C)
    here = [s | each for s in cases(share=shares, L=L, B=B) for each in several]
    real = partial(at_share, budget=C, count=requests or few, data=own, tag=by, promise=promise)
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
