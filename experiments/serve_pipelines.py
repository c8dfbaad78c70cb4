"""Sarathi-Serve, Fig 11 and 13: the capacity of pipelines, and of tensor parallelism over nodes.

    python experiments/serve_pipelines.py
        predicted for Falcon-180B on two nodes of four A100s, as TP4-PP2 and as TP8, and for
        LLaMA2-70B on eight A40s as TP4-PP2: six minutes of CPU time
    python experiments/serve_pipelines.py --requests 2048
        as many requests as the paper: more exact, and slower

serving/capacity.py defines capacity, SLO and served rate. Each search has 1024 requests. It repeats
them until twice as many would not change the capacity (`settled_capacity`). Machines, batch sizes
and budgets are the paper's (its artefact, osdi-experiments/figure-5-6 and figure-8). GPUs are
joined by NVLink in pairs, so that a ring of four crosses PCIe. 100 Gb Ethernet joins the two nodes.
All policies have 128 requests, but Orca 8; the micro-batches, as many as stages, share them evenly.
The budget is 512 tokens under the strict SLO and 2048 under the relaxed one (1536 for LLaMA2-70B).

strict, relaxed    5 and 25 decode iterations of the pipeline, as our cost model prices them. A
                   decode iteration passes all stages. TP8 has the bounds of the pipeline.
1 s, 5 s           the paper's own values. Its decode iterations are slower than ours.
"""

import enter  # noqa: F401

import gc
import os
from collections.abc import Sequence
from functools import partial
from itertools import product

import matplotlib.pyplot as plt

from command.cli import run_main
from command.flags import Flag
from costmodel import make_batch
from experiments.lib import papers
from experiments.lib.common import (
    Point,
    paper_numbers,
    paper_points,
    print_comparison,
    print_table,
    run_jobs,
    values,
)
from experiments.lib.figure import finish
from experiments.lib.flags import POLICIES as POLICY_FLAGS
from experiments.lib.flags import file_name, start
from experiments.lib.look import COLOURS, labelled_bars, panels
from experiments.lib.papers import (
    ARXIV,
    CHAT,
    LOOKS,
    OURS,
    POLICIES,
    REPEATED,
    RIVALS,
    Job,
    Settled,
    label,
)
from serving.capacity import DECODES, RELAXED, STRICT, Deployment

NAME = "serve_pipelines"
NUMBERS = paper_numbers()
ON_TP8 = "vllm_v0 on TP8"
A100, A40 = "a100-80gb-pcie", "a40"
SMALL = {"orca_batch_size": int(NUMBERS["ss_batch_orca_pipelines"])}
FALCON = Deployment("falcon-180b", 4, A100, stages=2, link="pcie4", **SMALL)
FALCON_TP8 = Deployment("falcon-180b", 8, A100, link="2x4-a100-ethernet")
LLAMA = Deployment("llama2-70b", 4, A40, stages=2, link="pcie4", hop="pcie4", **SMALL)
DATASETS = {data.name: data for data in (CHAT, ARXIV)}
JOBS = [
    *[Job(*each) for each in product((FALCON, LLAMA), DATASETS, POLICIES)],
    # the paper's Fig 13b has vLLM alone on TP8, and chat alone
    *[Job(FALCON_TP8, CHAT.name, policy) for policy in ("vllm_v0", OURS)],
]
REQUESTS = 1024
PRECISION = 1.05  # of a capacity
PROMPT = 4096  # tokens, of the prefill whose time is published

SLOS = {"strict": STRICT, "relaxed": RELAXED}  # in decode iterations
SECONDS = {  # as published
    "1 s": NUMBERS["ss_slo_strict_pipelines"],
    "5 s": NUMBERS["ss_slo_relaxed_pipelines"],
}


def slos(deployment: Deployment) -> dict[str, tuple[float, int]]:
    """Name -> bound in seconds, and the token budget that the paper uses for it."""
    pipeline = FALCON if deployment == FALCON_TP8 else deployment
    bounds = {name: many * pipeline.decode_iteration for name, many in SLOS.items()} | SECONDS
    strict = int(NUMBERS["ss_budget_strict"])
    size = "llama70" if deployment == LLAMA else "falcon"
    relaxed = int(NUMBERS[f"ss_budget_relaxed_{size}"])
    return {
        name: (bound, strict if name in ("strict", "1 s") else relaxed)
        for name, bound in bounds.items()
    }


def perform(job: Job, count: int, seed: int, precision: float) -> dict[str, Settled]:
    """Name of the SLO -> capacity."""
    requests = DATASETS[job.data].requests(count, seed=seed)
    return papers.settled_capacities(job, requests, slos(job.deployment), precision=precision)


def iterations() -> list[tuple[str, float]]:
    """What one iteration of Falcon-180B takes on its pipeline: (series, seconds)."""
    cost = FALCON.cost_model
    prefill = make_batch([(0, PROMPT, PROMPT)])
    layers = cost.model.n_layer * cost.model.layer_weights
    floor = 2 * PROMPT * layers / (FALCON.tp * cost.gpu.peak)
    return [
        ("prefill of 4K, one stage", cost.seconds(prefill) / FALCON.stages),
        ("prefill of 4K, all stages", FALCON.passage(prefill)),
        ("prefill of 4K, all stages at 100 % of peak, linear operators alone", floor),
        (f"decode iteration of {DECODES}, all stages", FALCON.decode_iteration),
    ]


def predict(
    quick: bool, requests: int, seed: int = 0, policies: Sequence[str] | None = None
) -> list[Point]:
    """Iterations, SLOs, capacities, gains, and the largest gains of each deployment.

    quick: of chat alone, to a factor of 1.5, in this process; else on all cores. policies: more of
    them, on the pipelines.
    """
    more = [Job(*each) for each in product((FALCON, LLAMA), DATASETS, policies or ())]
    jobs = [job for job in JOBS + more if job.data == CHAT.name or not quick]
    precision, processes = (1.5, 1) if quick else (PRECISION, min(os.cpu_count() or 1, len(jobs)))
    of_job = partial(perform, count=requests, seed=seed, precision=precision)
    # A run leaves many small objects and no cycles: looking for cycles takes a fifth of its time.
    found = run_jobs(of_job, jobs, processes, "capacities", initializer=gc.disable)
    points: list[Point] = []

    def add(where: Deployment, series: str, y: float, unit: str) -> None:
        points.append(Point(NAME, series, 0, "", y, unit, "predicted", where.model, where.hardware))

    for series, seconds in iterations():
        add(FALCON, f"{series}, {label(FALCON)}", 1000 * seconds, "ms")
    for where, slo in product((FALCON, LLAMA), SLOS):
        add(where, f"{slo} SLO, {label(where)}", slos(where)[slo][0], "s")
    for job, settled in found.items():
        for slo, best in settled.items():
            where, group = job.deployment, f"{group_of(job)} {slo}"
            add(where, f"{job.policy}, {group}", best.rate, "requests/s")
            if best.requests > requests:
                add(where, f"{job.policy} {REPEATED}, {group}", best.requests, "requests")
    largest: dict[tuple[Deployment, str, str], float] = {}
    for job, slo in product(found, (*SLOS, *SECONDS)):
        where = job.deployment
        if job.policy == OURS and where.stages > 1:
            rivals = {policy: Job(where, job.data, policy) for policy in RIVALS}
            if (where, job.data) == (FALCON, CHAT.name):
                rivals[ON_TP8] = Job(FALCON_TP8, CHAT.name, "vllm_v0")
            for rival in [rival for rival in rivals if found[rivals[rival]][slo].rate]:
                gain = found[job][slo].rate / found[rivals[rival]][slo].rate
                add(where, f"gain over {rival}, {group_of(job)} {slo}", gain, "x")
                key = where, rival, unit_of(slo)
                largest[key] = max(gain, largest.get(key, 0.0))
    for (where, rival, unit), gain in largest.items():
        add(where, f"largest gain over {rival}, {label(where)}, {unit}", gain, "x")
    return points


def group_of(job: Job) -> str:
    return f"{label(job.deployment)} {job.data}"


def unit_of(slo: str) -> str:
    """What an SLO is given in."""
    return "SLOs in iterations" if slo in SLOS else "SLOs in seconds"


def compared(strict: str) -> dict[str, tuple[str, float]]:
    """Id of a published gain -> series. The paper's SLOs are ours in iterations or in seconds."""
    series = {
        "ss_falcon_strict_vllm_pp": f"gain over vllm_v0, {label(FALCON)} chat {strict}",
        "ss_falcon_strict_vllm_tp8": f"gain over {ON_TP8}, {label(FALCON)} chat {strict}",
        "ss_falcon": f"largest gain over vllm_v0, {label(FALCON)}, {unit_of(strict)}",
        "ss_llama70_orca": f"largest gain over orca, {label(LLAMA)}, {unit_of(strict)}",
    }
    return {number: (name, 0) for number, name in series.items()}


IN_ITERATIONS, IN_SECONDS = compared("strict"), compared("1 s")
ITERATIONS = {
    # published as one number: it is no sum of two stages, which is above the floor
    "ss_falcon_prefill": (f"prefill of 4K, all stages, {label(FALCON)}", 0),
    "ss_falcon_decode": (f"decode iteration of {DECODES}, all stages, {label(FALCON)}", 0),
}
PAPERS = (ITERATIONS, IN_ITERATIONS, IN_SECONDS)  # a gain stands beside both ways to read its SLO
SHOWN = {series for places in PAPERS for series, _ in places.values()}


def shown(point: Point) -> bool:
    return point.series in SHOWN or point.series.startswith(("prefill", *SLOS))


def policies_of(points: Sequence[Point]) -> list[str]:
    """The policies that were compared, the published ones first."""
    found = [point.series.partition(", ")[0] for point in points if point.y_unit == "requests/s"]
    return list(dict.fromkeys([*POLICIES, *found]))


def print_capacities(points: Sequence[Point]) -> None:
    """Capacities in requests/s, and the gains."""
    found = values(points)
    columns = [*policies_of(points), *[f"gain over {rival}" for rival in (*RIVALS, ON_TP8)]]
    groups = [series.partition(", ")[2] for series in found if series.startswith(POLICIES)]
    rows = []
    for group in dict.fromkeys(groups):
        cells = [found.get(f"{column}, {group}") for column in columns]
        rows.append([*group.split(" ", 3), *["-" if c is None else f"{c:.2f}" for c in cells]])
    header = ["model", "layout", "lengths", "SLO", *columns]
    print_table(header, rows, "capacities in requests/s, and gains of sarathi_serve")
    papers.report_repeats(points)


def draw(points: list[Point]) -> plt.Figure:
    """Capacities under both SLOs; on the right, the gains beside the published ones."""
    found = values(points)
    figure, [[*grid, gains]] = panels(1, 3, 8, 8)
    groups = [group_of(job) for job in JOBS if job.policy == OURS]
    groups = [group for group in groups if f"{OURS}, {group} strict" in found]
    for axes, slo in zip(grid, SLOS, strict=True):
        papers.draw_capacities(axes, found, groups, slo, policies_of(points))
        names = [group.replace(" ", "\n") for group in groups]
        axes.set_xticks(range(len(groups)), names, fontsize=12)
    grid[0].legend()
    draw_gains(gains, points)
    figure.suptitle(
        "Sarathi-Serve Fig 11 and 13: pipelines over two nodes (Falcon-180B, A100s) and one"
        " (LLaMA2-70B, A40s)",
        fontsize=18,
    )
    return figure


def draw_gains(axes: plt.Axes, points: list[Point]) -> None:
    """Published gains of sarathi_serve, and the predicted ones for both ways to read the SLOs."""
    titles = [
        "Falcon chat\nstrict, over\nvllm_v0",
        f"Falcon chat\nstrict, over\n{ON_TP8}",
        "Falcon\nlargest over\nvllm_v0",
        "LLaMA2-70B\nlargest over\norca",
    ]
    kinds = [
        ("paper", IN_SECONDS, "paper", COLOURS["sky"], "//"),
        ("predicted", IN_SECONDS, "predicted, SLOs of 1 s and 5 s", LOOKS[OURS][0], ""),
        ("predicted", IN_ITERATIONS, "predicted, SLOs in decode iterations", "white", ""),
    ]
    for number, (source, places, name, colour, hatch) in enumerate(kinds):
        gains = values(points, source)
        heights = {
            place + 0.27 * (number - 1): gains[series]
            for place, (series, _) in enumerate(places.values())
            if series in gains
        }
        labelled_bars(axes, heights, 0.26, "%.1f", color=colour, hatch=hatch, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(titles)), titles, fontsize=12)
    axes.set(ylabel="capacity of sarathi_serve / other's", title="gain, predicted and published")
    axes.set_ylim(top=1.35 * axes.dataLim.ymax)
    axes.legend(loc="upper left")


def main() -> None:
    flags = {
        "requests": Flag("requests of each search", REQUESTS, 32),
        "seed": Flag("seed of arrivals and lengths", 0),
    }
    options = start(NAME, __doc__, **flags, **POLICY_FLAGS)
    points = predict(options.quick, options.requests, options.seed, options.policy)
    print_capacities(points)
    points += [point for places in PAPERS for point in paper_points(places, points)]
    print_comparison([point for point in points if shown(point)])
    software = dict.fromkeys((FALCON.gpu, LLAMA.gpu), "sarathi_serve")
    finish(options, file_name(NAME, options), points, lambda: draw(points), software)


if __name__ == "__main__":
    run_main(main)
