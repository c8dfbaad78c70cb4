"""Sarathi-Serve, Fig 11 and 13: the capacity of pipelines, and of tensor parallelism over nodes.

    python experiments/serve_pipelines.py
        predicted for Falcon-180B on two nodes of four A100s, as TP4-PP2 and as TP8, and for
        LLaMA2-70B on eight A40s as TP4-PP2: over six minutes of CPU time
    python experiments/serve_pipelines.py --requests 2048
        as many requests as the paper: more exact, and slower

serving/capacity.py defines capacity, SLO and served rate. Each search has 1024 requests: in a short
run a queue has little time to grow, and the capacity comes out too large. A search with 128 of them
finds where to begin. Machines, batch sizes and budgets are the paper's (its artefact,
osdi-experiments/figure-5-6 and figure-8). GPUs are joined by NVLink in pairs, so that a ring of
four crosses PCIe. 100 Gb Ethernet joins the two nodes. All policies have 128 requests, but Orca 8;
the micro-batches, as many as stages, share them evenly. The budget is 512 tokens under the strict
SLO and 2048 under the relaxed one (1536 for LLaMA2-70B).

strict, relaxed    5 and 25 decode iterations of the pipeline, as our cost model prices them. A
                   decode iteration passes all stages. TP8 has the bounds of the pipeline.
1 s, 5 s           what these were for the paper, whose decode iterations are slower than ours.
"""

import gc
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from configs import UserError
from costmodel import make_batch
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
from experiments.lib.papers import ARXIV, CHAT, LOOKS, Dataset
from serving.capacity import DECODES, RELAXED, STRICT, Deployment, Load, capacity
from serving.traffic import at_rate

NUMBERS = paper_numbers()
POLICIES = ("vllm_v0", "orca", "sarathi_serve")
ON_TP8 = "vllm_v0 on TP8"
ORCA = int(NUMBERS["ss_batch_orca_pipelines"])
FALCON = Deployment(
    "falcon-180b", 4, "a100-80gb-pcie", stages=2, link="pcie4", orca_batch_size=ORCA
)
FALCON_TP8 = Deployment("falcon-180b", 8, "a100-80gb-pcie", link="2x4-a100-ethernet")
LLAMA = Deployment(
    "llama2-70b", 4, "a40", stages=2, link="pcie4", hop="pcie4", orca_batch_size=ORCA
)
REQUESTS = 1024
FEW = 128  # requests of the search that finds where to begin
START = 0.5  # requests/s: where that one begins
PRECISION = 1.05  # of a capacity
# Between the rates that a search tries before it bisects. One bisection leaves less than PRECISION.
FACTOR = 1.1
PROMPT = 4096  # tokens, of the prefill whose time is published

SLOS = {"strict": STRICT, "relaxed": RELAXED}  # in decode iterations
SECONDS = {  # as published
    "1 s": NUMBERS["ss_slo_strict_pipelines"],
    "5 s": NUMBERS["ss_slo_relaxed_pipelines"],
}


@dataclass(frozen=True)
class Job:
    """The capacities of one policy on one deployment for one set of requests, under all SLOs."""

    deployment: Deployment
    data: Dataset
    policy: str

    @property
    def name(self) -> str:
        return f"{label(self.deployment)} {self.data.name}"


def label(deployment: Deployment) -> str:
    return f"{deployment.model} {deployment.layout}"


JOBS = [
    *[Job(where, data, policy) for where in (FALCON, LLAMA) for data in (CHAT, ARXIV)
      for policy in POLICIES],
    # the paper's Fig 13b has vLLM alone on TP8, and chat alone
    *[Job(FALCON_TP8, CHAT, policy) for policy in ("vllm_v0", "sarathi_serve")],
]  # fmt: skip


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


def capacities(
    job: Job, requests: Sequence[Request], precision: float = PRECISION
) -> dict[str, float]:
    """Name of the SLO -> requests per second.

    Runs are long where requests are many. So the first FEW of them find where to begin.
    """
    starts = dict.fromkeys(slos(job.deployment), START)
    if len(requests) <= FEW:
        return search_from(starts, job, requests, precision)
    rough = search_from(starts, job, requests[:FEW], FACTOR)
    starts = {name: nearest(rate) for name, rate in rough.items()}
    return search_from(starts, job, requests, precision, FACTOR)


def nearest(rate: float) -> float:
    """Of START and its multiples by powers of FACTOR: several SLOs then ask for the same rates."""
    return START * FACTOR ** round(math.log(rate / START, FACTOR)) if rate else START


def search_from(
    starts: Mapping[str, float],
    job: Job,
    requests: Sequence[Request],
    precision: float,
    factor: float = 2.0,
) -> dict[str, float]:
    """Name of the SLO -> requests per second. starts: where its search begins."""

    @cache
    def load(rate: float, budget: int) -> Load:
        return Load.of(job.deployment.serve(at_rate(requests, rate), job.policy, budget))

    found = {}
    for name, (bound, budget) in slos(job.deployment).items():
        size = budget if job.policy == "sarathi_serve" else 1  # one run of the others serves all
        try:
            # two ways to the same rate differ in their last digits
            found[name] = capacity(
                lambda rate, size=size: load(round(rate, 6), size),
                bound, precision, starts[name], factor,
            )  # fmt: skip
        except UserError as error:
            where = f"{job.name} under {job.policy}, {len(requests)} requests, {name} SLO"
            raise UserError(f"{where}: {error}; give more requests") from None
    return found


def search(count: int, quick: bool) -> dict[Job, dict[str, float]]:
    """All capacities, on all cores. quick: of chat alone, to a factor of 1.5, in this process."""
    workloads = {data: data.requests(count) for data in (CHAT, ARXIV)}
    if quick:
        return {
            job: capacities(job, workloads[job.data], precision=1.5)
            for job in progress([job for job in JOBS if job.data == CHAT], "capacities")
        }
    found = {}
    # A run leaves many small objects and no circles: looking for circles takes a fifth of its time.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(JOBS)), initializer=gc.disable) as pool:
        running = {pool.submit(capacities, job, workloads[job.data]): job for job in JOBS}
        for done in progress(as_completed(running), "capacities", len(running)):
            found[running[done]] = done.result()
    return {job: found[job] for job in JOBS}


def gains(found: dict[Job, dict[str, float]], job: Job, slo: str) -> dict[str, float]:
    """Name of a rival -> capacity of sarathi_serve on a pipeline over that rival's."""
    rivals = {policy: Job(job.deployment, job.data, policy) for policy in POLICIES[:2]}
    if job.deployment == FALCON and job.data == CHAT:
        rivals[ON_TP8] = Job(FALCON_TP8, CHAT, "vllm_v0")
    return {
        name: found[job][slo] / found[rival][slo]
        for name, rival in rivals.items()
        if found[rival][slo]
    }


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


def points_of(found: dict[Job, dict[str, float]]) -> list[Point]:
    """Iterations, SLOs, capacities, gains, and the largest gains of each deployment."""
    points = []

    def point(where: Deployment, series: str, y: float, unit: str) -> None:
        points.append(
            Point(FIGURE.name, series, 0, "", y, unit, "predicted", where.model, where.hardware)
        )

    for series, seconds in iterations():
        point(FALCON, f"{series}, {label(FALCON)}", 1000 * seconds, "ms")
    for where in (FALCON, LLAMA):
        for slo in SLOS:
            point(where, f"{slo} SLO, {label(where)}", slos(where)[slo][0], "s")
    for job, rates in found.items():
        for slo, rate in rates.items():
            point(job.deployment, f"{job.policy}, {job.name} {slo}", rate, "requests/s")
    largest: dict[tuple, float] = {}
    for job in found:
        if job.policy != "sarathi_serve" or job.deployment.stages == 1:
            continue
        for slo in slos(job.deployment):
            for rival, gain in gains(found, job, slo).items():
                point(job.deployment, f"gain over {rival}, {job.name} {slo}", gain, "x")
                key = job.deployment, rival, unit_of(slo)
                largest[key] = max(gain, largest.get(key, 0.0))
    for (where, rival, unit), gain in largest.items():
        point(where, f"largest gain over {rival}, {label(where)}, {unit}", gain, "x")
    return points


def unit_of(slo: str) -> str:
    """What an SLO is given in."""
    return "SLOs in iterations" if slo in SLOS else "SLOs in seconds"


def predict(quick: bool, requests: int | None = None) -> list[Point]:
    return points_of(search(requests or (32 if quick else REQUESTS), quick))


def compared(strict: str, unit: str) -> dict[str, tuple[str, float]]:
    """Id of a published gain -> series. The paper's SLOs are ours in iterations or in seconds."""
    return {
        "ss_falcon_strict_vllm_pp": (f"gain over vllm_v0, {label(FALCON)} chat {strict}", 0),
        "ss_falcon_strict_vllm_tp8": (
            f"gain over {ON_TP8}, {label(FALCON)} chat {strict}", 0
        ),
        "ss_falcon": (f"largest gain over vllm_v0, {label(FALCON)}, {unit}", 0),
        "ss_llama70_orca": (f"largest gain over orca, {label(LLAMA)}, {unit}", 0),
    }  # fmt: skip


IN_ITERATIONS = compared("strict", unit_of("strict"))
IN_SECONDS = compared("1 s", unit_of("1 s"))
ITERATIONS = {
    # published as one number: it is no sum of two stages, which is above the floor
    "ss_falcon_prefill": (f"prefill of 4K, all stages, {label(FALCON)}", 0),
    "ss_falcon_decode": (f"decode iteration of {DECODES}, all stages, {label(FALCON)}", 0),
}


SHOWN = {
    series for places in (ITERATIONS, IN_ITERATIONS, IN_SECONDS) for series, _ in places.values()
}


def published(predicted: Sequence[Point]) -> list[Point]:
    """The published numbers. A gain stands beside both ways to read its SLO."""
    return [
        point
        for places in (ITERATIONS, IN_ITERATIONS, IN_SECONDS)
        for point in paper_points(places, predicted)
    ]


def table(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the terminal: capacities in requests/s, and the gains."""
    values = {point.series: point.y for point in points}
    columns = [*POLICIES, *[f"gain over {rival}" for rival in (*POLICIES[:2], ON_TP8)]]
    groups = dict.fromkeys(
        series.partition(", ")[2] for series in values if series.startswith(POLICIES)
    )
    rows = []
    for group in groups:
        cells = [values.get(f"{column}, {group}") for column in columns]
        rows.append([*group.split(" ", 3), *["-" if c is None else f"{c:.2f}" for c in cells]])
    return ["model", "layout", "lengths", "SLO", *columns], rows


def draw(points: list[Point]) -> plt.Figure:
    """Capacities under both SLOs; on the right, the gains beside the published ones."""
    values = {(point.source, point.series): point.y for point in points}
    figure, panels = plt.subplots(1, 3, figsize=(24, 8), layout="constrained")
    names = [
        job.name
        for job in JOBS
        if ("predicted", f"sarathi_serve, {job.name} strict") in values
        and job.policy == "sarathi_serve"
    ]
    for axes, slo in zip(panels, SLOS, strict=False):
        for number, policy in enumerate(POLICIES):
            heights = {
                place + 0.27 * (number - 1): values["predicted", f"{policy}, {name} {slo}"]
                for place, name in enumerate(names)
                if ("predicted", f"{policy}, {name} {slo}") in values
            }
            drawn = axes.bar(
                heights.keys(), heights.values(), 0.26, color=LOOKS[policy][0], edgecolor="black",
                label=policy,
            )  # fmt: skip
            axes.bar_label(drawn, fmt="%.2f", fontsize=11, padding=2)
        axes.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names], fontsize=12)
        axes.set(ylabel="requests per second", title=f"capacity, {slo} SLO (predicted)")
        axes.grid(axis="x", visible=False)
    panels[0].legend()
    draw_gains(panels[2], values)
    figure.suptitle(
        "Sarathi-Serve Fig 11 and 13: pipelines over two nodes (Falcon-180B, A100s) and one"
        " (LLaMA2-70B, A40s)",
        fontsize=18,
    )
    return figure


def draw_gains(axes: plt.Axes, values: dict[tuple[str, str], float]) -> None:
    """Published gains of sarathi_serve, and the predicted ones for both ways to read the SLOs."""
    titles = ["Falcon chat\nstrict, over\nvllm_v0", f"Falcon chat\nstrict, over\n{ON_TP8}",
              "Falcon\nlargest over\nvllm_v0", "LLaMA2-70B\nlargest over\norca"]  # fmt: skip
    kinds = [
        ("paper", IN_SECONDS, "paper", COLOURS["sky"], "//"),
        ("predicted", IN_SECONDS, "predicted, SLOs of 1 s and 5 s", LOOKS["sarathi_serve"][0], ""),
        ("predicted", IN_ITERATIONS, "predicted, SLOs in decode iterations", "white", ""),
    ]
    for number, (source, places, name, colour, hatch) in enumerate(kinds):
        heights = {
            place + 0.27 * (number - 1): values[source, series]
            for place, (series, _) in enumerate(places.values())
            if (source, series) in values
        }
        drawn = axes.bar(
            heights.keys(), heights.values(), 0.26, color=colour, hatch=hatch, edgecolor="black",
            label=name,
        )  # fmt: skip
        axes.bar_label(drawn, fmt="%.1f", fontsize=11, padding=2)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(titles)), titles, fontsize=12)
    axes.set(ylabel="capacity of sarathi_serve / other's", title="gain, predicted and published")
    axes.set_ylim(top=1.35 * axes.dataLim.ymax)
    axes.legend(loc="upper left")
    axes.grid(axis="x", visible=False)


FIGURE = Figure(
    name="serve_pipelines",
    description=__doc__,
    paper={},  # see `published`
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: point.series in SHOWN or point.series.startswith(("prefill", *SLOS)),
    software=dict.fromkeys((FALCON.gpu, LLAMA.gpu), "sarathi_serve"),
)  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help=f"requests of each search (default: {REQUESTS})",
    )
    options = parser.parse_args()
    make_directory(options.out, FIGURE.name, force=options.force)
    points = predict(options.quick, options.requests)
    print(__doc__.splitlines()[0], end="\n\n")
    print_table(*table(points))
    save_results(options.out, FIGURE, [*points, *published(points)])


if __name__ == "__main__":
    run_main(main)
