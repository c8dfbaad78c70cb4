"""TD-Pipe, Fig 1 and 2: where a pipeline of four stages loses time, and what phases leave of it.

    python experiments/td_phases.py      predicted for the paper's four nodes; seconds, no GPU

Three ways to fill the micro-batches run the same requests (experiments/lib/td.py): prefills and
decodes in separate batches (PP+SB), in hybrid batches of chunks and decodes (PP+HB), and in phases
(TD-Pipe). The picture shows windows of their schedules, TD-Pipe's around one switch from decode to
prefill and back; the utilisation over time; and the account of each run: which share of the stages'
time was work, and why the rest was not (pipeline/account.py). Prefills that are done again after a
preemption count as work.

The paper draws both figures and states no number for them.
"""

from functools import partial
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

from cli import run_main
from experiments.lib import td
from experiments.lib.common import (
    Point,
    make_directory,
    make_parser,
    print_table,
    progress,
    write_csv,
)
from experiments.lib.look import COLOURS, save_figure, use_style
from pictures.gantt import STAGE_LOOKS, draw_stages, legend_handles
from pictures.lanes import stage_lanes
from pipeline import BUBBLES, IDLE, PipelineTrace

DRAWN = "L20 + 13B"  # the node of the windows
SYSTEMS = ("PP+SB", "PP+HB", "TD-Pipe")
WINDOW = 1.8  # s
BINS = 80  # of the utilisation over time
CAUSES = {  # colour and hatch of the account; busy first
    "busy": ("#D9D9D9", ""),
    "PB1": (COLOURS["vermilion"], ""),
    "PB2": (COLOURS["purple"], "//"),
    "PB3": (COLOURS["black"], ""),
    "uneven stages": ("#777777", ".."),
    "link": (COLOURS["green"], ""),
    "phase switch": (COLOURS["sky"], "xx"),
    "start-up": ("#FFFFFF", "--"),
    "drain": ("#FFFFFF", "||"),
    "starved": ("#FFFFFF", "oo"),
}


def shares(trace: PipelineTrace) -> dict[str, float]:
    """% of all stages' time from the first step to the last, by CAUSES."""
    whole = trace.stages * trace.seconds
    values = {"busy": sum(trace.busy)} | {name: trace.idle[name] for name in IDLE}
    return {name: 100 * values[name] / whole for name in CAUSES}


def utilisation(trace: PipelineTrace) -> list[tuple[float, float]]:
    """(s, % of the stages' time that is work), in BINS equal parts of the run."""
    edges = np.linspace(0, trace.end, BINS + 1)
    work = np.zeros(BINS)
    for stage in range(trace.stages):
        starts = np.array([step.starts[stage] for step in trace.steps])
        seconds = np.array([step.seconds[stage] for step in trace.steps])
        times = np.column_stack([starts, starts + seconds]).ravel()
        done = np.insert(np.cumsum(seconds), 0, 0)  # before each step
        work += np.diff(np.interp(edges, times, np.repeat(done, 2)[1:-1]))
    width = edges[1] - edges[0]
    values = 100 * work / (trace.stages * width)
    return list(zip((edges[:-1] + width / 2).tolist(), values.tolist(), strict=True))


def switch(trace: PipelineTrace) -> float:
    """When, after the first half of the run, TD-Pipe begins to prefill again (s)."""
    return next(
        after
        for (_, _, before), (after, _, phase) in pairwise(trace.history)
        if (before, phase) == ("decode", "prefill") and after > trace.end / 2
    )


def points(node: td.Node, runs: dict[str, td.Run]) -> list[Point]:
    point = partial(
        Point, "td_phases", source="predicted", model=node.model, hardware=node.hardware
    )
    rows = []
    for system, run in runs.items():
        name = f"{system}, {node.name}"
        for cause, share in shares(run.trace).items():
            rows.append(point(f"{name}, {cause}", 0, "", share, "%"))
        bubbles = 100 * run.trace.bubble_share
        rows.append(point(f"{name}, bubbles", 0, "", bubbles, "%"))
        rows.append(point(f"{name}, throughput", 0, "", run.throughput, "tokens/s"))
        if run.trace.steps is not None:
            curve = utilisation(run.trace)
            rows += [point(f"{name}, utilisation", x, "s", y, "%") for x, y in curve]
    return rows


def draw(runs: dict[str, dict[str, td.Run]], count: int) -> plt.Figure:
    """Three windows; below them utilisation over time, and the account of every run."""
    figure = plt.figure(figsize=(19, 19), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[3, 2])
    panels = top.subplots(3, 1)
    curves, accounts = bottom.subplots(1, 2, width_ratios=[2, 3])
    figure.draw_without_rendering()  # now panels are as wide as they will be: labels fit or not
    drawn = {system: run.trace for system, run in runs[DRAWN].items()}
    for letter, axes, (system, trace) in zip("abc", panels, drawn.items(), strict=True):
        start = (switch(trace) if system == "TD-Pipe" else trace.end / 2) - 0.1 * WINDOW
        with plt.rc_context({"font.size": 12}):  # labels that fit the bars
            draw_stages(trace, axes, start=start, end=start + WINDOW, legend=False)
        busy = shares(trace)["busy"]
        title = f"({letter}) {system}: {WINDOW:g} s of the run. Stages work {busy:.0f} % of it all"
        axes.set_title(title, loc="left")
        x, y = zip(*utilisation(trace), strict=True)
        curves.plot(x, y, color=td.LOOKS[system], label=f"{system}: {busy:.0f} % in all")
    handles = legend_handles([stage_lanes(trace) for trace in drawn.values()], STAGE_LOOKS)
    top.legend(handles=handles, loc="outside lower center", ncols=4)
    curves.set(xlabel="time (s)", ylabel="stages' time that is work (%)", ylim=(0, 103))
    curves.set_title(f"(d) utilisation over time, {DRAWN}", loc="left")
    curves.legend(loc="lower left")
    draw_accounts(accounts, runs)
    figure.suptitle(
        f"TD-Pipe Fig 1 and 2: {count} requests on four stages, predicted; (a) to (d): {DRAWN}",
        fontsize=20,
    )
    return figure


def draw_accounts(axes: plt.Axes, runs: dict[str, dict[str, td.Run]]) -> None:
    """Stacked bars, from 50 % on: below that all is work."""
    places, labels, stacks = [], [], []
    for number, (name, systems) in enumerate(runs.items()):
        for offset, (system, run) in enumerate(systems.items()):
            places.append(number * (len(SYSTEMS) + 1) + offset)
            labels.append(system)
            stacks.append(shares(run.trace))
        axes.text(places[-2], 101, name, ha="center")
    below = np.zeros(len(places))
    for cause, (colour, hatch) in CAUSES.items():
        heights = np.array([stack[cause] for stack in stacks])
        if heights.max() > 0.05:
            axes.bar(
                places, heights, 0.85, below, color=colour, hatch=hatch, edgecolor="black",
                linewidth=0.6, label=cause,
            )  # fmt: skip
        below += heights
    for place, stack in zip(places, stacks, strict=True):
        axes.text(place, 53, f"{stack['busy']:.0f}", ha="center", fontsize=12)
    axes.set_xticks(places, labels, rotation=60)
    axes.set(ylim=(50, 105), ylabel="stages' time (%), from 50 % on")
    axes.grid(visible=False, axis="x")
    axes.set_title("(e) the account of all four nodes", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    make_directory(options.out, "td_phases", force=options.force)
    count = 700 if options.quick else td.COUNT
    lengths = td.azure(count)
    names = [DRAWN] if options.quick else list(td.NODES)
    runs = {
        name: {
            system: td.run(td.NODES[name], system, lengths, keep=name == DRAWN)
            for system in SYSTEMS
        }
        for name in progress(names, "nodes")
    }
    print(f"{__doc__.splitlines()[0]}\n\n% of all stages' time, {count} requests, predicted\n")
    rows = []
    for name, systems in runs.items():
        for system, run in systems.items():
            cells = [f"{share:.1f}" for share in shares(run.trace).values()]
            bubbles = f"{100 * run.trace.bubble_share:.1f}"
            again = str(run.recomputed)
            rows.append([name, system, *cells, bubbles, f"{run.throughput:.0f}", again])
    header = ["node", "system", *CAUSES, "bubbles", "output tokens/s", "preemptions"]
    print_table(header, rows)
    print(f"\nbubbles: {', '.join(BUBBLES)}")
    found = [point for name, each in runs.items() for point in points(td.NODES[name], each)]
    write_csv(options.out / "td_phases.csv", found, td.SOFTWARE)
    use_style()
    save_figure(draw(runs, count), options.out / "td_phases.png")
    print(f"\nwrote {options.out / 'td_phases'}.png and .csv")


if __name__ == "__main__":
    run_main(main)
