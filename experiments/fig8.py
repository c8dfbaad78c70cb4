"""SARATHI, Fig 8: how much cheaper a decode becomes when it rides on a chunk, by batch size.

    python experiments/fig8.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig8.py --measure    and the real engine on this machine

The definition is that of Sec 5.1.1. Baseline: the time of a decode-only batch of B, divided by B.
SARATHI: the time of a decode-maximal batch (a chunk of C - (B-1) tokens and B - 1 decodes) less
that of its chunk alone, divided by B - 1. The weights are read for the chunk anyway; what is left
of a decode is its attention, and that is why the gain falls with B (the baseline shares the weights
among more decodes) and with L (more attention).
"""

from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Batch
from cli import run_main
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments.lib.common import Point, curves, series_options
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import SERIES, measured_title, plot_points
from experiments.lib.measuring import measured_on, time_batches
from experiments.lib.steady import BATCH_SIZES

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU, CHUNK_SIZE = "llama-13b", "a6000", 256
prediction = partial(Point, "fig8", source="predicted", model=MODEL, hardware=GPU)


def batches(length: int, batch_size: int, chunk_size: int) -> list[Batch]:
    """The three iterations: B decodes; a chunk with B - 1 decodes aboard; that chunk alone."""
    chunk = (0, chunk_size - (batch_size - 1), length)  # of a prompt of L tokens
    return [
        make_batch(decodes=batch_size, context=length),
        make_batch([chunk], decodes=batch_size - 1, context=length),
        make_batch([chunk]),
    ]


def speedup(seconds: list[float], batch_size: int) -> float:
    """Decode time per token of the baseline over SARATHI's marginal one.

    seconds: of the three `batches`.
    """
    decode_only, hybrid, chunk_only = seconds
    return (decode_only / batch_size) / ((hybrid - chunk_only) / (batch_size - 1))


def predicted_speedup(
    model: str, gpu: str, length: int, batch_size: int, chunk_size: int = CHUNK_SIZE
) -> float:
    cost = CostModel(MODELS[model], GPUS[gpu])
    return speedup(
        [cost.seconds(batch) for batch in batches(length, batch_size, chunk_size)], batch_size
    )


def predict(quick: bool) -> list[Point]:
    points = []
    for length, largest in BATCH_SIZES.items():
        for batch_size in (2, largest) if quick else range(2, largest + 1):
            y = predicted_speedup(MODEL, GPU, length, batch_size)
            points.append(prediction(f"L={length} C={CHUNK_SIZE}", batch_size, "B", y, "x"))
    # the two numbers that the paper's text gives
    ends = {"largest speedup": max, "smallest speedup": min}
    found = [point.y for point in points]
    return points + [prediction(name, 0, "", end(found), "x") for name, end in ends.items()]


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    chunk_size, points = scale.chunk_sizes[0], []
    for length in scale.lengths:
        shapes = [batches(length, batch_size, chunk_size) for batch_size in scale.batch_sizes]
        times = [
            result.seconds
            for result in time_batches(
                llm, [batch for shape in shapes for batch in shape], scale.repeats
            )
        ]
        for i, batch_size in enumerate(scale.batch_sizes):
            y = speedup(times[3 * i : 3 * i + 3], batch_size)
            points.append(
                Point(
                    "fig8", f"L={length} C={chunk_size}", batch_size, "B", y, "x", *measured_on(llm)
                )
            )
    return points


def draw_panel(axes: plt.Axes, found: dict[str, list[Point]], title: str) -> None:
    lines = {series: curve for series, curve in found.items() if curve[0].x_unit}
    for (series, curve), (colour, marker) in zip(lines.items(), SERIES, strict=False):
        options = series_options(series)
        plot_points(
            axes,
            curve,
            color=colour,
            marker=marker,
            label=f"L = {options['L']}, C = {options['C']}",
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(sorted({int(point.x) for curve in lines.values() for point in curve}))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size B", title=title)


def draw(points: list[Point]) -> plt.Figure:
    measured = curves(points, "measured")
    figure, panels = plt.subplots(
        1,
        2 if measured else 1,
        figsize=(15 if measured else 9, 6),
        layout="constrained",
        squeeze=False,
    )
    panels = panels[0]
    draw_panel(panels[0], curves(points, "predicted"), f"predicted: {MODEL} on {GPU}")
    panels[0].set_xticks(range(2, 19, 2))
    panels[0].set_ylabel("decode speedup")
    for number, (series, (point,)) in enumerate(curves(points, "paper").items()):
        panels[0].axhline(
            point.y,
            color="black",
            linestyle=("--", ":")[number % 2],
            label=f"paper: {series} {point.y:g}x",
        )
    panels[0].legend()
    if measured:
        draw_panel(panels[1], measured, measured_title(points))
        panels[1].legend()
    figure.suptitle("SARATHI Fig 8: speedup of a decode that rides on a chunk", fontsize=18)
    return figure


FIGURE = Figure(
    name="fig8",
    description=__doc__,
    paper={"f8_low": ("smallest speedup", 0), "f8_high": ("largest speedup", 0)},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(256, 512, 1024), batch_sizes=(2, 4, 6, 8), chunk_sizes=(256,), repeats=21),
    quick_scale=Scale(lengths=(64, 128), batch_sizes=(2, 4), chunk_sizes=(32,), repeats=3),
    shown=lambda point: (
        point.x_unit == "" or point.source == "measured" or point.x in (2, 4, 6, 9, 18)
    ),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
