"""SARATHI, Fig 3: what a token costs in prefill and in decode, by operator and batch size.

    python experiments/fig3.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig3.py --measure    and the real engine on this machine

A prefill fills the machine with a single prompt: its cost per token is flat. A decode-only batch
reads all weights for B tokens: its linear operators' cost per token falls as 1/B, while its
attention's, which reads each request's own keys and values, stays.
"""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Batch
from cli import run_main
from configs import GPUS, MODELS, OPERATORS
from costmodel import CostModel, make_batch
from experiments.lib.common import Point, curves, series_options, three_digits
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import COLOURS, measured_title, plot_points, star
from experiments.lib.measuring import measured_on, time_batches

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU, LENGTH = "llama-13b", "a6000", 1024
LOOK = dict(  # colour and hatch of each operator
    zip(
        OPERATORS,
        zip(
            [COLOURS[name] for name in ("sky", "vermilion", "purple", "blue", "green", "orange")],
            ("", "//", "..", "", "\\\\", "xx"),
            strict=True,
        ),
        strict=True,
    )
)


def batches(length: int, batch_size: int) -> dict[str, Batch]:
    """B whole prompts of L tokens, and B decodes that attend to L tokens."""
    return {
        "prefill": make_batch([(0, length, length)] * batch_size),
        "decode": make_batch(decodes=batch_size, context=length),
    }


def to_points(
    seconds: dict[tuple[str, int], dict[str, float]], length: int, *where: str
) -> list[Point]:
    """The points of these times, in ms per token.

    seconds: of each operator, by phase and batch size. where: source, model, hardware. Totals are
    of the five operators that the paper goes on with. 'others' stands apart: but for the logits,
    the cost model lacks it.
    """

    def point(series: str, batch_size: int, y: float, unit: str) -> Point:
        return Point("fig3", f"{series} L={length}", batch_size, "B", y, unit, *where)

    points, totals = [], {}
    for (phase, batch_size), operators in seconds.items():
        tokens = batch_size * (length if phase == "prefill" else 1)
        ms = {name: 1e3 * value / tokens for name, value in operators.items()}
        totals[phase, batch_size] = sum(ms.values()) - ms["others"]
        points += [point(f"{phase}, {n}", batch_size, y, "ms per token") for n, y in ms.items()]
        points.append(
            point(f"{phase}, total", batch_size, totals[phase, batch_size], "ms per token")
        )
        points.append(
            point(
                f"{phase}, share of others", batch_size, 100 * ms["others"] / sum(ms.values()), "%"
            )
        )
    for batch_size in dict.fromkeys(size for _, size in totals):
        ratio = totals["decode", batch_size] / totals["prefill", batch_size]
        points.append(point("decode over prefill", batch_size, ratio, "x"))
    return points


def predict(quick: bool) -> list[Point]:
    cost, seconds = CostModel(MODELS[MODEL], GPUS[GPU]), {}
    for batch_size in (1, 2, 18) if quick else (1, 2, 4, 8, 12, 18):
        for phase, batch in batches(LENGTH, batch_size).items():
            seconds[phase, batch_size] = cost.operators(batch)
    return to_points(seconds, LENGTH, "predicted", MODEL, GPU)


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    (length,) = scale.lengths
    shapes = {
        (phase, size): b for size in scale.batch_sizes for phase, b in batches(length, size).items()
    }
    results = time_batches(llm, list(shapes.values()), scale.repeats, operators=True)
    seconds = {key: result.operators for key, result in zip(shapes, results, strict=True)}
    return to_points(seconds, length, *measured_on(llm))


def draw_phase(axes: plt.Axes, found: dict[str, list[Point]], phase: str, title: str) -> None:
    """A bar per batch size, stacked by operator."""
    bottom = [0.0] * len(found[f"{phase}, total"])
    for name, (colour, hatch) in list(LOOK.items())[:-1]:  # without 'others'
        heights = [point.y for point in found[f"{phase}, {name}"]]
        style = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.8}
        axes.bar(range(len(bottom)), heights, 0.7, bottom, label=name, **style)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.bar_label(axes.containers[-1], [three_digits(y) for y in bottom], fontsize=12, padding=2)
    axes.set_xticks(range(len(bottom)), [f"{point.x:g}" for point in found[f"{phase}, total"]])
    axes.set_ylim(0, 1.15 * max(bottom))
    axes.set(xlabel="batch size B", ylabel="ms per token", title=f"{phase}\n{title}")
    axes.grid(axis="x", visible=False)


def draw_ratio(
    axes: plt.Axes, found: dict[str, list[Point]], paper: list[Point], title: str
) -> None:
    curve = found["decode over prefill"]
    plot_points(axes, curve, marker="o", color=COLOURS["blue"], label=curve[0].source)
    for number, point in enumerate(paper):
        star(axes, point.x, point.y, label="paper" if number == 0 else None)
    axes.set_yscale("log")
    low, high = 0.7 * min(point.y for point in curve), 1.4 * max(point.y for point in curve)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low < tick < high]
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set_ylim(low, high)
    axes.set_yticks([], minor=True)
    axes.set_xticks([point.x for point in curve], [f"{point.x:g}" for point in curve])
    axes.set(xlabel="batch size B", title=f"a decode over a prefill token\n{title}")
    axes.legend()


def draw(points: list[Point]) -> plt.Figure:
    rows = ["predicted", "measured"] if curves(points, "measured") else ["predicted"]
    figure, grid = plt.subplots(
        len(rows), 3, figsize=(18, 6.2 * len(rows)), layout="constrained", squeeze=False
    )
    for panels, source in zip(grid, rows, strict=True):
        found = {series.split(" L=")[0]: curve for series, curve in curves(points, source).items()}
        length = series_options(next(iter(found.values()))[0].series)["L"]
        title = (
            f"{measured_title(points) if source == 'measured' else f'predicted: {MODEL} on {GPU}'},"
            f" L = {length}"
        )
        draw_phase(panels[0], found, "prefill", title)
        draw_phase(panels[1], found, "decode", title)
        panels[1].legend(reverse=True)
        paper = curves(points, "paper")[f"decode over prefill L={LENGTH}"]
        draw_ratio(panels[2], found, paper if source == "predicted" else [], title)
    figure.suptitle("SARATHI Fig 3: cost of a token by operator", fontsize=18)
    return figure


FIGURE = Figure(
    name="fig3",
    description=__doc__,
    paper={f"f3_b{size}": (f"decode over prefill L={LENGTH}", size) for size in (1, 2, 18)},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(1, 2, 4, 8), repeats=9),
    quick_scale=Scale(lengths=(64,), batch_sizes=(1, 2), repeats=2),
    shown=lambda point: (
        any(word in point.series for word in ("total", "decode over prefill"))
        or (point.source == "measured" and "share" in point.series)
    ),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
