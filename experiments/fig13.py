"""SARATHI, Fig 13: what chunking costs, and what the decodes that ride along give back.

The panels are (a) attention alone, (b) the whole prefill, and (c) end to end.

    python experiments/fig13.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig13.py --measure    and the real engine on this machine: minutes

(a) and (b): the prefill of one prompt of L tokens, in chunks of C over whole. (c): throughput over
the baseline's in a steady state (see fig9.py), at the P:D where the chunks carry all decodes
(`balance` in lib/steady.py). C = 320 is no multiple of the tile, and shows it.

In (a) the cost model falls below 1, where the paper stays above: it takes a whole prompt's masked
half for work, as its fit wants, and a chunk has less of it. Attention is so small a part of the
prefill that (b) hardly feels it.
"""

from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from experiments.lib.common import SPREAD, Point, curves, progress, series_options
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import SERIES, measured_title, plot_points, shade_spread, star
from experiments.lib.measuring import (
    Run,
    gain_points,
    generate,
    measured_gains,
    measured_on,
    median_ratio,
    warm_up,
)
from experiments.lib.steady import (
    BATCH_SIZES,
    Workload,
    balance,
    predicted_gain,
    simulate_operators,
)
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU = "llama-13b", "a6000"
CHUNK_SIZES = (64, 128, 256, 320, 512)
PARTS = {
    "attention": "attention time, chunked / whole",
    "prefill": "prefill time, chunked / whole",
    "end to end": "throughput / baseline's",
}
prediction = partial(Point, "fig13", source="predicted", model=MODEL, hardware=GPU)


def attention_and_all(trace: Trace) -> dict[str, float]:
    """Seconds of the attention and of everything in a run with operator times."""
    return {
        "attention": sum(iteration.operators["attn"] for iteration in trace.iterations),
        "prefill": sum(sum(iteration.operators.values()) for iteration in trace.iterations),
    }


def predicted_prefill(length: int, policy: str, chunk_size: int) -> dict[str, float]:
    return attention_and_all(
        simulate_operators([Request(0, range(length), 1)], policy, chunk_size, 1, MODEL, GPU)
    )


def predict(quick: bool) -> list[Point]:
    points = []

    def add(series: str, chunk_size: int, y: float, unit: str = "x") -> None:
        points.append(prediction(series, chunk_size, "C", y, unit))

    for length, batch_size in progress(list(BATCH_SIZES.items()), "predicting"):
        whole = predicted_prefill(length, "orca", 1)
        for chunk_size in CHUNK_SIZES:
            chunked = predicted_prefill(length, "sarathi", chunk_size)
            for part in whole:
                add(f"{part} L={length}", chunk_size, chunked[part] / whole[part])
            work = Workload(length, batch_size, balance(chunk_size, batch_size))
            add(
                f"end to end L={length} B={batch_size}",
                chunk_size,
                predicted_gain(work, "sarathi", chunk_size, MODEL, GPU),
            )
    # the paper's text names no length: the largest of the three, as its bounds and "up to" mean
    for part in PARTS:
        for chunk_size in CHUNK_SIZES:
            add(
                f"{part}, largest",
                chunk_size,
                max(p.y for p in points if p.series.startswith(f"{part} L=") and p.x == chunk_size),
            )
    for chunk_size in (256, 512):
        largest = next(p.y for p in points if (p.series, p.x) == ("prefill, largest", chunk_size))
        add("prefill overhead, largest", chunk_size, 100 * (largest - 1), "%")
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """The whole prompt and each chunk size in alternation; the medians of `repeats` turns."""
    (length,), (batch_size,) = scale.lengths, scale.batch_sizes

    def point(series: str, x: float, y: float) -> Point:
        return Point("fig13", series, x, "C", y, "x", *measured_on(llm))

    plan = [("orca", 1)] + [("sarathi", chunk_size) for chunk_size in scale.chunk_sizes]
    seen: dict[tuple, list[dict[str, float]]] = {}
    warm_up(llm)
    for policy, chunk_size in progress(plan * scale.repeats, "measuring prefills"):
        generate(llm, [Request(0, range(length), 1)], policy, chunk_size, operators=True)
        seen.setdefault((policy, chunk_size), []).append(attention_and_all(llm.trace))
    points = []
    for policy, chunk_size in plan[1:]:
        for part in ("attention", "prefill"):
            pairs = [
                (a[part], b[part])
                for a, b in zip(seen[policy, chunk_size], seen["orca", 1], strict=True)
            ]
            points += gain_points(point, f"{part} L={length}", chunk_size, median_ratio(pairs))
    runs = {
        size: Run(Workload(length, batch_size, balance(size, batch_size)), "sarathi", size)
        for size in scale.chunk_sizes
    }
    gains = measured_gains(llm, list(runs.values()), -(-scale.repeats // 3))
    return points + [
        row
        for size, run in runs.items()
        for row in gain_points(point, f"end to end L={length} B={batch_size}", size, gains[run])
    ]


def draw(points: list[Point]) -> plt.Figure:
    paper = curves(points, "paper")
    sources = ["predicted", "measured"] if curves(points, "measured") else ["predicted"]
    figure, grid = plt.subplots(
        len(sources), 3, figsize=(18, 6 * len(sources)), layout="constrained", squeeze=False
    )
    for panels, source in zip(grid, sources, strict=True):
        found = curves(points, source)
        for axes, letter, (part, label) in zip(panels, "abc", PARTS.items(), strict=True):
            lines = {
                series: curve
                for series, curve in found.items()
                if series.startswith(f"{part} L=") and not series.endswith(SPREAD)
            }
            for (series, curve), (colour, marker) in zip(lines.items(), SERIES, strict=False):
                plot_points(
                    axes,
                    curve,
                    color=colour,
                    marker=marker,
                    label=f"L = {series_options(series)['L']}",
                )
                shade_spread(axes, found, series, colour)
            stars = paper.get(f"{part}, largest", []) if source == "predicted" else []
            for number, point in enumerate(stars):
                star(axes, point.x, point.y, label="paper" if number == 0 else None)
            axes.axhline(1, color="black", linewidth=1)
            axes.set_xticks(sorted({int(point.x) for curve in lines.values() for point in curve}))
            axes.tick_params(axis="x", rotation=45)
            axes.set(xlabel="chunk size C", ylabel=label, title=f"({letter}) {part}")
            if part != "end to end":
                axes.set_ylim(bottom=0)
        if source == "predicted":
            for number, point in enumerate(paper["prefill overhead, largest"]):
                label = "paper: at most" if number == 0 else None
                y = 1 + point.y / 100
                style = {
                    "color": "white",
                    "markeredgecolor": "black",
                    "markersize": 14,
                    "zorder": 5,
                }
                panels[1].plot(point.x, y, "v", label=label, **style)
        panels[0].set_title(
            f"(a) attention; {measured_title(points)}"
            if source == "measured"
            else f"(a) attention; predicted: {MODEL} on {GPU}"
        )
        panels[1].legend()
    figure.suptitle(
        "SARATHI Fig 13: what chunking costs, and what decode-maximal batching gives back",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="fig13",
    description=__doc__,
    paper={
        "f13_attn_c64": ("attention, largest", 64),
        "f13_prefill_c64": ("prefill, largest", 64),
        "f13_prefill_c128": ("prefill, largest", 128),
        "f13_prefill_c256": ("prefill overhead, largest", 256),
        "f13_prefill_c512": ("prefill overhead, largest", 512),
        "f13_total_c64": ("end to end, largest", 64),
        "f13_total_c128": ("end to end, largest", 128),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(8,), chunk_sizes=(64, 128, 256), repeats=6),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16, 32), repeats=1),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
