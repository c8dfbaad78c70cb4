"""SARATHI, Table 2: the time of a prefill-only, a decode-only and a decode-maximal batch.

It tells linear operators and attention apart.

    python experiments/table2.py              LLaMA-13B on an A6000, cost model beside the paper:
                                              seconds, no GPU needed
    python experiments/table2.py --measure    and the real engine on this machine

The cost model's constants were fitted to this table and to Fig 7 (fit_a6000.py): here, "predicted"
means "how well it fits". The marginal time of a decode is the decode-maximal batch's total less
that of the prefill-only batch, which has as many rows, divided by its decodes (Sec 4.3.1).
"""

from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Batch
from cli import run_main
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments.fit_a6000 import BATCHES
from experiments.lib.common import Point, curves
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import COLOURS, measured_title
from experiments.lib.measuring import measured_on, time_batches

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU = "llama-13b", "a6000"
LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
NAMES = {"prefill-only": "t2_prefill", "decode-only": "t2_decode", "decode-maximal": "t2_hybrid"}
prediction = partial(Point, "table2", source="predicted", model=MODEL, hardware=GPU)


def table(batches: dict[str, Batch], operators: dict[str, dict[str, float]]) -> dict[str, float]:
    """The cells of the table in ms.

    batches, operators: by the rows' names; operators are in seconds. Like the paper's, totals are
    linear + attention: 'others' (norms, logits) are left out.
    """
    cells = {}
    for row, seconds in operators.items():
        cells[f"{row}, linear"] = 1e3 * sum(seconds[name] for name in LINEAR)
        cells[f"{row}, attention"] = 1e3 * seconds["attn"]
        cells[f"{row}, total"] = cells[f"{row}, linear"] + cells[f"{row}, attention"]
    cells["prefill-only, per prefill token"] = (
        cells["prefill-only, total"] / batches["prefill-only"].num_prefill_tokens
    )
    cells["decode-only, per decode"] = cells["decode-only, total"] / len(
        batches["decode-only"].decodes
    )
    marginal = cells["decode-maximal, total"] - cells["prefill-only, total"]
    cells["decode-maximal, per decode"] = marginal / len(batches["decode-maximal"].decodes)
    return cells


def predict(quick: bool) -> list[Point]:
    cost = CostModel(MODELS[MODEL], GPUS[GPU])
    batches = {row: BATCHES[name] for row, name in NAMES.items()}
    cells = table(batches, {row: cost.operators(batch) for row, batch in batches.items()})
    return [prediction(cell, 0, "", y, "ms") for cell, y in cells.items()]


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """The paper's shapes: a prompt of L; B decodes; a chunk of L - (B-1) with B - 1 decodes."""
    (length,), (size,) = scale.lengths, scale.batch_sizes
    batches = {
        "prefill-only": make_batch([(0, length, length)]),
        "decode-only": make_batch(decodes=size, context=length),
        "decode-maximal": make_batch(
            [(0, length - (size - 1), length - (size - 1))], decodes=size - 1, context=length
        ),
    }
    results = time_batches(llm, list(batches.values()), scale.repeats, operators=True)
    cells = table(
        batches, {row: result.operators for row, result in zip(batches, results, strict=True)}
    )
    return [
        Point("table2", f"{cell} L={length} B={size}", 0, "", y, "ms", *measured_on(llm))
        for cell, y in cells.items()
    ]


def draw_panel(axes: plt.Axes, bars: dict[str, dict[str, float]], title: str) -> None:
    """A stacked bar for each of `bars`: label -> the cells of its part of the table."""
    look = {"linear": (COLOURS["sky"], ""), "attention": (COLOURS["vermilion"], "//")}
    bottom = [0.0] * len(bars)
    for part, (colour, hatch) in look.items():
        heights = [values[part] for values in bars.values()]
        style = {"color": colour, "hatch": hatch, "edgecolor": "black"}
        axes.bar(range(len(bars)), heights, 0.7, bottom, label=part, **style)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, values in enumerate(bars.values()):
        unit, y = next((cell, y) for cell, y in values.items() if cell.startswith("per "))
        # narrow: bars stand side by side
        label = f"{y:.3g} ms\n" + unit.replace("prefill token", "prefill\ntoken")
        axes.text(
            place, bottom[place] + 0.015 * max(bottom), label, ha="center", va="bottom", fontsize=12
        )
    axes.set_xticks(range(len(bars)), bars, fontsize=12)
    axes.set_ylim(0, 1.3 * max(bottom))
    axes.set(ylabel="ms", title=title)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper center", ncols=2)


def draw(points: list[Point]) -> plt.Figure:
    cells: dict[str, dict[str, dict[str, float]]] = {}  # source -> row -> cell -> ms
    for source in ("paper", "predicted", "measured"):
        for series, (point,) in curves(points, source).items():
            row, cell = series.split(" L=")[0].split(", ")
            cells.setdefault(source, {}).setdefault(row, {})[cell] = point.y
    measured = cells.get("measured")
    figure, panels = plt.subplots(
        1,
        2 if measured else 1,
        figsize=(19 if measured else 12, 6.5),
        layout="constrained",
        squeeze=False,
    )
    names = {row: row.replace("-", "-\n") for row in NAMES}
    both = {
        f"{names[row]}\n{word}": cells[source][row]
        for row in NAMES
        for source, word in (("paper", "paper"), ("predicted", "fitted"))
    }
    draw_panel(panels[0][0], both, f"paper, and fitted: {MODEL} on {GPU}")
    if measured:
        draw_panel(
            panels[0][1], {names[row]: measured[row] for row in NAMES}, measured_title(points)
        )
    figure.suptitle(
        "SARATHI Table 2: a decode alone, and one that rides on a prefill: in the paper, it costs a"
        " tenth",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="table2",
    description=__doc__,
    paper={
        **{
            f"{name}_{short}": (f"{row}, {cell}", 0)
            for row, name in NAMES.items()
            for short, cell in (("linear", "linear"), ("attn", "attention"), ("total", "total"))
        },
        "t2_prefill_per_token": ("prefill-only, per prefill token", 0),
        "t2_decode_per_token": ("decode-only, per decode", 0),
        "t2_hybrid_decode_per_token": ("decode-maximal, per decode", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(4,), repeats=25),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), repeats=3),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
