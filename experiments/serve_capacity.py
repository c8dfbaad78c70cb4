"""Sarathi-Serve, Fig 10 and 12: the capacity of three policies under strict and relaxed SLOs.

    python experiments/serve_capacity.py
        predicted for Mistral-7B on an A100 and Yi-34B on two: a minute and a half of CPU time
    python experiments/serve_capacity.py --requests 2048
        as many requests as the paper: more exact, twice as long
    python experiments/serve_capacity.py --requests-file FILE
        on the requests of a file (see serving/traffic.py), its arrival times scaled
    python experiments/serve_capacity.py --policy dynamic --policy chunked_only
        these policies of scheduler.POLICIES, too (all: every one). Each policy has its own best
        token budget, of those in BUDGETS_TRIED.
    python experiments/serve_capacity.py --policy-file examples/priority.py
        a policy of your own, from a file of your own

serving/capacity.py defines capacity, SLO and served rate. Each search has 1024 requests. It repeats
them until twice as many would not change the capacity (`settled_capacity`). The lengths of `chat`
and `arxiv` are log-normal. They are fitted to published percentiles of openchat_sharegpt4 and
arxiv_summarization, half of which are unverified. The strict SLO is 5 decode iterations of our cost
model, the relaxed 25; "0.1 s" and the like are the paper's own values. Batch sizes and memory are
the paper's (its artefact, osdi-experiments/figure-5-6): 128 requests, but 16 for Orca; token
budgets 512 (strict) and 2048 (relaxed), but the best of several with --policy.
"""

import enter  # noqa: F401

import gc
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt

import scheduler
from batch import Request
from command.cli import run_main
from command.flags import Flag
from experiments.lib import papers
from experiments.lib.common import Point, Record, paper_numbers, print_table, run_jobs, values
from experiments.lib.figure import Figure
from experiments.lib.flags import POLICIES as POLICY_FLAGS
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.look import COLOURS, labelled_bars, panels
from experiments.lib.papers import (
    ARXIV,
    CHAT,
    MISTRAL,
    OURS,
    POLICIES,
    REPEATED,
    RIVALS,
    YI,
    Job,
    Settled,
    looks_of,
)
from serving.capacity import BUDGETS, MAX_BATCH_SIZE, PRECISION, RELAXED, STRICT, Deployment
from serving.traffic import read_trace

NAME = "serve_capacity"
DEPLOYMENTS, DATASETS = (MISTRAL, YI), (CHAT, ARXIV)
REQUESTS = 1024
BUDGETS_TRIED = (256, 512, 1024, 2048)  # tokens: with --policy, each policy gets the best of them
ALL = "all"  # --policy
MORE = POLICY_FLAGS["policy"].help
BUDGET = "budget"  # what a series of budgets begins with, after the policy
NUMBERS = paper_numbers()
# s: Table 3. Yi-34B's strict SLO is a fifth of its relaxed one, as 5 decode iterations are of 25.
PAPER_SLOS = {
    MISTRAL: {STRICT: NUMBERS["ss_slo_strict_mistral"], RELAXED: NUMBERS["ss_slo_relaxed_mistral"]},
    YI: {
        STRICT: NUMBERS["ss_slo_relaxed_yi"] * STRICT / RELAXED,
        RELAXED: NUMBERS["ss_slo_relaxed_yi"],
    },
}


def slos(deployment: Deployment) -> dict[str, tuple[float, int]]:
    """Name -> bound in seconds, and the token budget that the paper uses for it."""
    found = {}
    for kind, iterations in (("strict", STRICT), ("relaxed", RELAXED)):
        found[kind] = iterations * deployment.decode_iteration, BUDGETS[iterations]
        value = PAPER_SLOS[deployment][iterations]
        found[f"{value:g} s"] = value, BUDGETS[iterations]
    return found


def capacities_of(
    job: Job,
    workloads: Mapping[str, Sequence[Request]],
    budgets: Sequence[int],
    precision: float,
) -> dict[str, Settled]:
    """Name of the SLO -> capacity. workloads: requests by name. budgets: those to try."""
    bounds = slos(job.deployment)
    return papers.settled_capacities(job, workloads[job.data], bounds, budgets, precision)


def more_policies(names: Sequence[str] | None) -> list[str]:
    """The policies that --policy adds to the published comparison.

    Raises UserError where POLICIES has none of that name.
    """
    every = scheduler.POLICIES if ALL in (names or ()) else ()
    others = [name for name in dict.fromkeys([*(names or ()), *every]) if name != ALL]
    for name in others:
        scheduler.make_scheduler(name, MAX_BATCH_SIZE, BUDGETS[STRICT])
    return [name for name in others if name not in POLICIES]


def predict(
    quick: bool,
    requests: int | None = None,
    seed: int = 0,
    requests_file: Path | None = None,
    policy: Sequence[str] | None = None,
    **_: object,
) -> list[Point]:
    """SLOs, capacities, gains over the other policies, and the largest gain of each deployment.

    requests_file: in the place of the published lengths. policy: names of more policies; where it
    is given, the token budgets are searched, too. quick: to a few parts in ten, in this process;
    else exactly, on all cores.
    """
    policies, budgets = [*POLICIES, *more_policies(policy)], BUDGETS_TRIED if policy else ()
    count = requests or (64 if quick else REQUESTS)
    if requests_file is None:
        workloads = {data.name: data.requests(count, seed=seed) for data in DATASETS}
    else:
        workloads = {word_of(requests_file): read_trace(requests_file, count)}
    jobs = [Job(*each) for each in product(DEPLOYMENTS, workloads, policies)]
    precision, processes = (1.3, 1) if quick else (PRECISION, min(os.cpu_count() or 1, len(jobs)))
    perform = partial(capacities_of, workloads=workloads, budgets=budgets, precision=precision)
    # A run leaves many small objects and no cycles: looking for cycles takes a fifth of its time.
    found = run_jobs(perform, jobs, processes, "capacities", initializer=gc.disable)
    points = []
    for deployment in DEPLOYMENTS:
        model, bounds = deployment.model, slos(deployment)
        record = Record(name_of(requests_file), model, deployment.hardware)
        for kind in ("strict", "relaxed"):
            record.add(f"{kind} SLO, {model}", bounds[kind][0], "s")
        gains: dict[str, list[float]] = {}
        for data, slo in product(workloads, bounds):
            group = f"{model} {data} {slo}"
            settled = {name: found[Job(deployment, data, name)][slo] for name in policies}
            for name, best in settled.items():
                record.add(f"{name}, {group}", best.rate, "requests/s")
                if best.requests > len(workloads[data]):
                    record.add(f"{name} {REPEATED}, {group}", best.requests, "requests")
                if budgets and name not in RIVALS:
                    record.add(f"{name} {BUDGET}, {group}", best.budget, "tokens")
            for rival in [name for name in policies if name != OURS and settled[name].rate]:
                gain = settled[OURS].rate / settled[rival].rate
                gains.setdefault(rival, []).append(gain)
                record.add(f"gain over {rival}, {group}", gain, "x")
        for rival, each in gains.items():
            record.add(f"largest gain over {rival}, {model}", max(each), "x")
        points += record
    return points


def word_of(file: Path) -> str:
    """A file's name as one word: blanks and commas separate the parts of a series."""
    return re.sub(r"[\s,]+", "-", file.stem)


def name_of(requests_file: Path | None) -> str:
    """Of the figure and its files. Other requests have files of their own."""
    return f"{NAME}-{word_of(requests_file)}" if requests_file else NAME


def policies_of(points: Sequence[Point]) -> list[str]:
    """The policies that were compared, the published ones first."""
    found = [point.series.partition(", ")[0] for point in points if point.y_unit == "requests/s"]
    return list(dict.fromkeys(found))


def groups_of(points: Sequence[Point], ending: str = "") -> list[str]:
    """All "model data slo" of the capacities that end so, without the ending."""
    start = f"{OURS}, "
    found = [p.series.removeprefix(start) for p in points if p.series.startswith(start)]
    return [each.removesuffix(ending) for each in dict.fromkeys(found) if each.endswith(ending)]


def table(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the terminal: capacities in requests/s, gains predicted and published."""
    predicted, published = values(points), values(points, "paper")
    policies = policies_of(points)
    header = ["model", "lengths", "SLO", *policies]
    for rival in RIVALS:
        header += [f"over {rival}", "paper", "error"]
    rows = []
    for group in groups_of(points):
        rates = [f"{predicted[f'{policy}, {group}']:.2f}" for policy in policies]
        row = [*group.split(" ", 2), *rates]
        for rival in RIVALS:
            gain, paper = (
                each.get(f"gain over {rival}, {group}") for each in (predicted, published)
            )
            row += [f"{ratio:.2f}" if ratio else "-" for ratio in (gain, paper)]
            row.append(f"{100 * (gain / paper - 1):+.0f} %" if gain and paper else "-")
        rows.append(row)
    return header, rows


def report(points: Sequence[Point]) -> None:
    """Print the capacities; then how often the requests were repeated, and the budgets found."""
    print_table(*table(points), title="capacities in requests/s, and gains")
    found, policies = values(points), policies_of(points)
    papers.report_repeats(points)
    searched = [
        policy
        for policy in policies
        if any(series.startswith(f"{policy} {BUDGET}, ") for series in found)
    ]
    if searched:
        rows = [
            [*group.split(" ", 2), *[f"{found[f'{p} {BUDGET}, {group}']:.0f}" for p in searched]]
            for group in groups_of(points)
        ]
        tried = ", ".join(map(str, BUDGETS_TRIED))
        title = f"the token budget of each capacity: the best of {tried}"
        print_table(["model", "lengths", "SLO", *searched], rows, title)


def draw(points: list[Point]) -> plt.Figure:
    """Capacities under both SLOs; on the right, the gains beside the published ones."""
    predicted, groups = values(points), groups_of(points, " strict")
    policies = policies_of(points)
    rivals, looks = [policy for policy in policies if policy != OURS], looks_of(policies)
    figure, [grid] = panels(1, 3, 22 / 3 * max(1.0, len(policies) / 4), 7)
    for axes, kind in zip(grid, ("strict", "relaxed"), strict=False):
        papers.draw_capacities(axes, predicted, groups, kind, policies)
    grid[0].legend()
    step, middle = 0.8 / len(rivals), (len(rivals) - 1) / 2
    for number, rival in enumerate(rivals):
        kinds = [(0.225, "predicted", f"over {rival}", looks[rival][0], "")]
        if values(points, "paper"):
            kinds.append((-0.225, "paper", "" if number else "paper", COLOURS["sky"], "//"))
        for side, source, label, colour, hatch in kinds[::-1]:
            gains = values(points, source)
            gains = [gains.get(f"gain over {rival}, {group} strict") for group in groups]
            shift = step * (number - middle + side)
            heights = {place + shift: gain for place, gain in enumerate(gains) if gain}
            style = {"color": colour, "hatch": hatch, "label": label}
            labelled_bars(grid[2], heights, 0.425 * step, "%.1f", **style)
    grid[2].axhline(1, color="black", linewidth=1)
    for axes in grid:
        axes.set_xticks(range(len(groups)), [group.replace(" ", "\n", 1) for group in groups])
    grid[2].set(ylabel="capacity of sarathi_serve / other's", title="gain, strict SLO")
    grid[2].set_ylim(top=1.25 * grid[2].dataLim.ymax)
    grid[2].legend(loc="upper left", ncols=3)
    figure.suptitle(
        "Sarathi-Serve Fig 10: the largest request rate that meets the SLO; A100s", fontsize=18
    )
    return figure


PAPER = {  # id of the paper's number -> series
    f"ss_{short}_{data}_{other}": (f"gain over {policy}, {model} {data} strict", 0)
    for short, model in (("mistral", "mistral-7b"), ("yi", "yi-34b"))
    for data in ("chat", "arxiv")
    for other, policy in (("vllm", "vllm_v0"), ("orca", "orca"))
    if f"ss_{short}_{data}_{other}" in NUMBERS
} | {
    "ss_mistral": ("largest gain over vllm_v0, mistral-7b", 0),
    "ss_yi": ("largest gain over vllm_v0, yi-34b", 0),
    "ss_fig12_mistral": ("gain over vllm_v0, mistral-7b chat 0.1 s", 0),
    "ss_fig12_yi": ("gain over vllm_v0, yi-34b chat 1 s", 0),
}

FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper=PAPER,
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: "SLO" in point.series or "largest" in point.series,
    report=report,
    flags={
        "seed": Flag("seed of arrivals and lengths", 0),
        "requests": Flag("requests of each search", REQUESTS, 64),
        "requests_file": Flag(
            "a CSV file of arrivals, prompt and output tokens, instead of chat and arxiv"
        ),
    }
    | POLICY_FLAGS
    | {"policy": replace(POLICY_FLAGS["policy"], help=f"{MORE}; all means every one")},
)


def main() -> None:
    options = ScriptParser(__doc__, FIGURE.flags | WRITES).parse_args()
    more_policies(options.policy)  # refuses unknown names before any work
    own = options.requests_file or options.policy
    (replace(FIGURE, name=name_of(options.requests_file), paper={}) if own else FIGURE).run()


if __name__ == "__main__":
    run_main(main)
