"""TD-Pipe's lead with one thing changed at a time, by length of the outputs; and its latency.

    python experiments/td_options.py
        predicted for four pairs of model and node, each with 4 GPUs, 1,000 requests: minutes

td_throughput.py compares TD-Pipe with four baselines. Much that decides it is not published.
OPTIONS changes one thing at a time: what would each do to TD-Pipe's lead? None is chosen by what it
gives. Each changes the systems that it names alone: "host 20 ms" slows the baselines, as if
TD-Pipe's host worked while its GPUs do. "no cap" takes away vLLM 0.5.3's cap on the tokens of a
batch of prefills (experiments/lib/td.py).

Then all outputs are stretched to several means. Times to first token and between tokens follow; the
paper reports none. With fewer requests than there, phases are few, and ratios are not the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

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
    write_csv,
)
from experiments.lib.look import log_ticks, save_figure, use_style
from experiments.lib.td import (
    BASELINES,
    BATCH_SIZE,
    LOOKS,
    MARKS,
    NODES,
    PROCESSES,
    PUBLISHED,
    SOFTWARE,
    Lengths,
    azure,
    chat,
    run,
    run_jobs,
)
from pipeline.phases import Rules
from pipeline.predictors import Classes
from serving.capacity import percentile

NAME = "td_options"
COUNT, QUICK = 1000, 12  # requests
GPUS = 4
OURS = "TD-Pipe"
SYSTEMS = (*BASELINES, OURS)
COMPARED = ("PP+HB", OURS)  # by length of the outputs, and in latency
TOKENS, PHASES = "output tokens/s", "phases"
OUTPUTS = (20, 40, 80, 160, 320)  # mean output tokens
LATENCIES = {
    "median TTFT": ("ttfts", 50),
    "P99 TTFT": ("ttfts", 99),
    "median TBT": ("tbts", 50),
    "P99 TBT": ("tbts", 99),
}


@dataclass(frozen=True)
class Option:
    """One change, and the systems that it changes.

    changes: options of `td.run`. rules: TD-Pipe's, from the lengths. lengths: other ones.
    """

    systems: Sequence[str]
    changes: Mapping[str, object] = field(default_factory=dict)
    rules: Callable[[Lengths], Rules] | None = None
    lengths: Callable[[int], Lengths] = azure


NONE = "no option"
PAPER = {
    number: (f"{NONE}: {OURS} over {baseline}, largest", 0)
    for baseline, number in PUBLISHED.items()
}
HYBRID, SEPARATE, PIPELINES = ("TP+HB", "PP+HB"), ("TP+SB", "PP+SB"), ("PP+SB", "PP+HB")
OPTIONS = {
    NONE: Option(()),
    **{f"host {ms} ms": Option(BASELINES, {"overhead": ms / 1000}) for ms in (5, 10, 20)},
    "20 ms overlapped": Option(BASELINES, {"overhead": 0.02, "overlapped": True}),
    **{f"budget {size}": Option(HYBRID, {"budget": size}) for size in (256, 2048)},
    "batches of 64": Option(BASELINES, {"batch_size": 64}),
    # as many requests as four micro-batches hold
    "batches of 1024": Option(("TP+SB", "TP+HB"), {"batch_size": GPUS * BATCH_SIZE}),
    "no cap": Option(SEPARATE, {"policy": "vllm_v0"}),
    "one queue": Option(PIPELINES, {"deal": "queue"}),
    "one queue, pool": Option(PIPELINES, {"deal": "queue", "memory": "pool"}),
    "chat lengths": Option(SYSTEMS, lengths=chat),
    "pack 1024": Option((OURS,), rules=lambda lengths: Rules(pack=1024)),
    "classes(0.55)": Option(
        (OURS,), rules=lambda lengths: Rules(predict=Classes([o for _, o in lengths], 0.55))
    ),
}


@dataclass(frozen=True)
class Job:
    """One run of `count` requests. outputs: mean output tokens; 0: as they are."""

    system: str
    node: str
    count: int
    option: str = NONE
    outputs: int = 0


@cache
def lengths_of(make: Callable[[int], Lengths], count: int, outputs: int) -> Lengths:
    """`outputs`: the mean to which all outputs are stretched or shrunk; 0: as they are."""
    lengths = make(count)
    if not outputs:
        return lengths
    factor = outputs * len(lengths) / sum(output for _, output in lengths)
    return [(prompt, max(1, round(factor * output))) for prompt, output in lengths]


def perform(job: Job) -> dict[str, float]:
    """Output tokens/s; of COMPARED systems without an option also LATENCIES (s) and phases."""
    option = OPTIONS[job.option]
    lengths = lengths_of(option.lengths, job.count, job.outputs)
    changes = dict(option.changes)
    if option.rules:
        changes["rules"] = option.rules(lengths)
    if job.option != NONE or job.system not in COMPARED:
        return {TOKENS: run(NODES[job.node], job.system, lengths, **changes).throughput}
    done = run(NODES[job.node], job.system, lengths, keep=True)
    latencies = {
        name: percentile(getattr(done.trace.requests, times), percent)
        for name, (times, percent) in LATENCIES.items()
    }
    return {TOKENS: done.throughput, PHASES: done.phases, **latencies}


class Results:
    """All runs of a script, and what is asked of them."""

    def __init__(self, count: int, quick: bool):
        self.count = count
        self.options = list(OPTIONS)[::7] if quick else list(OPTIONS)
        self.outputs = OUTPUTS[1:3] if quick else OUTPUTS
        jobs = [
            *(self.job(*each) for each in product(SYSTEMS, NODES, self.options)),
            *(
                Job(system, node, count, NONE, mean)
                for system, node, mean in product(COMPARED, NODES, self.outputs)
            ),
        ]
        self.found = run_jobs(perform, list(dict.fromkeys(jobs)), 1 if quick else PROCESSES)

    def job(self, system: str, node: str, option: str = NONE) -> Job:
        """The plain run where the option does not change the system."""
        return Job(system, node, self.count, option if system in OPTIONS[option].systems else NONE)

    def lead(self, option: str, baseline: str, node: str) -> float:
        """TD-Pipe's throughput over that of a baseline."""
        ours, theirs = (self.found[self.job(each, node, option)] for each in (OURS, baseline))
        return ours[TOKENS] / theirs[TOKENS]

    def largest(self, option: str, baseline: str) -> float:
        return max(self.lead(option, baseline, node) for node in NODES)

    def lead_at(self, outputs: int, node: str) -> float:
        """Over PP+HB, where outputs have this mean."""
        theirs, ours = (self.found[Job(each, node, self.count, NONE, outputs)] for each in COMPARED)
        return ours[TOKENS] / theirs[TOKENS]

    def plain(self, what: str, system: str, node: str) -> float:
        """Without an option. what: of LATENCIES, in seconds, or PHASES."""
        return self.found[self.job(system, node)][what]


def points_of(results: Results) -> list[Point]:
    points = []

    def point(series: str, x: float, x_unit: str, y: float, y_unit: str, node: str = "") -> None:
        where = "four models", f"{GPUS} GPUs of a node"
        if node:
            where = NODES[node].model, NODES[node].hardware
            series += f", {node}"
        points.append(Point(NAME, series, x, x_unit, y, y_unit, "predicted", *where))

    for baseline in BASELINES:
        for option in results.options:
            series = f"{option}: {OURS} over {baseline}"
            for node in NODES:
                point(series, 0, "", results.lead(option, baseline, node), "x", node)
            point(f"{series}, largest", 0, "", results.largest(option, baseline), "x")
    for node in NODES:
        for mean in results.outputs:
            y = results.lead_at(mean, node)
            point(f"{OURS} over PP+HB", mean, "mean output tokens", y, "x", node)
        for system in COMPARED:
            for what in LATENCIES:
                y = results.plain(what, system, node)
                point(f"{what} of {system}", 0, "", y, "s", node)
        point(f"{PHASES} of {OURS}", 0, "", results.plain(PHASES, OURS, node), PHASES, node)
    return points


def untouched(option: str, baseline: str) -> bool:
    """Whether an option changes neither TD-Pipe nor the baseline."""
    return option != NONE and not {baseline, OURS} & set(OPTIONS[option].systems)


# ---------------------------------------------------------------------------------------- tables


def print_options(results: Results) -> None:
    """All ratios under each option, and which options bring the published ones."""
    published = {baseline: paper_numbers()[PUBLISHED[baseline]] for baseline in BASELINES}
    rows = []
    for option in results.options:
        leads = [
            "-"
            if untouched(option, baseline)
            else " ".join(f"{results.lead(option, baseline, node):.2f}" for node in NODES)
            for baseline in BASELINES
        ]
        rows.append([option, *leads])
    rows.append(["paper, largest", *[f"{y:.2f}" for y in published.values()]])
    print(f"\n{OURS} over each baseline with one thing changed: {', '.join(NODES)}\n")
    print_table(["", *BASELINES], rows)
    print()
    for baseline, y in published.items():
        enough = [each for each in results.options if results.largest(each, baseline) >= y]
        print(f"At least {y:g} over {baseline}, somewhere: {', '.join(enough) or 'no option'}.")

    print("Which of them the authors' baselines had, if any, we do not know.")


def print_outputs(results: Results) -> None:
    means = results.outputs
    rows = [[node, *[f"{results.lead_at(mean, node):.2f}" for mean in means]] for node in NODES]
    print(f"\n{OURS} over PP+HB by mean output tokens\n")
    print_table(["", *means], rows)


def print_latencies(results: Results) -> None:
    rows = [
        [node, system, *[f"{results.plain(each, system, node):.3g} s" for each in LATENCIES]]
        for node in NODES
        for system in COMPARED
    ]
    print("\nTime to first token and between tokens; all requests are there at the start\n")
    print_table(["", "", *LATENCIES], rows)
    counts = ", ".join(str(results.plain(PHASES, OURS, node)) for node in NODES)
    print(f"\n{OURS}'s phases: {counts}. Two of them: all requests fit the memory at once.")


# --------------------------------------------------------------------------------------- picture


def draw(points: list[Point], count: int) -> plt.Figure:
    values = {(point.series, point.x): point.y for point in points if point.source == "predicted"}
    figure, panels = plt.subplots(2, 3, figsize=(22, 15), layout="constrained")
    for axes, baseline in zip(panels[:, :2].flat, BASELINES, strict=True):
        draw_options(axes, baseline, values)
    for axes in panels[:, 1]:
        axes.tick_params(labelleft=False)
    draw_outputs(panels[0][2], values)
    draw_gaps(panels[1][2], values)
    legend = panels[0][0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncol=len(legend[0]), fontsize=15)
    figure.suptitle(
        f"Left: TD-Pipe's lead with one thing changed (grey: it changes neither). Predicted, {GPUS}"
        f" GPUs, {count} requests",
        fontsize=20,
    )
    return figure


def draw_options(axes: plt.Axes, baseline: str, values: Mapping[tuple[str, float], float]) -> None:
    """The four ratios under each option."""
    series = f"{{}}: {OURS} over {baseline}, {{}}"
    options = [each for each in OPTIONS if (series.format(each, "largest"), 0) in values]
    places = range(len(options))
    for node, (colour, marker) in MARKS.items():
        leads = [values[series.format(each, node), 0] for each in options]
        style = {"linestyle": "none", "markersize": 10, "label": node}
        axes.plot(leads, places, marker, color=colour, **style)
    for place, option in zip(places, options, strict=True):
        if untouched(option, baseline):
            axes.axhspan(place - 0.5, place + 0.5, color="#EEEEEE", zorder=0)
    published = paper_numbers()[PUBLISHED[baseline]]
    axes.axvline(published, color="black", linestyle="--", label="the paper's largest")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, options)
    axes.invert_yaxis()
    axes.set(xlabel=f"{OURS} / {baseline}", xlim=(0.6, 2.85))
    axes.set_title(f"TD-Pipe over {baseline} (paper, largest: {published:g})")


def draw_outputs(axes: plt.Axes, values: Mapping[tuple[str, float], float]) -> None:
    for node, (colour, marker) in MARKS.items():
        curve = sorted((x, y) for (s, x), y in values.items() if s == f"{OURS} over PP+HB, {node}")
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, markersize=10)
    log_ticks(axes, sorted({x for _, x in values if x}))
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="mean output tokens (prompts as they are)", ylabel=f"{OURS} / PP+HB")
    axes.set_title("TD-Pipe over PP+HB, by length of the outputs")


def draw_gaps(axes: plt.Axes, values: Mapping[tuple[str, float], float]) -> None:
    """Median and 99th percentile of the time between tokens."""
    for number, system in enumerate(COMPARED):
        for what, marker, fill in (("median", "o", "full"), ("P99", "^", "none")):
            heights = [1000 * values[f"{what} TBT of {system}, {node}", 0] for node in NODES]
            places = [place + 0.24 * (number - 0.5) for place in range(len(NODES))]
            style = {"linestyle": "none", "markersize": 12, "fillstyle": fill}
            style["label"] = f"{system}, {what}"
            axes.plot(places, heights, marker, color=LOOKS[system], **style)
    axes.set_xticks(range(len(NODES)), [node.replace(" + ", " +\n") for node in NODES])
    axes.set(yscale="log", ylabel="ms (logarithmic)", title="time between tokens")
    axes.set_ylim(top=8 * axes.dataLim.ymax)
    axes.legend(loc="upper left", ncol=2)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--requests", type=positive, metavar="N", help=f"of each run (default: {COUNT})"
    )
    options = parser.parse_args()
    make_directory(options.out, NAME, force=options.force)
    count = options.requests or (QUICK if options.quick else COUNT)
    results = Results(count, options.quick)
    print(f"{__doc__.splitlines()[0]}\n{count} requests")
    for show in (print_options, print_outputs, print_latencies):
        show(results)
    points = points_of(results)
    write_csv(options.out / f"{NAME}.csv", [*points, *paper_points(PAPER, points)], SOFTWARE)
    use_style()
    save_figure(draw(points, count), options.out / f"{NAME}.png")
    print(f"\nwrote {options.out / NAME}.png and .csv")


if __name__ == "__main__":
    run_main(main)
