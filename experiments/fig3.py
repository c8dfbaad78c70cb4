"""SARATHI, Fig 3: what a token costs in prefill and in decode, by operator and batch size.

    python experiments/fig3.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig3.py --measure    and the real engine on this machine

One prompt is enough work for the machine, so a prefill token costs the same in any batch. A
decode-only batch reads all weights for B tokens: the linear operators' cost per token falls as 1/B.
The cost of attention stays, because it reads each request's own keys and values.
"""

import enter  # noqa: F401

from collections.abc import Iterable
from dataclasses import replace

import matplotlib.pyplot as plt

from batch import Batch
from configs import GPUS, MODELS, OPERATORS
from configs.constants import constants
from costmodel import CostModel, make_batch
from experiments.lib import look, measuring
from experiments.lib.common import Point, Record, curves, series_options, three_digits
from experiments.lib.figure import Figure, Scale
from experiments.lib.look import COLOURS

MODEL, GPU, LENGTH = "llama-13b", "a6000", 1024


def batches(length: int, batch_sizes: tuple[int, ...]) -> dict[tuple[str, int], Batch]:
    """B whole prompts of L tokens, and B decodes that attend to L tokens; by phase and B."""
    shapes = {}
    for size in batch_sizes:
        shapes["prefill", size] = make_batch([(0, length, length)] * size)
        shapes["decode", size] = make_batch(decodes=size, context=length)
    return shapes


def add_costs(
    record: Record, seconds: dict[tuple[str, int], dict[str, float]], length: int
) -> Record:
    """Add the points of these times, in ms per token.

    seconds: of each operator, by phase and B. Like the paper's, totals leave out 'others': of
    these, the cost model has only the logits.
    """
    totals = {}
    for (phase, size), operators in seconds.items():
        tokens = size * (length if phase == "prefill" else 1)
        ms = {name: 1e3 * value / tokens for name, value in operators.items()}
        everything = sum(ms.values())
        ms["total"] = totals[phase, size] = everything - ms["others"]
        for name, y in ms.items():
            record.add(f"{phase}, {name} L={length}", y, "ms per token", size, "B")
        share = 100 * ms["others"] / everything
        record.add(f"{phase}, share of others L={length}", share, "%", size, "B")
    for phase, size in totals:
        if phase == "decode":
            ratio = totals["decode", size] / totals["prefill", size]
            record.add(f"decode over prefill L={length}", ratio, "x", size, "B")
    return record


def predict(quick: bool) -> list[Point]:
    cost = CostModel(MODELS[MODEL], GPUS[GPU])
    shapes = batches(LENGTH, (1, 2, 18) if quick else (1, 2, 4, 8, 12, 18))
    seconds = {key: cost.operators(batch) for key, batch in shapes.items()}
    record = add_costs(Record("fig3", MODEL, GPU), seconds, LENGTH)
    record.add("largest share of others, all priced", 100 * share_of_others(shapes.values()), "%")
    return record


def share_of_others(batches: Iterable[Batch]) -> float:
    """The largest share of 'others', norms and activations included.

    SARATHI's constants leave those out, as its Table 2 does. Here they move their bytes at the same
    share of the bandwidth as the linear operators. Nothing is fitted.
    """
    own, _ = constants(GPU, "sarathi")
    cost = CostModel(MODELS[MODEL], GPUS[GPU], replace(own, elementwise=own.memory))
    every = [cost.operators(batch) for batch in batches]
    return max(operators["others"] / sum(operators.values()) for operators in every)


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    (length,) = scale.lengths
    seconds = measuring.time_operators(llm, batches(length, scale.batch_sizes), scale.repeats)
    return add_costs(Record("fig3", *measuring.measured_on(llm)), seconds, length)


def draw_phase(axes: plt.Axes, found: dict[str, list[Point]], phase: str, title: str) -> None:
    """A bar for each batch size, stacked by operator, without 'others'."""
    sizes = [f"{point.x:g}" for point in found[f"{phase}, total"]]
    parts = {name: [point.y for point in found[f"{phase}, {name}"]] for name in OPERATORS[:-1]}
    tops = look.stacked_bars(
        axes, range(len(sizes)), parts, look.OPERATOR_LOOKS, 0.7, linewidth=0.8
    )
    axes.bar_label(axes.containers[-1], [three_digits(y) for y in tops], fontsize=12, padding=2)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylim(0, 1.15 * max(tops))
    axes.set(xlabel="batch size B", ylabel="ms per token", title=f"{phase}\n{title}")


def draw_ratio(axes: plt.Axes, curve: list[Point], paper: list[Point], title: str) -> None:
    style = {"marker": "o", "color": COLOURS["blue"], "label": curve[0].source}
    look.plot_points(axes, curve, **style)
    look.stars(axes, paper)
    low, high = 0.7 * min(point.y for point in curve), 1.4 * max(point.y for point in curve)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if low < tick < high]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axes.set_ylim(low, high)
    axes.set_yticks([], minor=True)
    axes.set_xticks([point.x for point in curve], [f"{point.x:g}" for point in curve])
    axes.set(xlabel="batch size B", title=f"a decode over a prefill token\n{title}")
    axes.legend()


def draw(points: list[Point]) -> plt.Figure:
    rows = look.sources(points)
    figure, grid = look.panels(len(rows), 3, 6, 6.2)
    paper = curves(points, "paper")[f"decode over prefill L={LENGTH}"]
    for (prefill, decode, ratio), source in zip(grid, rows, strict=True):
        found = curves(points, source)
        length = series_options(next(iter(found)))["L"]
        found = {series.removesuffix(f" L={length}"): curve for series, curve in found.items()}
        title = f"{look.source_title(points, source, f'{MODEL} on {GPU}')}, L = {length}"
        draw_phase(prefill, found, "prefill", title)
        draw_phase(decode, found, "decode", title)
        decode.legend(reverse=True)
        stars = paper if source == "predicted" else []
        draw_ratio(ratio, found["decode over prefill"], stars, title)
    figure.suptitle("SARATHI Fig 3: cost of a token by operator")
    return figure


FIGURE = Figure(
    name="fig3",
    description=__doc__,
    paper={
        **{f"f3_b{size}": (f"decode over prefill L={LENGTH}", size) for size in (1, 2, 18)},
        "f3_others": ("largest share of others, all priced", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(1, 2, 4, 8), repeats=9),
    quick_scale=Scale(lengths=(64,), batch_sizes=(1, 2), repeats=2),
    shown=lambda point: (
        any(word in point.series for word in ("total", "decode over prefill", "all priced"))
        or (point.source == "measured" and "share" in point.series)
    ),
)

main = FIGURE.main

if __name__ == "__main__":
    main()
