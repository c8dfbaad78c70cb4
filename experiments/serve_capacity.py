"""Sarathi-Serve, Fig 10 and 12: the capacity of three policies under strict and relaxed SLOs.

    python experiments/serve_capacity.py
        predicted for Mistral-7B on an A100 and Yi-34B on two: under a minute on two cores
    python experiments/serve_capacity.py --requests 2048
        as many requests as the paper: more exact, twice as long
    python experiments/serve_capacity.py --requests-file FILE
        on the requests of a file (see serving/traffic.py), its arrival times scaled

serving/capacity.py defines capacity, SLO and served rate. Each search has 1024 requests. The
lengths of `chat` and `arxiv` are log-normal. They are fitted to published percentiles of
openchat_sharegpt4 and arxiv_summarization, half of which are unverified. The strict SLO is 5 decode
iterations of our cost model, the relaxed 25; "0.1 s" and the like are the paper's own values. Batch
sizes and memory are the paper's (its artefact, osdi-experiments/figure-5-6): 128 requests, but 16
for Orca; token budgets 512 (strict) and 2048 (relaxed).
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from experiments.lib import papers
from experiments.lib.common import Point, Record, paper_numbers, print_table, run_jobs, values
from experiments.lib.figure import Figure
from experiments.lib.flags import Flag, make_parser, parse
from experiments.lib.look import COLOURS, labelled_bars, panels
from experiments.lib.papers import ARXIV, CHAT, LOOKS, MISTRAL, OURS, POLICIES, RIVALS, YI, Job
from serving.capacity import BUDGETS, PRECISION, RELAXED, STRICT, Deployment
from serving.traffic import read_trace

NAME = "serve_capacity"
DEPLOYMENTS, DATASETS = (MISTRAL, YI), (CHAT, ARXIV)
REQUESTS = 1024
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
    job: Job, workloads: Mapping[str, Sequence[Request]], precision: float
) -> dict[str, float]:
    """Name of the SLO -> requests per second. workloads: requests by name."""
    return papers.capacities(job, workloads[job.data], slos(job.deployment), precision)


def predict(
    quick: bool, requests: int | None = None, seed: int = 0, requests_file: Path | None = None
) -> list[Point]:
    """SLOs, capacities, gains over the other policies, and the largest gain of each deployment.

    requests_file: in the place of the published lengths. quick: to a few parts in ten, in this
    process; else exactly, on all cores.
    """
    count = requests or (64 if quick else REQUESTS)
    if requests_file is None:
        workloads = {data.name: data.requests(count, seed=seed) for data in DATASETS}
    else:
        workloads = {word_of(requests_file): read_trace(requests_file, count)}
    jobs = [Job(*each) for each in product(DEPLOYMENTS, workloads, POLICIES)]
    precision, processes = (1.3, 1) if quick else (PRECISION, min(os.cpu_count() or 1, len(jobs)))
    perform = partial(capacities_of, workloads=workloads, precision=precision)
    found = run_jobs(perform, jobs, processes, "capacities")
    points = []
    for deployment in DEPLOYMENTS:
        model, bounds = deployment.model, slos(deployment)
        record = Record(name_of(requests_file), model, deployment.hardware)
        for kind in ("strict", "relaxed"):
            record.add(f"{kind} SLO, {model}", bounds[kind][0], "s")
        gains: dict[str, list[float]] = {}
        for data, slo in product(workloads, bounds):
            group = f"{model} {data} {slo}"
            rates = {policy: found[Job(deployment, data, policy)][slo] for policy in POLICIES}
            for policy, rate in rates.items():
                record.add(f"{policy}, {group}", rate, "requests/s")
            for rival in [rival for rival in RIVALS if rates[rival]]:
                gain = rates[OURS] / rates[rival]
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
    return f"{NAME}-{word_of(requests_file)}" if requests_file else NAME


def groups_of(points: Sequence[Point], ending: str = "") -> list[str]:
    """All "model data slo" of the capacities that end so, without the ending."""
    start = f"{OURS}, "
    found = [p.series.removeprefix(start) for p in points if p.series.startswith(start)]
    return [each.removesuffix(ending) for each in dict.fromkeys(found) if each.endswith(ending)]


def table(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the terminal: capacities in requests/s, gains predicted and published."""
    predicted, published = values(points), values(points, "paper")
    header = ["model", "lengths", "SLO", *POLICIES]
    for rival in RIVALS:
        header += [f"over {rival}", "paper", "error"]
    rows = []
    for group in groups_of(points):
        rates = [f"{predicted[f'{policy}, {group}']:.2f}" for policy in POLICIES]
        row = [*group.split(" ", 2), *rates]
        for rival in RIVALS:
            gain, paper = (
                each.get(f"gain over {rival}, {group}") for each in (predicted, published)
            )
            row += [f"{ratio:.2f}" if ratio else "-" for ratio in (gain, paper)]
            row.append(f"{100 * (gain / paper - 1):+.0f} %" if gain and paper else "-")
        rows.append(row)
    return header, rows


def draw(points: list[Point]) -> plt.Figure:
    """Capacities under both SLOs; on the right, the gains beside the published ones."""
    predicted, groups = values(points), groups_of(points, " strict")
    figure, [grid] = panels(1, 3, 22 / 3, 7)
    for axes, kind in zip(grid, ("strict", "relaxed"), strict=False):
        papers.draw_capacities(axes, predicted, groups, kind)
    grid[0].legend()
    for number, rival in enumerate(RIVALS):
        kinds = [
            ("paper", "" if number else "paper", COLOURS["sky"], "//"),
            ("predicted", f"over {rival}", LOOKS[rival][0], ""),
        ]
        for side, (source, label, colour, hatch) in zip((-0.09, 0.09), kinds, strict=True):
            gains = values(points, source)
            gains = [gains.get(f"gain over {rival}, {group} strict") for group in groups]
            shift = 0.4 * (number - 0.5) + side
            heights = {place + shift: gain for place, gain in enumerate(gains) if gain}
            style = {"color": colour, "hatch": hatch, "label": label}
            labelled_bars(grid[2], heights, 0.17, "%.1f", **style)
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
    report=lambda points: print_table(*table(points), title="capacities in requests/s, and gains"),
    flags={
        "seed": Flag("of arrivals and lengths", 0),
        "requests": Flag("requests of each search", REQUESTS, 64),
        "requests_file": Flag(
            "a CSV file of arrivals, prompt and output tokens, instead of chat and arxiv"
        ),
    },
)


def main() -> None:
    file = parse(make_parser(__doc__, FIGURE.flags), FIGURE.flags).requests_file
    figure = replace(FIGURE, name=name_of(file), paper={}) if file else FIGURE
    figure.run()


if __name__ == "__main__":
    run_main(main)
