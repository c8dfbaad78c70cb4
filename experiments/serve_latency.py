r"""Latency against load, as a paper prints it: steady state, several windows, each policy's budget.

    python experiments/serve_latency.py
        Sarathi-Serve's Fig 1b, predicted for Yi-34B on two A100s, chat lengths: minutes, no GPU
    python experiments/serve_latency.py --measure
        and the real engine on this machine, in real time: minutes

    python experiments/serve_latency.py --requests-file examples/users.csv --by user \
            --policy vtc --policy-file my.py --model llama3.1-8b --gpu h100 --tp 1
        your requests, policies, model and GPU; and the same for each user

All policies serve the same windows of requests, each with the token budget (C) that suits it
(lib/windows.py says how). vllm_v0, orca and sarathi_serve are always there. Lines are medians over
the windows, bands the lowest and the highest. Of 8 windows drawn with seeds, these hold the median
of such windows in 99 of 100 cases; those of a file may drift. A white point is "not stationary": in
a window of it, the queue grows, and longer ones have longer delays. "over sarathi_serve" is a ratio
in the same window: what differs there is the policy alone. A promise is kept if no token comes
later than `ttft` + n `tbt` after the arrival (who is early may stop for a while), or the last one
not later than `ttlt`: tags of a request, in s. Without tags, `ttft` is 2 s and `tbt` five decode
iterations, the strict SLO. The rates are parts of what the GPU serves if all requests wait from the
start. With --concurrency there is also a closed loop: so many clients, each with one request at a
time.
"""

import enter  # noqa: F401

import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain, product
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from command.flags import Flag
from experiments.lib import look, measuring
from experiments.lib.claims import Claims, bounded
from experiments.lib.colours import MARKERS
from experiments.lib.engines import Real, Sweep, cases
from experiments.lib.flags import SERVED
from experiments.lib.papers import (
    CHAT,
    OURS,
    RIVALS,
    YI,
    Recorded,
    burst_rate,
    deployments,
    looks_of,
)
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study, title_of
from experiments.lib.windows import (
    REQUESTS,
    UNITS,
    Windows,
    by_tag,
    medians,
    say_if_few,
    times,
    unsteady,
)
from more.serving.capacity import MAX_DELAY, STRICT, Deployment
from more.serving.lengths import length_error
from more.serving.traffic import FASTEST, LogNormal, make_requests, poisson
from scheduler import ALIASES, POLICIES

WINDOWS = 8
# requests/s; the paper's artefact has 0.55, 0.7 and 1.0
RATES = (0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.45)
QUICK_RATES = (0.3, 1.0, 1.45)  # those of the caption
# of what this machine can serve; the last one for requests of a user: a queue shows who waits
SHARES = {"a third": 1 / 3, "two thirds": 2 / 3, "more than all": 1.1}
# token budgets of the paper's Fig 1
SMALL = 512
LARGE = 1536
# of what is served if all requests wait: the rates, where requests, model or GPU are a user's
PARTS = (0.5, 0.7, 0.9, 1.1, 1.3)
PAIRED = ("P99 TTFT", "mean E2E")  # in the same window, over those of sarathi_serve
TUNED = 0.9  # of the same: the rate at which each policy takes its budget
FLAGS = {
    "seed": Flag("seed of the predicted requests", 0),
    "rate": Flag("requests per second, in the predicted runs", shown="several", several=True),
    "concurrency": Flag("also a closed loop, predicted: clients", several=True),
    "requests": Flag("requests of each window", shown=f"{REQUESTS}; measured, 24"),
    "chunk_size": Flag(
        "token budgets, of which each policy takes its best", (SMALL, LARGE), several=True
    ),
    "by": Flag(),
    "predicted_lengths": Flag(
        "what the tag predicted_tokens says: oracle, classes=A (right with probability A) or"
        " constant=N (more/serving/lengths.py)"
    ),
} | SERVED
UNITS = {"strict SLO": "s"} | UNITS | {f"{name} over {OURS}": "x" for name in PAIRED}
UNITS |= {"policy's time": "ms", "length error": "%"}
SHOWN = ("state", "offered", "achieved", "ended", "rejected", "goodput", "counted")
SHOWN += ("median TTFT", "P99 TTFT", "P99 TBT", "mean E2E", "promises kept", "fairness")
SHOWN += ("policy's time", f"mean E2E over {OURS}")
LOADS = {"rate": "{:g} requests/s", "concurrency": "{:g} clients"}  # open and closed loops


def at_load(
    engine: Deployment,
    policy: str,
    windows: Windows,
    C: int | None = None,
    rate: float | None = None,
    concurrency: int | None = None,
) -> list[Row]:
    """Medians over the windows, at `rate` requests per second or in a closed loop; then by tag."""
    found = windows.serve(engine, rate, policy, C, concurrency)
    ours = windows.serve(engine, rate, OURS, None, concurrency)
    paired = []
    for (every, *rest), (other, *_) in zip(found, ours, strict=True):
        over = {f"{name} over {OURS}": times(every[name], other[name]) for name in PAIRED}
        paired.append([every | over, *rest])
    return [medians(rows) for rows in by_tag(paired)]


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
    engine: Real,
    share: str,
    policy: str,
    L: int,
    B: int,
    budget: int,
    count: int,
    data: Recorded | None,
    windows: Windows,
    C: int = 1,
) -> list[Row]:
    """At a part of what this machine can serve under `budget`, with requests of up to L tokens."""
    rate = round(SHARES[share] * served_rate(engine, count, L, budget, data), 3)
    requests = data.requests(count, rate) if data else short_requests(poisson(count, rate), L)
    trace = engine.serve(requests, policy, C)
    rows = windows.metrics(trace, requests)
    spent = 1e3 * trace.policy_seconds / trace.schedules
    if not any({"ttft", "tbt", "ttlt"} & request.tags.keys() for request in requests):
        for row in rows:  # the promise is a GPU's
            del row["promises kept"]
    return [{"rate": rate, "policy's time": spent} | row for row in rows]


def sweeps(
    quick: bool,
    seed: int = 0,
    policy: Sequence[str] | None = None,
    requests_file: Path | None = None,
    rate: Sequence[float] | None = None,
    concurrency: Sequence[int] | None = None,
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
    data = own or CHAT
    windows = 2 if quick else WINDOWS
    count = 64 if quick else REQUESTS
    windows, count = data.divide(windows, requests or count)
    rates = rate or (QUICK_RATES if quick else RATES)
    theirs = bool(own or engine != YI)  # else it is the paper's figure
    most = burst_rate(engine, data, count * (windows + 1), SMALL) if theirs else max(rates)
    if not rate and theirs:
        rates = [float(f"{part * most:.3g}") for part in PARTS]
    promise = MAX_DELAY, STRICT * engine.decode_iteration
    names = dict.fromkeys(ALIASES.get(name, name) for name in policy or ())
    others = [name for name in names if name not in (OURS, *RIVALS)]
    ours = cases(policy=OURS) if theirs else cases(policy=OURS, C=chunk_size)
    near = statistics.median(rate) if rate else TUNED * most
    chosen = Windows(data, count, windows, seed, tuple(chunk_size), near, promise, by)
    notes = what_runs(chosen, others) if theirs or others else []
    run = partial(at_load, windows=chosen)
    every = cases(policy=RIVALS) + ours + cases(policy=others)
    loads = cases(rate=rates) + cases(concurrency=concurrency or ())
    priced = [load | each for load in loads for each in every]
    (L, B, C), few = ((64, 3, 16), 6) if quick else ((512, 8, 64), 24)
    L = own.max_length if own else L
    B = named.get("max_batch_size") or B
    shares = list(SHARES)[: 3 if own else 2]
    several = cases(policy=RIVALS) + cases(policy=[OURS, *others], C=C)
    here = [s | each for s in cases(share=shares, L=L, B=B) for each in several]
    real = partial(at_share, budget=C, count=requests or few, data=own, windows=chosen)
    stated = cases(lengths=[predicted_lengths] if predicted_lengths else [])
    return [
        Sweep(strict_slo, [engine], [{}], notes=notes),
        Sweep(run, [engine], priced, processes=True),
        Sweep(partial(error_of, data=data, count=count, seed=seed), [engine], stated),
        Sweep(real, measured=here),
    ]


def what_runs(chosen: Windows, policies: Sequence[str]) -> list[str]:
    """Also which policies are sarathi_serve here: those that read a tag that no request has."""
    C = ", ".join(map(str, chosen.budgets))
    one = " (one: no interval)" if chosen.windows == 1 else ""
    said = [f"{chosen.windows} windows of {chosen.count} requests{one}"]
    said.append(f"C: the best of {C} in one more window, at {chosen.tuned_at:.3g} requests/s")
    tags = {tag for each in chosen.window(0, 1.0) for tag in each.tags}
    for policy in policies:
        asks = getattr(POLICIES[policy.partition(":")[0]], "asks", None)
        if asks and asks not in tags:
            said.append(f"{policy}: no request has the tag {asks}, so it is {OURS}")
    return said


def claims(rows: Rows) -> Claims:
    """vLLM misses it under a high load; a small token budget never does."""
    slo = rows.one("strict SLO")
    stalls = bounded(rows, "P99 TBT", slo, math.inf, policy="vllm_v0", rate=(1.0, 1.45))
    never = bounded(rows, "P99 TBT", 0, slo, policy=OURS, C=SMALL)
    return {"a token budget keeps the SLO, and vLLM does not": stalls | never}


def by_policy(rows: Rows) -> None:
    """A line for each load and policy; with --by, what each value of the tag waits."""
    for source, own in rows.newest().where("P99 TTFT").by("source").items():
        untagged = Rows([row for row in own if "tag" not in row], UNITS)
        for key, words in LOADS.items():
            if not untagged.column(key):
                continue
            for load, at in untagged.by(key).items():
                columns = ["policy", "C", "B", *(name for name in SHOWN if any(at.column(name)))]
                print_rows(at, columns, f"{source}, at {words.format(load)}")
        if tags := dict.fromkeys(own.column("tag")):
            every = Rows([{"tag": "all"} | row for row in own], own.units)
            for quantity in ("median TTFT", "promises kept"):
                title = f"{quantity} ({UNITS[quantity]}), {source}"
                wide = every.across("tag", quantity)
                loads = [key for key in LOADS if wide.column(key)]
                print_rows(wide, (*loads, "policy", "C", "all", *tags), title, len(loads) + 2)
    say_if_few(rows)


def mark(quantity: str, load: str) -> Callable[[plt.Axes, Rows], None]:
    """In a panel: white points where the state is not stationary; triangles for infinite times."""

    def draw_marks(axes: plt.Axes, rows: Rows) -> None:
        looks = looks_of(rows.column("policy"))
        white = {"markerfacecolor": "white", "markeredgewidth": 1.5, "linestyle": "none"}
        growing = [row for row in rows if unsteady(row)]
        for row in growing:
            colour, _ = looks[row["policy"]]
            style = {"color": colour, "marker": MARKERS.get(colour, "o"), "zorder": 4}
            axes.plot(row[load], row[quantity], **white | style)
        if growing:
            axes.plot([], [], marker="o", color="black", label="white: not stationary", **white)
        infinite = [row for row in rows if math.isinf(row[quantity])]
        for row in infinite:
            colour, _ = looks[row["policy"]]
            edge = {"transform": axes.get_xaxis_transform(), "clip_on": False}  # the upper one
            axes.plot(row[load], 1, "^", color=colour, **edge)
        if infinite:
            style = {"marker": "^", "color": "black", "linestyle": "none"}
            axes.plot([], [], label="upper edge: infinite, as too few end", **style)

    return draw_marks


def draw(rows: Rows) -> plt.Figure:
    """Six panels, and one legend; of a closed loop, again. With --by, two for each value of it."""
    rows = rows.newest()
    tagged = bool(rows.column("tag"))
    names = ("P99 TTFT", "P99 TBT", "P99 E2E", "mean E2E", "promises kept", "output tokens")
    names = ("P99 TTFT", "P99 TBT", "P99 E2E") if rows.where(source="measured") else names
    names = ("P99 TTFT", "promises kept") if tagged else names
    drawn = []
    loads = [load for load in LOADS if rows.column(load)]
    for load, source, name in product(loads, rows.sources(), names):
        rule = "strict SLO" if name == "P99 TBT" and source == "predicted" else None
        panel = Panel(
            load,
            name,
            ("policy", "C"),
            facet="tag" if tagged else (),
            rule=rule,
            log="y" if UNITS[name] == "s" else "",
            also=mark(name, load),
        )
        drawn += [(source, each) for each in panel.facets(rows.where(source=source))]
    columns = len({panel.title for _, panel in drawn}) if tagged else 3
    figure, grid = look.panels(-(-len(drawn) // columns), columns, 4.6, 3.8)
    legend: dict[str, object] = {}
    places = list(chain(*grid))
    for axes in places[len(drawn) :]:
        axes.remove()
    for axes, (source, panel) in zip(places, drawn, strict=False):
        panel.draw(axes, rows.where(source=source), Rows(), source)
        axes.tick_params(axis="x", labelsize=9)  # nine rates
        both = source if len(rows.sources()) > 1 else ""
        axes.set_title(", ".join(filter(None, (panel.title, both))))
        axes.get_legend().remove()
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=4)
    lines = []
    for source in rows.sources():
        own = rows.where("B", source=source)
        line = title_of(own).replace("\n", " on ")
        for first in own.where("windows")[:1]:
            line += f", windows of {first['requests']} requests: {first['windows']}"
        lines.append(line)
    figure.suptitle("\n".join(lines))
    return figure


STUDY = Study(
    "serve_latency",
    __doc__,
    sweeps,
    units=UNITS,
    title="Sarathi-Serve Fig 1b: latency against load",
    draw=draw,
    claims=claims,
    flags=FLAGS,
    repeats=1,
    shown=None,
    report=by_policy,
    printed=True,
)

if __name__ == "__main__":
    STUDY.main()
