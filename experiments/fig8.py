"""SARATHI, Fig 8: how much cheaper a decode becomes when it rides on a chunk, by batch size.

    python experiments/fig8.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig8.py --measure    and the real engine on this machine

The definition is that of Sec 5.1.1. Baseline: the time of a decode-only batch of B, divided by B.
SARATHI: the time of a decode-maximal batch (a chunk of C - (B-1) tokens and B - 1 decodes) less
that of its chunk alone, divided by B - 1. The weights are read for the chunk anyway; what is left
of a decode is its attention, and that is why the gain falls with B (the baseline shares the weights
among more decodes) and with L (more attention).
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from batch import Batch
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments.lib import measuring
from experiments.lib.common import Point, Record, curves, series_options
from experiments.lib.figure import Figure, Scale
from experiments.lib.look import panels, plot_curves, source_title, sources
from experiments.lib.steady import BATCH_SIZES

MODEL, GPU, CHUNK_SIZE = "llama-13b", "a6000", 256


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
    record = Record("fig8", MODEL, GPU)
    for length, largest in BATCH_SIZES.items():
        for batch_size in (2, largest) if quick else range(2, largest + 1):
            gain = predicted_speedup(MODEL, GPU, length, batch_size)
            record.add(f"L={length} C={CHUNK_SIZE}", gain, "x", batch_size, "B")
    # the two numbers that the paper's text gives
    gains = [point.y for point in record]
    record.add("largest speedup", max(gains), "x")
    record.add("smallest speedup", min(gains), "x")
    return record


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    record, (chunk_size,) = Record("fig8", *measuring.measured_on(llm)), scale.chunk_sizes
    for length in scale.lengths:
        shapes = [batches(length, batch_size, chunk_size) for batch_size in scale.batch_sizes]
        every = [batch for shape in shapes for batch in shape]
        times = [result.seconds for result in measuring.time_batches(llm, every, scale.repeats)]
        for i, batch_size in enumerate(scale.batch_sizes):
            gain = speedup(times[3 * i : 3 * i + 3], batch_size)
            record.add(f"L={length} C={chunk_size}", gain, "x", batch_size, "B")
    return record


def draw_panel(axes: plt.Axes, found: dict[str, list[Point]], title: str) -> None:
    lines = {series: curve for series, curve in found.items() if curve[0].x_unit}
    plot_curves(axes, {"L = {L}, C = {C}".format(**series_options(s)): lines[s] for s in lines})
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(sorted({int(point.x) for curve in lines.values() for point in curve}))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size B", title=title)


def draw(points: list[Point]) -> plt.Figure:
    rows = sources(points)
    figure, [grid] = panels(1, len(rows), 9 if len(rows) == 1 else 7.5, 6)
    for axes, source in zip(grid, rows, strict=True):
        draw_panel(axes, curves(points, source), source_title(points, source, f"{MODEL} on {GPU}"))
    grid[0].set_xticks(range(2, 19, 2))
    grid[0].set_ylabel("decode speedup")
    for line, (series, (point,)) in zip(("--", ":"), curves(points, "paper").items(), strict=True):
        label = f"paper: {series} {point.y:g}x"
        grid[0].axhline(point.y, color="black", linestyle=line, label=label)
    for axes in grid:
        axes.legend()
    figure.suptitle("SARATHI Fig 8: speedup of a decode that rides on a chunk")
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

main = FIGURE.main

if __name__ == "__main__":
    main()
