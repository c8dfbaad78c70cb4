"""TD-Pipe, Fig 12: how full the KV memory is over time, and what an admission rule misses.

    python experiments/td_memory.py      predicted for Llama2-70B on four A100s; seconds, no GPU

Greedy prefill looks ahead: it stops admitting when the predicted lengths say that the memory would
overflow at some later decode step (pipeline/phases.py). Four ways to look ahead, same requests:

    all steps          our default: true output lengths; between two points of the paper, each
                       request counts with the most that it reaches there
    classes            the same with predicted lengths: the mean of the true class of five with
                       probability 0.55, between the paper's 0.52 and 0.58. Its classes are those
                       of the same requests; td_lengths.py keeps training and test apart
    paper's points     true lengths, and only the future steps 32, 64, ... 1024 (Algorithm 1)
    artefact's points  true lengths, the future steps 5, 8, ... 4096, and 0.9 of the memory

Where the memory runs out while decoding, the newest request is preempted and prefills again.

The last panel compares the peak at the points with the true one, over every single decode step. Its
requests are drawn at random: all fresh from their prefill, or all in the midst of their output. A
negative miss is an overestimate. In TD-Pipe a prompt must also fit beside what is in use now. So
the miss counts again with a peak of at least that.

The paper states no number for Fig 12. It says that the memory is full for short times only.
"""

import enter  # noqa: F401

import random
import statistics
from itertools import product

import matplotlib.pyplot as plt

from command.cli import run_main
from command.flags import Flag
from experiments.lib import td
from experiments.lib.common import Point, paper_numbers, print_table, progress
from experiments.lib.figure import finish
from experiments.lib.flags import start
from experiments.lib.look import COLOURS
from pipeline.phases import POINTS, LookAhead, Rules
from pipeline.predictors import Classes

NAME = "td_memory"
NODE = td.NODES["A100 + 70B"]
ACCURACY = 0.55
GROUPS = 100  # random sets of requests whose peak is compared
SIZE = 700  # requests of each: about as many as the memory holds
AHEAD = {  # points, and whether the steps between them count
    "all steps": ("paper", True),
    "paper's points": ("paper", False),
    "artefact's points": ("artefact", False),
}
FULL = (95, 99)  # %
EVERY = 10  # one in so many rows of the history is kept, that the file stays small
FRESH, MIDST = "fresh", "midst"
STATES = {FRESH: COLOURS["sky"], MIDST: COLOURS["vermilion"]}
MEANS = {"the points alone": "o", "and what is in use now": "D"}
History = list[tuple[float, float, str]]  # s, % of the memory in use, phase
Misses = dict[tuple[str, str, str], list[float]]  # look-ahead, state, means: of each group


def rules(lengths: td.Lengths) -> dict[str, Rules]:
    classes = Classes([output for _, output in lengths], ACCURACY)
    return {
        "all steps": Rules(),
        f"classes, accuracy {ACCURACY:g}": Rules(predict=classes),
        "paper's points": Rules(between=False),
        "artefact's points, 0.9": Rules(points="artefact", between=False, limit=0.9),
    }


def filling(run: td.Run) -> History:
    """At each batch."""
    room = NODE.cache_tokens
    return [(s, 100 * tokens / room, phase) for s, tokens, phase in run.trace.history]


def summary(run: td.Run) -> dict[str, tuple[float, str]]:
    history, end = filling(run), run.trace.end
    ends = [s for s, _, _ in history[1:]] + [end]
    found = {}
    for least in FULL:
        rows = zip(history, ends, strict=True)
        above = sum(until - s for (s, used, _), until in rows if used > least)
        found[f"time above {least} %"] = (100 * above / end, "%")
    return found | {
        "most in use": (max(used for _, used, _ in history), "%"),
        "phases": (run.phases, ""),
        "preemptions": (run.recomputed, ""),
        "throughput": (run.throughput, "tokens/s"),
    }


def misses(lengths: td.Lengths, groups: int, seed: int = 0) -> Misses:
    """% of the true peak that each look-ahead misses."""
    draw, found = random.Random(seed), {}
    every = range(1, max(output for _, output in lengths) + 1)
    for state, _ in product(STATES, range(groups)):
        kinds = {name: LookAhead(POINTS[points], b) for name, (points, b) in AHEAD.items()}
        true, now = LookAhead(every, between=False), 0
        for prompt, output in draw.choices(lengths, k=SIZE):
            done = 1 if state == FRESH else draw.randint(1, output)
            now += prompt + done - 1
            for each in (true, *kinds.values()):
                each.add(prompt + done - 1, output - done)
        peak = max(now, true.peak())
        for name, each in kinds.items():
            for means, seen in zip(MEANS, (each.peak(), max(now, each.peak())), strict=True):
                found.setdefault((name, state, means), []).append(100 * (1 - seen / peak))
    return found


def points_of(runs: dict[str, td.Run], missed: Misses) -> list[Point]:
    record = NODE.record(NAME)
    for name, run in runs.items():
        for what, (value, unit) in summary(run).items():
            record.add(f"{name}: {what}", value, unit)
        for s, used, phase in filling(run)[::EVERY]:
            record.add(f"{name}: in use, {phase}", used, "%", s, "s")
    for key, values in missed.items():
        for what, value in (("median", statistics.median(values)), ("largest", max(values))):
            record.add(f"miss of {', '.join(key)}: {what}", value, "%")
    return record


def draw(runs: dict[str, td.Run], missed: Misses, count: int) -> plt.Figure:
    figure = plt.figure(figsize=(19, 17), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[4, 1.3])
    panels = top.subplots(len(runs), 1, sharex=True, sharey=True)
    for letter, axes, (name, run) in zip("abcd", panels, runs.items(), strict=True):
        draw_history(axes, run)
        values = {what: value for what, (value, _) in summary(run).items()}
        axes.set_title(
            f"({letter}) {name}: above 95 % for {values['time above 95 %']:.0f} % of the time,"
            f" {values['phases']:.0f} phases, {values['preemptions']:.0f} preemptions,"
            f" {values['throughput']:.0f} tokens/s",
            loc="left",
        )
        axes.set(ylabel="in use (%)", ylim=(0, 112))
    panels[-1].set_xlabel("time (s)")
    panels[0].legend(loc="lower right", ncols=3, framealpha=1)
    draw_misses(bottom.subplots(), missed)
    figure.suptitle(
        f"TD-Pipe Fig 12: KV memory in use, {NODE.model} on {NODE.hardware}, {count} requests"
        " (predicted)",
        fontsize=20,
    )
    return figure


def draw_history(axes: plt.Axes, run: td.Run) -> None:
    """Bars from 0, as in the paper; one colour for each phase."""
    history = filling(run)
    times = [*(s for s, _, _ in history), run.trace.end]
    for phase, colour in td.PHASES.items():
        tops = [used if kind == phase else 0 for _, used, kind in history]
        axes.fill_between(times, [*tops, 0], step="post", color=colour, label=phase)
    axes.axhline(100, color="black", linewidth=1.5, label="capacity")


def draw_misses(axes: plt.Axes, missed: Misses) -> None:
    """A mark at the median, a line over all groups."""
    for (name, state, means), values in missed.items():
        row = list(AHEAD).index(name) + 0.15 * (1 if state == MIDST else -1)
        row += 0.07 * (list(MEANS).index(means) * 2 - 1)
        style = {"color": STATES[state], "marker": MEANS[means], "markeredgecolor": "black"}
        label = f"{state}: {means}" if name == "all steps" else None
        axes.plot([min(values), max(values)], [row, row], color=STATES[state], linewidth=4)
        style |= {"linestyle": "none", "markersize": 10, "label": label}
        axes.plot([statistics.median(values)], [row], **style)
    axes.axvline(0, color="black", linewidth=1.5)
    axes.set_yticks(range(len(AHEAD)), list(AHEAD))
    axes.invert_yaxis()
    axes.set_xlabel("part of the true peak that is missed (%): median and range")
    groups = len(next(iter(missed.values())))
    title = f"(e) peaks at the points beside true peaks: {groups} groups of {SIZE} requests each"
    axes.set_title(title, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def print_tables(runs: dict[str, td.Run], missed: Misses, groups: int) -> None:
    rows = {name: [f"{y:.4g}" for y, _ in summary(run).values()] for name, run in runs.items()}
    header = ["look-ahead", *summary(runs["all steps"])]
    print_table(header, [[name, *cells] for name, cells in rows.items()])
    rows = [
        [*key, *[f"{y:.2f}" for y in (statistics.median(values), max(values), min(values))]]
        for key, values in missed.items()
    ]
    title = f"% of the true peak that is missed, {groups} groups of {SIZE} requests each"
    header = ["look-ahead", "requests", "counted", "median", "most", "least"]
    print_table(header, sorted(rows), title)


def main() -> None:
    options = start(NAME, __doc__, seed=Flag("seed of the groups of requests", 0))
    numbers = paper_numbers()
    assert numbers["td_pred_acc_low"] < ACCURACY < numbers["td_pred_acc_high"]
    count, groups = (1200, 3) if options.quick else (td.COUNT, GROUPS)
    print(f"\n{count} requests; {NODE.cache_tokens} tokens fit\n")
    lengths = td.azure(count)
    kinds = progress(rules(lengths).items(), "runs")
    runs = {name: td.run(NODE, "TD-Pipe", lengths, rules=each) for name, each in kinds}
    missed = misses(lengths, groups, options.seed)
    print_tables(runs, missed, groups)
    points = points_of(runs, missed)
    finish(options, NAME, points, lambda: draw(runs, missed, count), td.SOFTWARE)


if __name__ == "__main__":
    run_main(main)
