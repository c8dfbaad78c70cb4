"""TD-Pipe, Fig 11: its throughput beside tensor parallelism and other pipelines, and what decides.

    python experiments/td_throughput.py
        predicted for four pairs of model and node, on 1, 2 and 4 GPUs, with 5,000 requests as in
        the paper: minutes

The systems, the nodes and the lengths are those of experiments/lib/td.py. Separate batches of
prefills (TP+SB, PP+SB) are capped at the model's longest sequence, as in vLLM 0.5.3. Throughput is
output tokens per second, from the first step to the last token; the paper says tokens/s only. With
one GPU there is nothing to share: TP and PP are the same, and SB and HB run once.

The *ceiling* (`lib.td.ceiling`) is what no schedule of TD-Pipe's micro-batches can beat: prompts
packed as it packs them, decodes in batches that fill the memory all the time, no stage ever idle.
It comes from the cost model, the lengths and the memory, not from a run. Hybrid batches and tensor
parallelism may be above it.

What else could explain the paper's ratios, and what TD-Pipe costs in latency: td_options.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import matplotlib.pyplot as plt

from cli import run_main
from experiments.lib.common import (
    Point,
    make_directory,
    make_parser,
    paper_numbers,
    paper_points,
    positive,
    print_table,
)
from experiments.lib.figure import Figure, save_results
from experiments.lib.look import COLOURS, log_ticks, star
from experiments.lib.td import (
    BASELINES,
    BUDGET,
    LOOKS,
    MARKS,
    NODES,
    PHASES,
    PROCESSES,
    PUBLISHED,
    SOFTWARE,
    Node,
    azure,
    ceiling,
    run,
    run_jobs,
)
from pipeline import BUBBLES, seconds_of_rows

COUNT, QUICK = 5000, 12  # requests: the paper's (Sec 4.1), and with --quick
COUNTS = (1, 2, 4)  # GPUs
MOST = COUNTS[-1]
OURS = "TD-Pipe"
SYSTEMS = (*BASELINES, OURS)
PIPELINES = ("PP+SB", "PP+HB", OURS)
LOOKED_INTO = ("PP+HB", OURS)  # whose steps are kept
TOKENS = "output tokens/s"
SCALED = "L20 + 32B"  # whose growth from 2 to 4 GPUs is published
SHOWN = ("largest", f"2 to 4 GPUs, {SCALED}")
PARTS = {  # where a stage's time goes
    "prefill": PHASES["prefill"],
    "hybrid": COLOURS["purple"],
    "decode": PHASES["decode"],
    "bubbles": COLOURS["black"],
    "start and end": "#BBBBBB",
}


@dataclass(frozen=True)
class Job:
    """One run of `count` requests."""

    system: str
    node: str
    gpus: int
    count: int


@dataclass(frozen=True)
class Outcome:
    """What is kept of a run. Seconds are those of one stage, on average.

    bubbles: None with tensor parallelism. work: seconds by kind of step, and decodes: how many, of
    systems LOOKED_INTO alone.
    """

    throughput: float  # output tokens/s
    seconds: float
    recomputed: int
    bubbles: float | None = None
    work: Mapping[str, float] = field(default_factory=dict)
    decodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Where the time of a stage goes, by PARTS: seconds."""
        rest = self.seconds - sum(self.work.values()) - self.bubbles
        return {**self.work, "bubbles": self.bubbles, "start and end": rest}


def perform(job: Job) -> Outcome:
    lengths, keep = azure(job.count), job.gpus == MOST and job.system in LOOKED_INTO
    options = {"keep": True} if keep else {}
    done = run(NODES[job.node].on(job.gpus), job.system, lengths, **options)
    simple, trace = (done.throughput, done.seconds, done.recomputed), done.trace
    if trace is None:
        return Outcome(*simple)
    bubbles = sum(trace.idle[cause] for cause in BUBBLES) / trace.stages
    if not keep:
        return Outcome(*simple, bubbles)
    work, decodes = (dict.fromkeys(("prefill", "hybrid", "decode"), 0) for _ in range(2))
    for step in trace.steps:
        work[step.kind] += sum(step.seconds) / trace.stages
        decodes[step.kind] += step.num_tokens - step.num_prefill_tokens
    return Outcome(*simple, bubbles, work, decodes)


def jobs_of(count: int) -> list[Job]:
    """All that fit the memory and differ: on one GPU, TP stands for PP, too."""
    return [
        Job(system, name, gpus, count)
        for name, node in NODES.items()
        for gpus in COUNTS
        if node.on(gpus).cache_tokens
        for system in (SYSTEMS if gpus > 1 else ("TP+SB", "TP+HB", OURS))
    ]


# ---------------------------------------------------------------------------------------- points


class Results:
    """What came of the runs, by what is asked of them."""

    def __init__(self, count: int, found: Mapping[Job, Outcome]):
        self.count, self.found, self.lengths = count, found, azure(count)

    def of(self, system: str, node: str, gpus: int = MOST) -> Outcome | None:
        """None where the model does not fit, and where TP stands for PP."""
        return self.found.get(Job(system, node, gpus, self.count))

    @cache  # noqa: B019
    def ceiling(self, node: str, gpus: int = MOST) -> float:
        return ceiling(NODES[node].on(gpus), self.lengths)

    def lead(self, baseline: str, node: str) -> float:
        """TD-Pipe's throughput over that of a baseline, on all GPUs."""
        return self.of(OURS, node).throughput / self.of(baseline, node).throughput

    def ceiling_lead(self, baseline: str, node: str) -> float:
        return self.ceiling(node) / self.of(baseline, node).throughput

    def share(self, node: str) -> float:
        """TD-Pipe's of the ceiling, %."""
        return 100 * self.of(OURS, node).throughput / self.ceiling(node)

    def costs(self, system: str, node: str) -> dict[str, float | None]:
        """What decodes and prefills cost, where the system has any of the kind.

        a decode aboard: GPU-ms in a hybrid batch, beyond what all prompts cost in chunks of the
        budget, alone. a decode alone: GPU-ms in a batch of decodes. prefills: their work over that
        of such chunks.
        """
        found, stages = self.of(system, node), NODES[node].gpus
        work, decodes = found.work, found.decodes
        rate = seconds_of_rows(NODES[node].cost_model())(BUDGET) / BUDGET
        chunks = sum(prompt for prompt, _ in self.lengths) * rate / stages
        aboard = 1000 * stages * (work["prefill"] + work["hybrid"] - chunks)
        alone = 1000 * stages * work["decode"]
        return {
            "a decode aboard": aboard / decodes["hybrid"] if decodes["hybrid"] else None,
            "a decode alone": alone / decodes["decode"] if decodes["decode"] else None,
            "prefills": None if decodes["hybrid"] else work["prefill"] / chunks,
        }


def largest(lead: Callable[[str, str], float], baseline: str) -> float:
    return max(lead(baseline, node) for node in NODES)


def predict(quick: bool) -> list[Point]:
    count = QUICK if quick else COUNT
    return points_of(Results(count, run_jobs(perform, jobs_of(count))))


def points_of(results: Results) -> list[Point]:
    points = []

    def point(series: str, y: float, y_unit: str, node: Node | None, gpus: int = 0) -> None:
        where = (node.model, node.hardware) if node else ("four models", f"{MOST} GPUs of a node")
        x_unit = "GPUs" if gpus else ""
        points.append(Point(FIGURE.name, series, gpus, x_unit, y, y_unit, "predicted", *where))

    for name, node in NODES.items():
        for gpus in COUNTS:
            few = node.on(gpus)
            for system in SYSTEMS:
                found = results.of(system, name, gpus)
                if found is not None:
                    point(f"{label(system, gpus)}, {name}", found.throughput, TOKENS, few, gpus)
            if few.cache_tokens:
                point(f"ceiling, {name}", results.ceiling(name, gpus), TOKENS, few, gpus)
        for system in SYSTEMS:
            y = results.of(system, name).recomputed
            point(f"recomputations of {system}, {name}", y, "preemptions", node)
        for system in PIPELINES:
            found = results.of(system, name)
            y = 100 * found.bubbles / found.seconds
            point(f"bubbles of {system}, {name}", y, "%", node)
        for baseline in BASELINES:
            point(f"{OURS} over {baseline}, {name}", results.lead(baseline, name), "x", node)
            y = results.ceiling_lead(baseline, name)
            point(f"ceiling over {baseline}, {name}", y, "x", node)
        point(f"{OURS}'s share of the ceiling, {name}", results.share(name), "%", node)
        for system in LOOKED_INTO:
            for part, y in results.of(system, name).parts.items():
                point(f"{part} of {system}, {name}", y, "s of a stage", node)
            for cost, y in results.costs(system, name).items():
                if y is not None:
                    unit = "x" if cost == "prefills" else "ms of a GPU"
                    point(f"cost of {cost}, {system}, {name}", y, unit, node)
        two, all_of_them = (results.of(OURS, name, gpus) for gpus in (2, MOST))
        if two is not None:
            growth = all_of_them.throughput / two.throughput
            point(f"{OURS}, 2 to 4 GPUs, {name}", growth, "x", node)
    for baseline in BASELINES:
        point(f"{OURS} over {baseline}, largest", largest(results.lead, baseline), "x", None)
        y = largest(results.ceiling_lead, baseline)
        point(f"ceiling over {baseline}, largest", y, "x", None)
    return points


def label(system: str, gpus: int) -> str:
    """One GPU is no TP and no PP."""
    return system[3:] if gpus == 1 and system in BASELINES else system


# ---------------------------------------------------------------------------------------- tables


def print_throughput(results: Results) -> None:
    rows, missing = [], []
    for name, node in NODES.items():
        for gpus in COUNTS:
            if not node.on(gpus).cache_tokens:
                missing.append(f"{name} on {gpus} GPU" + "s" * (gpus > 1))
                continue
            found = [results.of(system, name, gpus) for system in SYSTEMS]
            cells = [f"{each.throughput:.0f}" if each else "as TP" for each in found]
            rows.append([name, gpus, *cells, f"{results.ceiling(name, gpus):.0f}"])
    print(f"\n{TOKENS}\n")
    print_table(["", "GPUs", *SYSTEMS, "ceiling"], rows)
    print(f"\nDoes not fit the memory: {', '.join(missing)}.")


def print_leads(results: Results) -> None:
    """TD-Pipe over each baseline on all GPUs, and what the published numbers ask for."""
    numbers, rows = paper_numbers(), []
    for name in NODES:
        rows.append([name, *[f"{results.lead(baseline, name):.2f}" for baseline in BASELINES]])
    most = {baseline: largest(results.ceiling_lead, baseline) for baseline in BASELINES}
    published = {baseline: numbers[PUBLISHED[baseline]] for baseline in BASELINES}
    rows.append(["ceiling, largest", *[f"{y:.2f}" for y in most.values()]])
    rows.append(["paper, largest", *[f"{y:.2f}" for y in published.values()]])
    print(f"\n{OURS} over each baseline, {MOST} GPUs\n")
    print_table(["", *BASELINES], rows)
    print()
    for baseline, y in published.items():
        if y > most[baseline]:
            print(f"The paper's {y:g} over {baseline} is above the ceiling, {most[baseline]:.2f}.")


def print_shares(results: Results) -> None:
    """How near TD-Pipe is to the ceiling; bubbles; recomputations."""
    rows = []
    for name in NODES:
        found = {system: results.of(system, name) for system in SYSTEMS}
        bubbles = [f"{100 * found[each].bubbles / found[each].seconds:.1f}" for each in PIPELINES]
        again = [each.recomputed for each in found.values()]
        rows.append([name, f"{results.share(name):.0f}", *bubbles, *again])
    print(
        f"\n{OURS}'s share of the ceiling (%); bubbles in all stages' time (%) of"
        f" {', '.join(PIPELINES)};\nrecomputations (preemptions) of all systems. {MOST} GPUs\n"
    )
    print_table(["", "share", *[f"in {each}" for each in PIPELINES], *SYSTEMS], rows)


def print_reasons(results: Results) -> None:
    """Where a stage's time goes under PP+HB and TD-Pipe, and what a decode costs."""
    rows = []
    for name in NODES:
        for system in LOOKED_INTO:
            found, costs = results.of(system, name), results.costs(system, name).values()
            cells = [f"{seconds:.0f}" for seconds in (*found.parts.values(), found.seconds)]
            rows.append([name, system, *cells, *["-" if y is None else f"{y:.2f}" for y in costs]])
    print(
        "\nSeconds of a stage. A decode: GPU-milliseconds in a hybrid batch beyond what the prompts"
        f"\ncost in chunks of {BUDGET} tokens, and in a batch of decodes. Prefills: their work over"
        " that of\nsuch chunks.\n"
    )
    header = ["", "", "prefill", "hybrid", "decode", "bubbles", "ends", "all"]
    print_table([*header, "aboard", "alone", "prefills"], rows)


# --------------------------------------------------------------------------------------- picture


def draw(points: list[Point]) -> plt.Figure:
    values = {(point.series, point.x): point.y for point in points if point.source == "predicted"}
    figure, panels = plt.subplots(2, 3, figsize=(20, 12), layout="constrained")
    for axes, name in zip(panels[:, :2].flat, NODES, strict=True):
        draw_throughput(axes, name, values)
    draw_leads(panels[0][2], values)
    draw_parts(panels[1][2], values)
    figure.suptitle(
        "TD-Pipe Fig 11: throughput of four configurations (predicted); right, what decides it on"
        f" {MOST} GPUs",
        fontsize=20,
    )
    return figure


def draw_throughput(axes: plt.Axes, name: str, values: Mapping[tuple[str, float], float]) -> None:
    """Lines over the GPUs. TP and PP begin at the same points."""
    fits = [gpus for gpus in COUNTS if NODES[name].on(gpus).cache_tokens]
    for system, marker in zip(SYSTEMS, "^s^so", strict=True):
        places = [gpus for gpus in fits if (f"{label(system, gpus)}, {name}", gpus) in values]
        heights = [values[f"{label(system, gpus)}, {name}", gpus] for gpus in places]
        style = {"linewidth": 3.5, "zorder": 3} if system == OURS else {}
        axes.plot(places, heights, color=LOOKS[system], marker=marker, label=system, **style)
    heights = [values[f"ceiling, {name}", gpus] for gpus in fits]
    axes.plot(fits, heights, color="black", linestyle=":", label="ceiling of phases")
    for gpus in COUNTS:
        if gpus not in fits:
            place = (gpus, 0.03)
            axes.text(*place, "does not fit", rotation=90, ha="center", va="bottom",
                      transform=axes.get_xaxis_transform())  # fmt: skip
    log_ticks(axes, COUNTS)
    axes.set(xlim=(0.85, 4.7), ylim=0, xlabel="GPUs", ylabel=TOKENS, title=name)
    if name == next(iter(NODES)):
        axes.legend(loc="upper left")


def draw_leads(axes: plt.Axes, values: Mapping[tuple[str, float], float]) -> None:
    """Dots: TD-Pipe over each baseline. A star is published, a line the ceiling."""
    numbers = paper_numbers()
    for place, baseline in enumerate(BASELINES):
        for number, (name, (colour, marker)) in enumerate(MARKS.items()):
            x, legend = place + 0.16 * (number - 1.5), place == 0
            y = values[f"{OURS} over {baseline}, {name}", 0]
            style = {"linestyle": "none", "markersize": 10}
            axes.plot([x], [y], marker, color=colour, label=name if legend else None, **style)
            y = values[f"ceiling over {baseline}, {name}", 0]
            text = "ceiling" if legend and number == 0 else None
            axes.hlines(y, x - 0.07, x + 0.07, color="black", linewidth=2, label=text)
        published = numbers[PUBLISHED[baseline]]
        star(axes, place - 0.4, published, label="paper, largest" if place == 0 else None)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(BASELINES)), BASELINES)
    axes.set(ylim=(0, 3.9), ylabel=f"{OURS} / baseline", title="TD-Pipe over each baseline")
    axes.legend(loc="upper left", ncol=2)


def draw_parts(axes: plt.Axes, values: Mapping[tuple[str, float], float]) -> None:
    """Stacked bars: where a stage's time goes; PP+HB's time is 1."""
    for place, name in enumerate(NODES):
        whole = sum(values[f"{part} of {LOOKED_INTO[0]}, {name}", 0] for part in PARTS)
        for number, system in enumerate(LOOKED_INTO):
            x, bottom = place + 0.42 * (number - 0.5), 0.0
            for part, colour in PARTS.items():
                height = values[f"{part} of {system}, {name}", 0] / whole
                text = part if place == number == 0 else None
                axes.bar(x, height, 0.36, bottom, color=colour, edgecolor="white", label=text)
                bottom += height
    axes.set_xticks(range(len(NODES)), [name.replace(" + ", " +\n") for name in NODES])
    axes.grid(axis="x", visible=False)
    axes.set(ylim=(0, 1.75), ylabel="time of a stage (PP+HB = 1)")
    axes.set_title("where the time goes: left PP+HB, right TD-Pipe")
    axes.legend(loc="upper left", ncol=2)


FIGURE = Figure(
    name="td_throughput",
    description=__doc__,
    paper={
        number: (f"{OURS} over {baseline}, largest", 0) for baseline, number in PUBLISHED.items()
    }
    | {"td_scaling_l20_32b": (f"{OURS}, 2 to 4 GPUs, {SCALED}", 0)},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: point.series.startswith(OURS) and point.series.endswith(SHOWN),
    software=SOFTWARE,
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--requests", type=positive, metavar="N", help=f"of each run (default: {COUNT})"
    )
    options = parser.parse_args()
    make_directory(options.out, FIGURE.name, force=options.force)
    count = options.requests or (QUICK if options.quick else COUNT)
    processes = 1 if options.quick else PROCESSES
    results = Results(count, run_jobs(perform, jobs_of(count), processes))
    print(f"{__doc__.splitlines()[0]}\n{count} requests")
    for show in (print_throughput, print_leads, print_shares, print_reasons):
        show(results)
    points = points_of(results)
    save_results(options.out, FIGURE, [*points, *paper_points(FIGURE.paper, points)])


if __name__ == "__main__":
    run_main(main)
