"""SARATHI, Fig 10: time by operator, the baseline beside SARATHI where P:D is balanced.

    python experiments/fig10.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig10.py --measure    and the real engine on this machine: minutes

SARATHI shortens the linear operators, because decodes share the weights that a chunk reads anyway.
Attention gains nothing by that. The cost model lets it fall a little, for the reason that fig13.py
gives. Times are of a steady state, per request: see `balance` and `steady_operators` in
lib/steady.py.
"""

import statistics
from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from cli import run_main
from experiments.fig3 import LOOK
from experiments.lib.common import Point, curves, progress, series_options
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import measured_title
from experiments.lib.measuring import measured_on, measured_trace, warm_up
from experiments.lib.steady import (
    BATCH_SIZES,
    Workload,
    balance,
    first_period,
    simulate_operators,
    steady_operators,
)
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU, CHUNK_SIZES = "llama-13b", "a6000", (256, 512)
POLICIES = ("baseline", "sarathi")
LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
prediction = partial(Point, "fig10", source="predicted", model=MODEL, hardware=GPU)


def to_points(ms: dict[tuple[str, int, int, int], dict[str, float]], *where: str) -> list[Point]:
    """The points of these times, and how many times less SARATHI takes.

    ms: per request and operator, by policy, L, B and C. where: source, model, hardware.
    """
    points = []
    for (policy, length, batch_size, chunk_size), operators in ms.items():
        series = f"L={length} C={chunk_size}"
        for name, y in operators.items():
            what = (f"{policy} {name} {series}", batch_size, "B", y, "ms per request")
            points.append(Point("fig10", *what, *where))
            if policy == "sarathi" and name in LINEAR:
                less = ms["baseline", length, batch_size, chunk_size][name] / y
                points.append(
                    Point(
                        "fig10", f"reduction of {name} {series}", batch_size, "B", less, "x", *where
                    )
                )
    return points


def per_request(trace: Trace, first: int, last: int) -> dict[str, float]:
    """ms of each operator per request, between the completions of requests `first` and `last`."""
    return {
        name: 1e3 * seconds / (last - first)
        for name, seconds in steady_operators(trace, first, last).items()
    }


def predict(quick: bool) -> list[Point]:
    """Three batch sizes for each length, up to the largest that fits."""
    ms = {}
    places = [
        (n, size, c)
        for n, largest in BATCH_SIZES.items()
        for size in (largest // 3, 2 * largest // 3, largest)
        for c in CHUNK_SIZES
    ]
    for length, size, chunk_size in progress(places, "predicting"):
        for policy in POLICIES:
            requests = Workload(length, size, balance(chunk_size, size)).requests(5 * size)
            trace = simulate_operators(requests, policy, chunk_size, size, MODEL, GPU)
            ms[policy, length, size, chunk_size] = per_request(trace, 2 * size, 4 * size)
    points = to_points(ms, "predicted", MODEL, GPU)
    for part, names in {
        "linear operators": LINEAR,
        "ffn": LINEAR[2:],
        "preproj and postproj": LINEAR[:2],
    }.items():
        found = [
            point.y
            for point in points
            if point.series.startswith(tuple(f"reduction of {name} " for name in names))
        ]
        for end in (min, max):
            points.append(prediction(f"{end.__name__} reduction, {part}", 0, "", end(found), "x"))
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """Both policies in alternation; medians of `repeats` turns."""
    (length,), ms = scale.lengths, {}
    warm_up(llm)
    for size, chunk_size in progress(
        [(size, c) for size in scale.batch_sizes for c in scale.chunk_sizes], "measuring"
    ):
        work = Workload(length, size, balance(chunk_size, size))
        seen: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        for _ in range(scale.repeats):
            for policy in POLICIES:
                seen[policy].append(
                    per_request(
                        measured_trace(llm, work, policy, chunk_size, operators=True),
                        *first_period(work, policy),
                    )
                )
        for policy, turns in seen.items():
            ms[policy, length, size, chunk_size] = {
                name: statistics.median(turn[name] for turn in turns) for name in turns[0]
            }
    return to_points(ms, *measured_on(llm))


def draw_panel(axes: plt.Axes, found: dict[str, list[Point]], place: str, title: str) -> None:
    """Two stacked bars for each batch size; place: the series' "L=... C=..."."""
    sizes = [point.x for point in found[f"baseline attn {place}"]]
    for shift, policy in ((-0.2, "baseline"), (0.2, "sarathi")):
        bottom = [0.0] * len(sizes)
        for name, (colour, hatch) in LOOK.items():
            heights = [point.y for point in found[f"{policy} {name} {place}"]]
            label = name if policy == "baseline" else None
            places = [i + shift for i in range(len(sizes))]
            style = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.8}
            axes.bar(places, heights, 0.36, bottom, label=label, **style)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        for i, top in enumerate(bottom):
            axes.text(
                i + shift, top, f" {policy}", rotation=90, ha="center", va="bottom", fontsize=12
            )
    axes.set_xticks(range(len(sizes)), [f"B = {size:g}" for size in sizes])
    axes.set_ylim(0, 1.35 * axes.dataLim.ymax)
    axes.set(ylabel="ms per request", title=title)
    axes.grid(axis="x", visible=False)


def draw(points: list[Point]) -> plt.Figure:
    predicted, measured = curves(points, "predicted"), curves(points, "measured")
    figure, grid = plt.subplots(
        2,
        4 if measured else 3,
        figsize=(24 if measured else 18, 11.5),
        layout="constrained",
        squeeze=False,
    )
    for row, chunk_size in zip(grid, CHUNK_SIZES, strict=True):
        for axes, length in zip(row, BATCH_SIZES, strict=False):
            draw_panel(
                axes,
                predicted,
                f"L={length} C={chunk_size}",
                f"predicted: L = {length // 1024}K, C = {chunk_size}",
            )
    if measured:
        places = [
            s.removeprefix("baseline attn ") for s in measured if s.startswith("baseline attn ")
        ]
        for axes in grid[len(places) :, 3]:
            axes.set_axis_off()
        for axes, place in zip(grid[:, 3], places, strict=False):
            options = series_options(place)
            draw_panel(
                axes,
                measured,
                place,
                f"{measured_title(points)}\nL = {options['L']}, C = {options['C']}",
            )
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    heading = f"SARATHI Fig 10: time by operator at a balanced P:D, {MODEL} on {GPU}"
    paper = {series: curve[0].y for series, curve in curves(points, "paper").items()}
    (least,), (most,) = (predicted[f"{end} reduction, ffn"] for end in ("min", "max"))
    ffn = f"paper {paper['min reduction, ffn']:g} to {paper['max reduction, ffn']:g}"
    figure.suptitle(
        f"{heading}\nffn: sarathi takes {least.y:.2f} to {most.y:.2f} times less, predicted; {ffn}",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="fig10",
    description=__doc__,
    paper={
        "f10_linear": ("max reduction, linear operators", 0),
        "f10_ffn_low": ("min reduction, ffn", 0),
        "f10_ffn_high": ("max reduction, ffn", 0),
        "f10_proj_low": ("min reduction, preproj and postproj", 0),
        "f10_proj_high": ("max reduction, preproj and postproj", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(4, 8), chunk_sizes=(128, 256), repeats=3),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16,), repeats=1),
    shown=lambda point: "reduction" in point.series,
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
