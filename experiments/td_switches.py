"""TD-Pipe, Fig 13 and 16: when to switch phases, by rule or by a fixed threshold.

    python experiments/td_switches.py      predicted for the paper's four nodes; most of a minute

Fig 13: a prefill phase ends when a fixed share of the KV memory is taken, instead of looking ahead
(greedy prefill). Fig 16: a decode phase ends when a fixed share of the requests that began it has
finished, instead of comparing spatial and temporal intensity. The other rule stays. Lines: both of
TD-Pipe's rules, with the true output lengths. The paper says that its rules beat every threshold,
and states no number.

The rule compares a decode batch with one at its peak. The artefact takes 256 requests for that
(dotted). Where the memory holds fewer for each of the four micro-batches, no decode batch ever
comes near the peak. The pipeline then switches again as soon as any request fits. So our default
peak is the batch with which the decode phase began.
"""

import enter  # noqa: F401

import math
from dataclasses import replace

import matplotlib.pyplot as plt

from command.cli import run_main
from experiments.lib import td
from experiments.lib.common import Point, curves, print_table, progress
from experiments.lib.figure import finish
from experiments.lib.flags import start
from experiments.lib.look import COLOURS, panels, plot_points
from pipeline.phases import Rules

NAME = "td_switches"
COUNT = 1500  # requests
OCCUPIED = (0.3, 0.6, 0.8, 0.9, 1.0)
FINISHED = (0.05, 0.1, 0.3, 0.5, 0.9)
PEAK = 256  # requests of a decode batch (the artefact)
THRESHOLDS = {  # option of `Rules`, its values, what they are, x label
    "occupied": (OCCUPIED, "occupancy", "prefill until full to (% of the memory)"),
    "finished": (FINISHED, "finish ratio", "decode until finished (% of the phase)"),
}
RULE, ARTEFACT = "rule", f"rule, peak of {PEAK}"
WHAT = {"throughput": "tokens/s", "phases": "", "phase switch": "%", "preemptions": ""}


def settings(quick: bool) -> list[tuple[str, float, str, Rules]]:
    """(series, x, unit of x, rules) of each run."""
    found = [(RULE, 0, "", Rules()), (ARTEFACT, 0, "", Rules(peak_rows=PEAK))]
    for option, (values, name, _) in THRESHOLDS.items():
        for value in values[1::2] if quick else values:
            found.append((f"fixed {name}", 100 * value, "%", Rules(**{option: value})))
    return found


def predict(quick: bool, count: int) -> list[Point]:
    """WHAT of each run; bubbles of phase switches in % of the stages' time."""
    lengths, points = td.azure(count), []
    names = ["L20 + 13B"] if quick else list(td.NODES)
    jobs = [(td.NODES[name], *each) for name in names for each in settings(quick)]
    for node, series, x, x_unit, rules in progress(jobs, "runs"):
        run, record = td.run(node, "TD-Pipe", lengths, rules=rules), node.record(NAME)
        share = 100 * run.trace.idle["phase switch"] / (run.trace.stages * run.trace.seconds)
        numbers = (run.throughput, run.phases, share, run.recomputed)
        for (what, unit), y in zip(WHAT.items(), numbers, strict=True):
            record.add(f"{node.name}, {series}: {what}", y, unit, x, x_unit)
        points += record
    return points


def nodes(points: list[Point]) -> list[str]:
    return [name for name in td.NODES if any(p.series.startswith(f"{name},") for p in points)]


def print_tables(points: list[Point]) -> None:
    """The best threshold of each kind beside the rule; and what the artefact's peak does."""
    found, best, peaks = curves(points, "predicted"), [], []
    for node in nodes(points):
        (rule,) = found[f"{node}, {RULE}: throughput"]
        for _, name, _ in THRESHOLDS.values():
            tops = found[f"{node}, fixed {name}: throughput"]
            top = max(tops, key=lambda point: point.y)
            again = found[f"{node}, fixed {name}: preemptions"][tops.index(top)].y
            row = [node, name, f"{top.x:g} %", f"{top.y:.0f}", f"{again:.0f}", f"{rule.y:.0f}"]
            best.append([*row, f"{100 * (rule.y / top.y - 1):+.1f} %"])
        for series in (RULE, ARTEFACT):
            cells = [found[f"{node}, {series}: {what}"][0].y for what in WHAT]
            room = math.floor(requests_that_fit(node))
            peaks.append([node, room, series, *[f"{y:.4g}" for y in cells]])
    title = "the rule, beside the best fixed threshold; throughput in output tokens/s"
    header = ["node", "threshold", "best", "throughput", "preemptions", "rule", "rule over best"]
    print_table(header, best, title)
    title = "the peak of spatial intensity: of the phase's first batch, or a fixed one"
    header = ["node", "fit a micro-batch", "rule", "tokens/s", "phases", "switch bubbles, %"]
    print_table([*header, "preemptions"], peaks, title)


def requests_that_fit(node: str) -> float:
    """Requests of mean length that the memory holds for each micro-batch."""
    lengths = td.azure()
    mean = sum(prompt + output for prompt, output in lengths) / len(lengths)
    return td.NODES[node].cache_tokens / mean / td.NODES[node].gpus


def draw(points: list[Point]) -> plt.Figure:
    """Throughput over the threshold, in % of that with both rules."""
    found, names = curves(points, "predicted"), nodes(points)
    figure, grid = panels(2, len(names), 5.3 + 1 / len(names), 5.5, sharey=True)
    for row, (_, name, label) in zip(grid, THRESHOLDS.values(), strict=True):
        for axes, node in zip(row, names, strict=True):
            (rule,), (fixed,), curve = (
                found[f"{node}, {series}: throughput"]
                for series in (RULE, ARTEFACT, f"fixed {name}")
            )
            relative = [replace(point, y=100 * point.y / rule.y) for point in curve]
            axes.axhline(100, color=td.LOOKS["TD-Pipe"], linestyle="--", label="TD-Pipe's rules")
            style = {"color": COLOURS["black"], "linestyle": ":"}
            axes.axhline(100 * fixed.y / rule.y, **style, label=f"with a peak of {PEAK}")
            style = {"color": COLOURS["vermilion"], "marker": "o"}
            plot_points(axes, relative, **style, label=f"fixed {name}")
            axes.set(xlabel=label, xlim=(0, 105), title=f"{node}: rules {rule.y:.0f} tokens/s")
        row[0].set_ylabel("output tokens/s (rules = 100 %)")
        row[0].legend(loc="lower right" if name == "occupancy" else "lower left")
    figure.suptitle(
        "TD-Pipe Fig 13 (above) and 16 (below): fixed thresholds against the rules (predicted)",
        fontsize=20,
    )
    return figure


def main() -> None:
    options = start(NAME, __doc__)
    count = 1000 if options.quick else COUNT
    print(f"\n{count} requests, predicted")
    points = predict(options.quick, count)
    print_tables(points)
    finish(options, NAME, points, lambda: draw(points), td.SOFTWARE)


if __name__ == "__main__":
    run_main(main)
