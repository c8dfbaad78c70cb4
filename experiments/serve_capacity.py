"""Sarathi-Serve, Fig 10 and 12: the capacity of three policies under strict and relaxed SLOs.

    python experiments/serve_capacity.py
        predicted for Mistral-7B on an A100 and Yi-34B on two: under a minute on two cores
    python experiments/serve_capacity.py --requests 2048
        as many requests as the paper: more exact, twice as long
    python experiments/serve_capacity.py --requests-file FILE
        on the requests of a file (see serving/traffic.py), its arrival times scaled

serving/capacity.py defines capacity, SLO and served rate. Each search has 1024 requests. The
lengths of `chat` and `arxiv` are log-normal, fitted to published percentiles of openchat_sharegpt4
and arxiv_summarization, half of which are unverified. The strict SLO is 5 decode iterations of our
cost model, the relaxed 25; "0.1 s" and the like are the paper's own values of them. Batch sizes and
memory are the paper's (its artefact, osdi-experiments/figure-5-6): 128 requests, but 16 for Orca;
token budgets 512 (strict) and 2048 (relaxed).
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from configs import UserError
from experiments.lib.common import (
    Point,
    make_directory,
    make_parser,
    paper_numbers,
    paper_points,
    positive,
    print_table,
    progress,
)
from experiments.lib.figure import Figure, save_results
from experiments.lib.look import COLOURS
from experiments.lib.papers import ARXIV, CHAT, LOOKS, MISTRAL, YI
from serving.capacity import BUDGETS, PRECISION, RELAXED, STRICT, Deployment, Load, capacity
from serving.traffic import at_rate, read_trace

POLICIES = ("vllm_v0", "orca", "sarathi_serve")
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


@dataclass(frozen=True)
class Job:
    """The capacities of one policy on one deployment for one set of requests, under all SLOs."""

    deployment: Deployment
    data: str
    policy: str


def slos(deployment: Deployment) -> dict[str, tuple[float, int]]:
    """Name -> bound in seconds, and the token budget that the paper uses for it."""
    found = {}
    for kind, iterations in (("strict", STRICT), ("relaxed", RELAXED)):
        found[kind] = iterations * deployment.decode_iteration, BUDGETS[iterations]
        value = PAPER_SLOS[deployment][iterations]
        found[f"{value:g} s"] = value, BUDGETS[iterations]
    return found


def capacities(
    job: Job, requests: Sequence[Request], precision: float = PRECISION
) -> dict[str, float]:
    """Name of the SLO -> requests per second."""

    @cache
    def load(rate: float, budget: int) -> Load:
        return Load.of(job.deployment.serve(at_rate(requests, rate), job.policy, budget))

    def budget_of(budget: int) -> int:
        # the others have none: their runs serve all SLOs
        return budget if job.policy == "sarathi_serve" else 1

    found = {}
    for name, (slo, budget) in slos(job.deployment).items():
        try:
            size = budget_of(budget)
            found[name] = capacity(lambda rate, size=size: load(rate, size), slo, precision)
        except UserError as error:
            where = f"{job.data}, {len(requests)} requests on {job.deployment.model}"
            where += f" under {job.policy}, {name} SLO of {slo:.2g} s"
            raise UserError(f"{where}: {error}; give more or longer ones") from None
    return found


def search(workloads: dict[str, Sequence[Request]], quick: bool) -> dict[Job, dict[str, float]]:
    """All capacities. workloads: name -> requests.

    quick: to a few parts in ten, in this process; else exactly, on all cores.
    """
    jobs = [
        Job(deployment, data, policy)
        for deployment in DEPLOYMENTS
        for data in workloads
        for policy in POLICIES
    ]
    if quick:
        return {
            job: capacities(job, workloads[job.data], precision=1.3)
            for job in progress(jobs, "capacities")
        }
    found = {}
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(jobs))) as pool:
        running = {pool.submit(capacities, job, workloads[job.data]): job for job in jobs}
        for done in progress(as_completed(running), "capacities", len(jobs)):
            found[running[done]] = done.result()
    return {job: found[job] for job in jobs}


def points_of(found: dict[Job, dict[str, float]], name: str) -> list[Point]:
    """SLOs, capacities, gains over the other policies, and the largest gain of each deployment."""
    points = []

    def point(deployment: Deployment, series: str, y: float, unit: str) -> None:
        points.append(
            Point(name, series, 0, "", y, unit, "predicted", deployment.model, deployment.hardware)
        )

    for deployment in dict.fromkeys(job.deployment for job in found):
        for kind in ("strict", "relaxed"):
            point(deployment, f"{kind} SLO, {deployment.model}", slos(deployment)[kind][0], "s")
        gains: dict[str, list[float]] = {}
        for data in dict.fromkeys(job.data for job in found):
            for slo in slos(deployment):
                rates = {policy: found[Job(deployment, data, policy)][slo] for policy in POLICIES}
                for policy, rate in rates.items():
                    point(
                        deployment, f"{policy}, {deployment.model} {data} {slo}", rate, "requests/s"
                    )
                for policy in POLICIES[:2]:
                    if rates[policy]:
                        gain = rates["sarathi_serve"] / rates[policy]
                        gains.setdefault(policy, []).append(gain)
                        point(
                            deployment,
                            f"gain over {policy}, {deployment.model} {data} {slo}",
                            gain,
                            "x",
                        )
        for policy, values in gains.items():
            point(deployment, f"largest gain over {policy}, {deployment.model}", max(values), "x")
    return points


def predict(
    quick: bool, requests: int | None = None, seed: int = 0, trace: Path | None = None
) -> list[Point]:
    """trace: a file, in the place of the published lengths."""
    count = requests or (64 if quick else REQUESTS)
    if trace is None:
        workloads = {data.name: data.requests(count, seed=seed) for data in DATASETS}
    else:
        workloads = {word_of(trace): read_trace(trace, count)}
    return points_of(search(workloads, quick), name_of(trace))


def word_of(trace: Path) -> str:
    """A trace file's name as one word: blanks and commas separate the parts of a series."""
    return re.sub(r"[\s,]+", "-", trace.stem)


def name_of(trace: Path | None) -> str:
    return "serve_capacity" if trace is None else f"serve_capacity-{word_of(trace)}"


def table(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the terminal: capacities in requests/s, gains predicted and published."""
    values = {(point.source, point.series): point.y for point in points}
    header = [
        "model",
        "lengths",
        "SLO",
        *POLICIES,
        *[word for policy in POLICIES[:2] for word in (f"over {policy}", "paper", "error")],
    ]
    rows = []
    for group in dict.fromkeys(
        point.series.split(", ")[1] for point in points if point.series.startswith("sarathi_serve")
    ):
        model, data, slo = group.split(" ", 2)
        row = [
            model,
            data,
            slo,
            *[f"{values['predicted', f'{policy}, {group}']:.2f}" for policy in POLICIES],
        ]
        for policy in POLICIES[:2]:
            gain, paper = (
                values.get((source, f"gain over {policy}, {group}"))
                for source in ("predicted", "paper")
            )
            row += [
                f"{gain:.2f}" if gain else "-",
                f"{paper:.2f}" if paper else "-",
                f"{100 * (gain / paper - 1):+.0f} %" if gain and paper else "-",
            ]
        rows.append(row)
    return header, rows


def draw(points: list[Point]) -> plt.Figure:
    """Capacities under both SLOs; on the right, the gains beside the published ones."""
    values = {(point.source, point.series): point.y for point in points}
    groups = list(
        dict.fromkeys(
            p.series.split(", ")[1].rsplit(" ", 1)[0]
            for p in points
            if p.series.startswith("vllm_v0") and p.series.endswith("strict")
        )
    )
    figure, panels = plt.subplots(1, 3, figsize=(22, 7), layout="constrained")
    for axes, kind in zip(panels, ("strict", "relaxed"), strict=False):
        for number, policy in enumerate(POLICIES):
            heights = [values["predicted", f"{policy}, {group} {kind}"] for group in groups]
            places = [place + 0.27 * (number - 1) for place in range(len(groups))]
            drawn = axes.bar(
                places, heights, 0.26, color=LOOKS[policy][0], edgecolor="black", label=policy
            )
            axes.bar_label(drawn, [f"{height:.2f}" for height in heights], fontsize=11, padding=2)
        axes.set_xticks(range(len(groups)), [group.replace(" ", "\n", 1) for group in groups])
        axes.set(ylabel="requests per second", title=f"capacity, {kind} SLO (predicted)")
        axes.grid(axis="x", visible=False)
    panels[0].legend()
    for number, policy in enumerate(POLICIES[:2]):
        for source, colour, hatch in (
            ("paper", COLOURS["sky"], "//"),
            ("predicted", LOOKS[policy][0], ""),
        ):
            found = [
                (place, values.get((source, f"gain over {policy}, {group} strict")))
                for place, group in enumerate(groups)
            ]
            shift = 0.4 * (number - 0.5) + (-0.09 if source == "paper" else 0.09)
            places = [place + shift for place, gain in found if gain]
            gains = [gain for _, gain in found if gain]
            label = "paper" if number == 0 else None
            label = f"over {policy}" if source == "predicted" else label
            style = {"color": colour, "hatch": hatch, "edgecolor": "black"}
            drawn = panels[2].bar(places, gains, 0.17, label=label, **style)
            panels[2].bar_label(drawn, fmt="%.1f", fontsize=11, padding=2)
    panels[2].axhline(1, color="black", linewidth=1)
    panels[2].set_xticks(range(len(groups)), [group.replace(" ", "\n", 1) for group in groups])
    panels[2].set(ylabel="capacity of sarathi_serve / other's", title="gain, strict SLO")
    panels[2].set_ylim(top=1.25 * panels[2].dataLim.ymax)
    panels[2].legend(loc="upper left", ncols=3)
    panels[2].grid(axis="x", visible=False)
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
}  # fmt: skip

FIGURE = Figure(
    name="serve_capacity",
    description=__doc__,
    paper=PAPER,
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: "SLO" in point.series or "largest" in point.series,
)


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of arrivals and lengths (default: 0)")
    add(
        "--requests",
        type=positive,
        metavar="N",
        help=f"requests of each search (default: {REQUESTS})",
    )
    add(
        "--requests-file",
        type=Path,
        metavar="FILE",
        help="a CSV file of arrivals, prompt and output tokens, instead of chat and arxiv",
    )
    options = parser.parse_args()
    name = name_of(options.requests_file)
    make_directory(options.out, name, force=options.force)
    points = predict(options.quick, options.requests, options.seed, options.requests_file)
    figure = replace(FIGURE, name=name, paper={}) if options.requests_file else FIGURE
    points += paper_points(figure.paper, points)
    print(__doc__.splitlines()[0], end="\n\n")
    print_table(*table(points))
    save_results(options.out, figure, points)


if __name__ == "__main__":
    run_main(main)
