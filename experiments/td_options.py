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

import enter  # noqa: F401

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

import matplotlib.pyplot as plt

from command.cli import run_main
from command.flags import Flag
from experiments.lib import td
from experiments.lib.common import Point, paper_points, print_table, run_jobs, values_at
from experiments.lib.figure import finish
from experiments.lib.flags import start
from experiments.lib.look import log_ticks, panels
from experiments.lib.td import BASELINES, NODES, OURS, SYSTEMS
from pipeline.phases import Rules
from pipeline.predictors import Classes
from serving.capacity import percentile

NAME = "td_options"
COUNT, QUICK = 1000, 12  # requests
GPUS = 4
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

    changes: options of `td.run`. rules: TD-Pipe's, from the lengths. lengths: of the requests.
    """

    systems: Sequence[str]
    changes: Mapping[str, object] = field(default_factory=dict)
    rules: Callable[[td.Lengths], Rules] | None = None
    lengths: Callable[[int, int], td.Lengths] = td.azure


NONE = "no option"
PAPER = {
    number: (f"{NONE}: {OURS} over {each}, largest", 0) for each, number in td.PUBLISHED.items()
}
HYBRID, SEPARATE, PIPELINES = ("TP+HB", "PP+HB"), ("TP+SB", "PP+SB"), ("PP+SB", "PP+HB")
OPTIONS = {
    NONE: Option(()),
    **{f"host {ms} ms": Option(BASELINES, {"overhead": ms / 1000}) for ms in (5, 10, 20)},
    "20 ms overlapped": Option(BASELINES, {"overhead": 0.02, "overlapped": True}),
    **{f"budget {size}": Option(HYBRID, {"budget": size}) for size in (256, 2048)},
    "batches of 64": Option(BASELINES, {"batch_size": 64}),
    # as many requests as four micro-batches hold
    "batches of 1024": Option(("TP+SB", "TP+HB"), {"batch_size": GPUS * td.BATCH_SIZE}),
    "no cap": Option(SEPARATE, {"policy": "vllm_v0"}),
    "one queue": Option(PIPELINES, {"deal": "queue"}),
    "one queue, pool": Option(PIPELINES, {"deal": "queue", "memory": "pool"}),
    "chat lengths": Option(SYSTEMS, lengths=td.chat),
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
def lengths_of(
    make: Callable[[int, int], td.Lengths], count: int, outputs: int, seed: int = 0
) -> td.Lengths:
    """`outputs`: the mean to which all outputs are stretched or shrunk; 0: as they are."""
    lengths = make(count, seed)
    if not outputs:
        return lengths
    factor = outputs * len(lengths) / sum(output for _, output in lengths)
    return [(prompt, max(1, round(factor * output))) for prompt, output in lengths]


def perform(job: Job, seed: int = 0) -> dict[str, float]:
    """Output tokens/s; of COMPARED systems without an option also LATENCIES (s) and phases."""
    option = OPTIONS[job.option]
    lengths = lengths_of(option.lengths, job.count, job.outputs, seed)
    changes = dict(option.changes)
    if option.rules:
        changes["rules"] = option.rules(lengths)
    if job.option != NONE or job.system not in COMPARED:
        return {TOKENS: td.run(NODES[job.node], job.system, lengths, **changes).throughput}
    done = td.run(NODES[job.node], job.system, lengths, keep=True)
    latencies = {
        name: percentile(getattr(done.trace.requests, times), percent)
        for name, (times, percent) in LATENCIES.items()
    }
    return {TOKENS: done.throughput, PHASES: done.phases, **latencies}


def job_of(system: str, node: str, count: int, option: str) -> Job:
    """The plain run where the option does not change the system."""
    return Job(system, node, count, option if system in OPTIONS[option].systems else NONE)


def jobs_of(count: int, options: Iterable[str], outputs: Iterable[int]) -> list[Job]:
    jobs = [
        job_of(system, node, count, option)
        for system, node, option in product(SYSTEMS, NODES, options)
    ]
    jobs += [
        Job(system, node, count, NONE, mean)
        for system, node, mean in product(COMPARED, NODES, outputs)
    ]
    return list(dict.fromkeys(jobs))


def predict(quick: bool, count: int, seed: int = 0) -> list[Point]:
    options, outputs = list(OPTIONS), OUTPUTS
    if quick:
        options, outputs = options[::7], outputs[1:3]
    jobs, processes = jobs_of(count, options, outputs), 1 if quick else td.PROCESSES
    found = run_jobs(partial(perform, seed=seed), jobs, processes)
    rows = td.Rows(NAME)
    for baseline, option in product(BASELINES, options):
        series, leads = f"{option}: {OURS} over {baseline}", []
        for name, node in NODES.items():
            ours, theirs = (
                found[job_of(system, name, count, option)] for system in (OURS, baseline)
            )
            leads.append(ours[TOKENS] / theirs[TOKENS])
            rows.add(series, leads[-1], "x", node)
        rows.add(series, max(leads), "x", None)
    for name, node in NODES.items():
        for mean in outputs:
            theirs, ours = (found[Job(system, name, count, NONE, mean)] for system in COMPARED)
            lead = ours[TOKENS] / theirs[TOKENS]
            rows.add(f"{OURS} over PP+HB", lead, "x", node, mean, "mean output tokens")
        plain = {system: found[Job(system, name, count)] for system in COMPARED}
        for system, what in product(COMPARED, LATENCIES):
            rows.add(f"{what} of {system}", plain[system][what], "s", node)
        rows.add(f"{PHASES} of {OURS}", plain[OURS][PHASES], PHASES, node)
    return rows


def options_in(found: td.Values) -> list[str]:
    """The OPTIONS that were run."""
    return [each for each in OPTIONS if (f"{each}: {OURS} over PP+HB, largest", 0) in found]


def untouched(option: str, baseline: str) -> bool:
    """Whether an option changes neither TD-Pipe nor the baseline."""
    return option != NONE and not {baseline, OURS} & set(OPTIONS[option].systems)


# ---------------------------------------------------------------------------------------- tables


def print_options(found: td.Values) -> None:
    """All ratios under each option, and which options bring the published ones."""
    options, rows = options_in(found), []
    for option in options:
        row = [option]
        for baseline in BASELINES:
            series = f"{option}: {OURS} over {baseline}"
            leads = [f"{found[f'{series}, {node}', 0]:.2f}" for node in NODES]
            row.append("-" if untouched(option, baseline) else " ".join(leads))
        rows.append(row)
    rows.append(["paper, largest", *[f"{y:.2f}" for y in td.LARGEST.values()]])
    title = f"{OURS} over each baseline with one thing changed: {', '.join(NODES)}"
    print_table(["", *BASELINES], rows, title)
    print()
    for baseline, y in td.LARGEST.items():
        series = f"{OURS} over {baseline}, largest"
        enough = [option for option in options if found[f"{option}: {series}", 0] >= y]
        print(f"At least {y:g} over {baseline}, somewhere: {', '.join(enough) or 'no option'}.")
    print("The authors' baselines may have had some of these options: we do not know.")


def print_outputs(found: td.Values) -> None:
    means = sorted({x for _, x in found if x})
    rows = [
        [node, *[f"{found[f'{OURS} over PP+HB, {node}', mean]:.2f}" for mean in means]]
        for node in NODES
    ]
    print_table(["", *means], rows, f"{OURS} over PP+HB by mean output tokens")


def print_latencies(found: td.Values) -> None:
    rows = [
        [node, system, *[f"{found[f'{each} of {system}, {node}', 0]:.3g} s" for each in LATENCIES]]
        for node, system in product(NODES, COMPARED)
    ]
    title = "Time to first token and between tokens; all requests are there at the start"
    print_table(["", "", *LATENCIES], rows, title)
    counts = ", ".join(f"{found[f'{PHASES} of {OURS}, {node}', 0]}" for node in NODES)
    print(f"\n{OURS}'s phases: {counts}. Two of them: all requests fit the memory at once.")


# --------------------------------------------------------------------------------------- picture


def draw(found: td.Values, count: int) -> plt.Figure:
    figure, grid = panels(2, 3, 22 / 3, 7.5)
    for axes, baseline in zip((*grid[0][:2], *grid[1][:2]), BASELINES, strict=True):
        draw_options(axes, baseline, found)
    for _, axes, _ in grid:
        axes.tick_params(labelleft=False)
    draw_outputs(grid[0][2], found)
    draw_gaps(grid[1][2], found)
    legend = grid[0][0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncol=len(legend[0]), fontsize=15)
    figure.suptitle(
        f"Left: TD-Pipe's lead with one thing changed (grey: it changes neither). Predicted, {GPUS}"
        f" GPUs, {count} requests",
        fontsize=20,
    )
    return figure


def draw_options(axes: plt.Axes, baseline: str, found: td.Values) -> None:
    """The four ratios under each option."""
    options, published = options_in(found), td.LARGEST[baseline]
    places = range(len(options))
    for node, (colour, marker) in td.MARKS.items():
        leads = [found[f"{option}: {OURS} over {baseline}, {node}", 0] for option in options]
        style = {"linestyle": "none", "markersize": 10, "label": node}
        axes.plot(leads, places, marker, color=colour, **style)
    for place, option in zip(places, options, strict=True):
        if untouched(option, baseline):
            axes.axhspan(place - 0.5, place + 0.5, color="#EEEEEE", zorder=0)
    axes.axvline(published, color="black", linestyle="--", label="the paper's largest")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, options)
    axes.invert_yaxis()
    axes.set(xlabel=f"{OURS} / {baseline}", xlim=(0.6, 2.85))
    axes.set_title(f"TD-Pipe over {baseline} (paper, largest: {published:g})")


def draw_outputs(axes: plt.Axes, found: td.Values) -> None:
    means = sorted({x for _, x in found if x})
    for node, (colour, marker) in td.MARKS.items():
        leads = [found[f"{OURS} over PP+HB, {node}", mean] for mean in means]
        axes.plot(means, leads, color=colour, marker=marker, markersize=10)
    log_ticks(axes, means)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="mean output tokens (prompts as they are)", ylabel=f"{OURS} / PP+HB")
    axes.set_title("TD-Pipe over PP+HB, by length of the outputs")


def draw_gaps(axes: plt.Axes, found: td.Values) -> None:
    """Median and 99th percentile of the time between tokens."""
    for number, system in enumerate(COMPARED):
        places = [place + 0.24 * (number - 0.5) for place in range(len(NODES))]
        for what, marker, fill in (("median", "o", "full"), ("P99", "^", "none")):
            heights = [1000 * found[f"{what} TBT of {system}, {node}", 0] for node in NODES]
            style = {"linestyle": "none", "markersize": 12, "fillstyle": fill}
            style |= {"color": td.LOOKS[system], "label": f"{system}, {what}"}
            axes.plot(places, heights, marker, **style)
    td.name_nodes(axes)
    axes.set(yscale="log", ylabel="ms (logarithmic)", title="time between tokens")
    axes.set_ylim(top=8 * axes.dataLim.ymax)
    axes.legend(loc="upper left", ncol=2)


def main() -> None:
    requests = Flag("requests of each run", COUNT, QUICK)
    options = start(NAME, __doc__, requests=requests, seed=Flag("seed of chat lengths", 0))
    count = options.requests
    print(f"{count} requests")
    points = predict(options.quick, count, options.seed)
    found = values_at(points)
    print_options(found)
    print_outputs(found)
    print_latencies(found)
    points += paper_points(PAPER, points)
    finish(options, NAME, points, lambda: draw(found, count), td.SOFTWARE)


if __name__ == "__main__":
    run_main(main)
