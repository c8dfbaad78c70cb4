"""SARATHI, Table 2: the time of a prefill-only, a decode-only and a decode-maximal batch.

It tells linear operators and attention apart.

    python experiments/table2.py              LLaMA-13B on an A6000, cost model beside the paper:
                                              seconds, no GPU needed
    python experiments/table2.py --measure    and the real engine on this machine

The cost model's constants were fitted to this table and to Fig 7 (fit.py): here, "predicted"
means "how well it fits". The marginal time of a decode is the decode-maximal batch's total less
that of the prefill-only batch, which has as many rows, divided by its decodes (Sec 4.3.1).
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from costmodel import make_batch
from experiments.lib import look
from experiments.lib.engines import Engine, Priced, Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Study, title_of

LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
NAMES = {"prefill-only": "t2_prefill", "decode-only": "t2_decode", "decode-maximal": "t2_hybrid"}
LOOK = {"linear": (look.COLOURS["sky"], ""), "attention": (look.COLOURS["vermilion"], "//")}


def table(engine: Engine, L: int, B: int) -> list[Row]:
    """ms of a prompt of L; of B decodes; of a chunk of L - (B-1) with B - 1 decodes.

    Like the paper's, totals are linear + attention: 'others' (norms, logits) are left out.
    """
    chunk = L - (B - 1)
    batches = {
        "prefill-only": make_batch([(0, L, L)]),
        "decode-only": make_batch(decodes=B, context=L),
        "decode-maximal": make_batch([(0, chunk, chunk)], decodes=B - 1, context=L),
    }
    rows, totals = [], {}
    for name, batch in batches.items():
        seconds = engine.operators(batch)
        linear, attention = 1e3 * sum(seconds[each] for each in LINEAR), 1e3 * seconds["attn"]
        totals[name] = total = linear + attention
        if name == "decode-maximal":
            total -= totals["prefill-only"]  # what its decodes add
        token = total / (len(batch.decodes) or batch.num_prefill_tokens)
        cells = {"linear": linear, "attention": attention, "total": totals[name]}
        rows.append({"batch": name, **cells, "per token": token})
    return rows


def draw_panel(axes: plt.Axes, rows: Rows, labels: list[str], title: str) -> None:
    """A stacked bar for each row, and its time per token above."""
    tops = look.stacked_bars(
        axes, range(len(rows)), {part: rows.column(part) for part in LOOK}, LOOK, 0.7
    )
    style = {"ha": "center", "va": "bottom", "fontsize": 12}
    for place, row in enumerate(rows):
        token = "prefill\ntoken" if row["batch"] == "prefill-only" else "decode"
        text = f"{row['per token']:.3g} ms\nper {token}"
        axes.text(place, tops[place] + 0.015 * max(tops), text, **style)
    axes.set_xticks(range(len(rows)), labels, fontsize=12)
    axes.set_ylim(0, 1.3 * max(tops))
    axes.set(ylabel="ms", title=title)
    axes.legend(loc="upper center", ncols=2)


def draw(rows: Rows) -> plt.Figure:
    """Paper and fit side by side; what was measured beside them."""
    both, measured = (
        rows.where(source=("paper", "predicted")),
        rows.newest().where(source="measured"),
    )
    both.sort(key=lambda row: (list(NAMES).index(row["batch"]), row["source"]))
    figure, [grid] = look.panels(1, 1 + bool(measured), 9.5 if measured else 12, 6.5)
    words = {"paper": "paper", "predicted": "fitted"}
    labels = [row["batch"].replace("-", "-\n") + "\n" + words[row["source"]] for row in both]
    draw_panel(
        grid[0], both, labels, f"paper, and {title_of(both.where(source='predicted'), 'fitted')}"
    )
    if measured:
        labels = [name.replace("-", "-\n") for name in measured.column("batch")]
        draw_panel(grid[1], measured, labels, title_of(measured))
    figure.suptitle(STUDY.title)
    return figure


STUDY = Study(
    "table2",
    __doc__,
    [
        Sweep(
            table,
            [Priced("llama-13b", "a6000")],
            cases(L=1024, B=4),
            measured=cases(L=512, B=4),
            quick_measured=cases(L=64, B=3),
        )
    ],
    units=dict.fromkeys(("linear", "attention", "total", "per token"), "ms"),
    title=(
        "SARATHI Table 2: a decode alone, and one that rides on a prefill: in the paper, it costs a"
        " tenth"
    ),
    draw=draw,
    paper={
        f"{name}_{short}": (quantity, {"batch": batch})
        for batch, name in NAMES.items()
        for short, quantity in (("linear", "linear"), ("attn", "attention"), ("total", "total"))
    }
    | {
        "t2_prefill_per_token": ("per token", {"batch": "prefill-only"}),
        "t2_decode_per_token": ("per token", {"batch": "decode-only"}),
        "t2_hybrid_decode_per_token": ("per token", {"batch": "decode-maximal"}),
    },
    predicted="fitted",
    measure=True,
    repeats=25,
    quick_repeats=3,
)

if __name__ == "__main__":
    STUDY.main()
