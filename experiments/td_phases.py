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

import enter  # noqa: F401

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

from command.cli import run_main
from experiments.lib import td
from experiments.lib.common import Point, print_table, progress
from experiments.lib.figure import finish
from experiments.lib.flags import start
from experiments.lib.look import stacked_bars
from pictures.gantt import STAGE_LOOKS, draw_stages, legend_handles
from pictures.lanes import stage_lanes
from pipeline import BUBBLES, IDLE, PipelineTrace

NAME = "td_phases"
DRAWN = "L20 + 13B"  # the node of the windows
SYSTEMS = ("PP+SB", "PP+HB", "TD-Pipe")
WINDOW = 1.8  # s
BINS = 80  # of the utilisation over time
CAUSES = {"busy": ("#FFFFFF", "")} | {  # colour and hatch of the account; busy first
    cause: (STAGE_LOOKS[cause].colour, STAGE_LOOKS[cause].hatch) for cause in IDLE
}
Runs = dict[str, dict[str, td.Run]]  # by node and system


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


def points_of(runs: Runs) -> list[Point]:
    points = []
    for node, systems in runs.items():
        record = td.NODES[node].record(NAME)
        for system, run in systems.items():
            name = f"{system}, {node}"
            for cause, share in shares(run.trace).items():
                record.add(f"{name}, {cause}", share, "%")
            record.add(f"{name}, bubbles", 100 * run.trace.bubble_share, "%")
            record.add(f"{name}, throughput", run.throughput, "tokens/s")
            if run.trace.steps is not None:
                for x, y in utilisation(run.trace):
                    record.add(f"{name}, utilisation", y, "%", x, "s")
        points += record
    return points


def print_shares(runs: Runs, count: int) -> None:
    rows = []
    for node, systems in runs.items():
        for system, run in systems.items():
            numbers = [*shares(run.trace).values(), 100 * run.trace.bubble_share]
            cells = [f"{share:.1f}" for share in numbers]
            rows.append([node, system, *cells, f"{run.throughput:.0f}", run.recomputed])
    header = ["node", "system", *CAUSES, "bubbles", "output tokens/s", "preemptions"]
    print_table(header, rows, f"% of all stages' time, {count} requests, predicted")
    print(f"\nbubbles: {', '.join(BUBBLES)}")


def draw(runs: Runs, count: int) -> plt.Figure:
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


def draw_accounts(axes: plt.Axes, runs: Runs) -> None:
    """Stacked bars, from 50 % on: below that all is work."""
    bars = {}  # by place
    for number, (node, systems) in enumerate(runs.items()):
        first = number * (len(SYSTEMS) + 1)
        bars |= {first + offset: shares(systems[name].trace) for offset, name in enumerate(SYSTEMS)}
        axes.text(first + 1, 101, node, ha="center")
    parts = {cause: [bar[cause] for bar in bars.values()] for cause in CAUSES}
    seen = {cause: heights for cause, heights in parts.items() if max(heights) > 0.05}
    stacked_bars(axes, list(bars), seen, CAUSES, 0.85, linewidth=0.6)
    for place, bar in bars.items():
        axes.text(place, 53, f"{bar['busy']:.0f}", ha="center", fontsize=12)
    axes.set_xticks(list(bars), SYSTEMS * len(runs), rotation=60)
    axes.set(ylim=(50, 105), ylabel="stages' time (%), from 50 % on")
    axes.set_title("(e) the account of all four nodes", loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def main() -> None:
    options = start(NAME, __doc__)
    count, names = (700, [DRAWN]) if options.quick else (td.COUNT, list(td.NODES))
    lengths = td.azure(count)
    runs: Runs = {}
    for name in progress(names, "nodes"):
        node, keep = td.NODES[name], name == DRAWN
        runs[name] = {system: td.run(node, system, lengths, keep=keep) for system in SYSTEMS}
    print_shares(runs, count)
    finish(options, NAME, points_of(runs), lambda: draw(runs, count), td.SOFTWARE)


if __name__ == "__main__":
    run_main(main)
