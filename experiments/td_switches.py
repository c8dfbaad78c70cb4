"""TD-Pipe, Fig 13 and 16: when to switch phases, by rule or by a fixed threshold.

    python experiments/td_switches.py      predicted for the paper's four nodes; most of a minute

Fig 13: a prefill phase ends when a fixed share of the KV memory is taken, instead of looking ahead
(greedy prefill). Fig 16: a decode phase ends when a fixed share of the requests that began it has
finished, instead of comparing spatial and temporal intensity. The other rule stays. Lines: both of
TD-Pipe's rules, with the true output lengths. The paper says that its rules beat every threshold,
and states no number.

The rule compares a decode batch with one at its peak. The artefact takes 256 requests for that
(dotted). Where the memory holds fewer for each of the four micro-batches, no decode batch ever
comes near the peak, and the pipeline switches again as soon as anybody fits. So our default peak is
the batch with which the decode phase began.
"""

import math
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt

from cli import run_main
from experiments.lib import td
from experiments.lib.common import (
    Point,
    curves,
    make_directory,
    make_parser,
    print_table,
    progress,
    write_csv,
)
from experiments.lib.look import COLOURS, plot_points, save_figure, use_style
from pipeline.phases import Rules

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


def seen(run: td.Run) -> dict[str, float]:
    """WHAT of a run; bubbles of phase switches in % of the stages' time."""
    trace = run.trace
    share = 100 * trace.idle["phase switch"] / (trace.stages * trace.seconds)
    return dict(zip(WHAT, (run.throughput, run.phases, share, run.recomputed), strict=True))


def settings(quick: bool) -> list[tuple[str, float, str, Rules]]:
    """(series, x, unit of x, rules) of each run."""
    found = [(RULE, 0, "", Rules()), (ARTEFACT, 0, "", Rules(peak_rows=PEAK))]
    for option, (values, name, _) in THRESHOLDS.items():
        for value in values[1::2] if quick else values:
            found.append((f"fixed {name}", 100 * value, "%", Rules(**{option: value})))
    return found


def predict(quick: bool, count: int) -> list[Point]:
    lengths, points = td.azure(count), []
    names = ["L20 + 13B"] if quick else list(td.NODES)
    jobs = [(td.NODES[name], *each) for name in names for each in settings(quick)]
    for node, series, x, unit, rules in progress(jobs, "runs"):
        run = td.run(node, "TD-Pipe", lengths, rules=rules)
        point = partial(
            Point, "td_switches", source="predicted", model=node.model, hardware=node.hardware
        )
        for what, value in seen(run).items():
            points.append(point(f"{node.name}, {series}: {what}", x, unit, value, WHAT[what]))
    return points


def of_run(points: list[Point], node: str, series: str, what: str) -> list[Point]:
    """The values of one series, in order of the threshold."""
    return curves(points, "predicted")[f"{node}, {series}: {what}"]


def nodes(points: list[Point]) -> list[str]:
    return [name for name in td.NODES if any(p.series.startswith(f"{name},") for p in points)]


def print_tables(points: list[Point]) -> None:
    """The best threshold of each kind beside the rule; and what the artefact's peak does."""
    best, peaks = [], []
    for node in nodes(points):
        (rule,) = of_run(points, node, RULE, "throughput")
        for _, name, _ in THRESHOLDS.values():
            tops = of_run(points, node, f"fixed {name}", "throughput")
            top = max(tops, key=lambda point: point.y)
            again = of_run(points, node, f"fixed {name}", "preemptions")[tops.index(top)].y
            ratio = f"{100 * (rule.y / top.y - 1):+.1f} %"
            row = [node, name, f"{top.x:g} %", f"{top.y:.0f}", f"{again:.0f}", f"{rule.y:.0f}"]
            best.append([*row, ratio])
        room = math.floor(tokens_each(node))
        for series in (RULE, ARTEFACT):
            cells = [of_run(points, node, series, what)[0].y for what in WHAT]
            peaks.append([node, room, series, *[f"{y:.4g}" for y in cells]])
    print("\nthe rule, beside the best fixed threshold; throughput in output tokens/s\n")
    header = ["node", "threshold", "best", "throughput", "preemptions", "rule", "rule over best"]
    print_table(header, best)
    print("\nthe peak of spatial intensity: of the phase's first batch, or a fixed one\n")
    header = ["node", "fit a micro-batch", "rule", "tokens/s", "phases", "switch bubbles, %"]
    print_table([*header, "preemptions"], peaks)


def tokens_each(node: str) -> float:
    """Requests of mean length that the memory holds for each micro-batch."""
    lengths = td.azure()
    mean = sum(prompt + output for prompt, output in lengths) / len(lengths)
    return td.NODES[node].cache_tokens / mean / td.NODES[node].gpus


def draw(points: list[Point]) -> plt.Figure:
    """Throughput over the threshold, in % of that with both rules."""
    names = nodes(points)
    figure, grid = plt.subplots(
        2, len(names), figsize=(5.3 * len(names) + 1, 11), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    for row, (_, name, label) in zip(grid, THRESHOLDS.values(), strict=True):
        for axes, node in zip(row, names, strict=True):
            (rule,) = of_run(points, node, RULE, "throughput")
            (fixed,) = of_run(points, node, ARTEFACT, "throughput")
            curve = of_run(points, node, f"fixed {name}", "throughput")
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
    options = make_parser(__doc__).parse_args()
    make_directory(options.out, "td_switches", force=options.force)
    count = 1000 if options.quick else COUNT
    points = predict(options.quick, count)
    print(f"{__doc__.splitlines()[0]}\n\n{count} requests, predicted")
    print_tables(points)
    write_csv(options.out / "td_switches.csv", points, td.SOFTWARE)
    use_style()
    save_figure(draw(points), options.out / "td_switches.png")
    print(f"\nwrote {options.out / 'td_switches'}.png and .csv")


if __name__ == "__main__":
    run_main(main)
