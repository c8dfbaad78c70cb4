"""SARATHI, Table 2: the time of a prefill-only, a decode-only and a decode-maximal batch.

It tells linear operators and attention apart.

    python experiments/table2.py              LLaMA-13B on an A6000, cost model beside the paper:
                                              seconds, no GPU needed
    python experiments/table2.py --measure    and the real engine on this machine

The cost model's constants were fitted to this table and to Fig 7 (fit_a6000.py): here, "predicted"
means "how well it fits". The marginal time of a decode is the decode-maximal batch's total less
that of the prefill-only batch, which has as many rows, divided by its decodes (Sec 4.3.1).
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from batch import Batch
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments.fit_a6000 import BATCHES
from experiments.lib import look, measuring
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure, Scale

MODEL, GPU = "llama-13b", "a6000"
LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
NAMES = {"prefill-only": "t2_prefill", "decode-only": "t2_decode", "decode-maximal": "t2_hybrid"}
LOOK = {"linear": (look.COLOURS["sky"], ""), "attention": (look.COLOURS["vermilion"], "//")}
PER_TOKEN = dict.fromkeys(NAMES, "per decode") | {"prefill-only": "per prefill token"}


def table(batches: dict[str, Batch], operators: dict[str, dict[str, float]]) -> dict[str, float]:
    """The cells of the table in ms.

    batches, operators: by the rows' names; operators are in seconds. Like the paper's, totals are
    linear + attention: 'others' (norms, logits) are left out.
    """
    cells, totals = {}, {}
    for row, seconds in operators.items():
        linear, attention = 1e3 * sum(seconds[name] for name in LINEAR), 1e3 * seconds["attn"]
        totals[row] = linear + attention
        cells |= {f"{row}, linear": linear, f"{row}, attention": attention}
        cells[f"{row}, total"] = totals[row]
    totals["decode-maximal"] -= totals["prefill-only"]  # what its decodes add
    for row, cell in PER_TOKEN.items():
        tokens = len(batches[row].decodes) or batches[row].num_prefill_tokens
        cells[f"{row}, {cell}"] = totals[row] / tokens
    return cells


def predict(quick: bool) -> list[Point]:
    record, cost = Record("table2", MODEL, GPU), CostModel(MODELS[MODEL], GPUS[GPU])
    batches = {row: BATCHES[name] for row, name in NAMES.items()}
    operators = {row: cost.operators(batch) for row, batch in batches.items()}
    for cell, ms in table(batches, operators).items():
        record.add(cell, ms, "ms")
    return record


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    """The paper's shapes: a prompt of L; B decodes; a chunk of L - (B-1) with B - 1 decodes."""
    record = Record("table2", *measuring.measured_on(llm))
    (length,), (size,) = scale.lengths, scale.batch_sizes
    chunk = length - (size - 1)
    batches = {
        "prefill-only": make_batch([(0, length, length)]),
        "decode-only": make_batch(decodes=size, context=length),
        "decode-maximal": make_batch([(0, chunk, chunk)], decodes=size - 1, context=length),
    }
    operators = measuring.time_operators(llm, batches, scale.repeats)
    for cell, ms in table(batches, operators).items():
        record.add(f"{cell} L={length} B={size}", ms, "ms")
    return record


def draw_panel(axes: plt.Axes, bars: dict[str, dict[str, float]], title: str) -> None:
    """A stacked bar for each of `bars`: label -> the cells of its row of the table."""
    parts = {part: [cells[part] for cells in bars.values()] for part in LOOK}
    tops = look.stacked_bars(axes, range(len(bars)), parts, LOOK, 0.7)
    style = {"ha": "center", "va": "bottom", "fontsize": 12}
    for place, cells in enumerate(bars.values()):
        (unit,) = set(cells) & set(PER_TOKEN.values())
        # narrow: bars stand side by side
        label = f"{cells[unit]:.3g} ms\n" + unit.replace("prefill token", "prefill\ntoken")
        axes.text(place, tops[place] + 0.015 * max(tops), label, **style)
    axes.set_xticks(range(len(bars)), bars, fontsize=12)
    axes.set_ylim(0, 1.3 * max(tops))
    axes.set(ylabel="ms", title=title)
    axes.legend(loc="upper center", ncols=2)


def draw(points: list[Point]) -> plt.Figure:
    bars: dict[str, dict[str, dict[str, float]]] = {"both": {}, "measured": {}}
    for row in NAMES:
        for source, word in (("paper", "\npaper"), ("predicted", "\nfitted"), ("measured", "")):
            cells = {
                series.split(" L=")[0].removeprefix(f"{row}, "): point.y
                for series, (point,) in curves(points, source).items()
                if series.startswith(f"{row}, ")
            }
            panel = "measured" if source == "measured" else "both"
            if cells:
                bars[panel][row.replace("-", "-\n") + word] = cells
    count = 2 if bars["measured"] else 1
    figure, [grid] = look.panels(1, count, 12 if count == 1 else 9.5, 6.5)
    draw_panel(grid[0], bars["both"], f"paper, and fitted: {MODEL} on {GPU}")
    if bars["measured"]:
        draw_panel(grid[1], bars["measured"], look.measured_title(points))
    figure.suptitle(
        "SARATHI Table 2: a decode alone, and one that rides on a prefill: in the paper, it costs a"
        " tenth",
    )
    return figure


FIGURE = Figure(
    name="table2",
    description=__doc__,
    paper={
        f"{name}_{short}": (f"{row}, {cell}", 0)
        for row, name in NAMES.items()
        for short, cell in (("linear", "linear"), ("attn", "attention"), ("total", "total"))
    }
    | {
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

main = FIGURE.main

if __name__ == "__main__":
    main()
