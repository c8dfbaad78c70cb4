"""SARATHI, Fig 3: what a token costs in prefill and in decode, by operator and batch size.

    python experiments/fig3.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig3.py --measure    and the real engine on this machine

One prompt is enough work for the machine, so a prefill token costs the same in any batch. A
decode-only batch reads all weights for B tokens: the linear operators' cost per token falls as 1/B.
The cost of attention stays, because it reads each request's own keys and values.
"""

import enter  # noqa: F401

from dataclasses import replace

from configs import OPERATORS
from configs.constants import constants
from costmodel import make_batch
from experiments.lib.claims import falls, flat
from experiments.lib.engines import Engine, Priced, Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study

MODEL = "llama-13b"
GPU = "a6000"
LENGTH = 1024
SIZES = cases(L=LENGTH, B=(1, 2, 4, 8, 12, 18))
QUICK = cases(L=LENGTH, B=(1, 2, 18))


def costs(engine: Engine, L: int, B: int) -> list[Row]:
    """ms per token of B whole prompts of L tokens, and of B decodes that attend to L tokens.

    Like the paper's, totals leave out 'others': of these, the cost model has only the logits.
    """
    rows = []
    for phase, batch in (
        ("prefill", make_batch([(0, L, L)] * B)),
        ("decode", make_batch(decodes=B, context=L)),
    ):
        operators = engine.operators(batch)
        ms = {name: 1e3 * value / batch.num_tokens for name, value in operators.items()}
        everything = sum(ms.values())
        share = 100 * ms["others"] / everything
        rows.append(
            {"phase": phase, **ms, "total": everything - ms["others"], "share of others": share}
        )
    prefill, decode = rows
    decode["over a prefill token"] = decode["total"] / prefill["total"]
    return rows


def all_priced(engine: Engine, L: int, B: int) -> list[Row]:
    """The share of 'others', norms and activations included.

    SARATHI's constants leave those out, as its Table 2 does. Here they move their bytes at the same
    share of the bandwidth as the linear operators. Nothing is fitted.
    """
    return [
        {"phase": row["phase"], "share of others, all priced": row["share of others"]}
        for row in costs(engine, L, B)
    ]


OWN, _ = constants(GPU, "xformers-2023")
ELEMENTWISE_TOO = replace(OWN, elementwise=OWN.memory)


def largest_share(rows: Rows) -> None:
    """The paper states one number for all."""
    shares = rows.column("share of others, all priced")
    rows.add(which="largest", **{"share of others, all priced": max(shares)})


def shown(row: Row, quantity: str) -> bool:
    if quantity in ("total", "over a prefill token") or "which" in row:
        return True
    return row["source"] == "measured" and quantity == "share of others"


STUDY = Study(
    "fig3",
    __doc__,
    [
        Sweep(
            costs,
            [Priced(MODEL, GPU)],
            SIZES,
            quick=QUICK,
            measured=cases(L=512, B=(1, 2, 4, 8)),
            quick_measured=cases(L=64, B=(1, 2)),
        ),
        Sweep(all_priced, [Priced(MODEL, GPU, efficiency=ELEMENTWISE_TOO)], SIZES, quick=QUICK),
    ],
    units={
        **dict.fromkeys((*OPERATORS, "total"), "ms per token"),
        "share of others": "%",
        "share of others, all priced": "%",
        "over a prefill token": "x",
    },
    title="SARATHI Fig 3: cost of a token by operator",
    panels=[
        Panel("B", OPERATORS[:-1], kind="stacks", facet="phase", show={"ylabel": "ms per token"}),
        Panel("B", "over a prefill token", log="y", title="one decode costs x prefill tokens"),
    ],
    paper={
        **{f"f3_b{B}": ("over a prefill token", {"B": B, "phase": "decode"}) for B in (1, 2, 18)},
        "f3_others": ("share of others, all priced", {"which": "largest"}),
    },
    derive=largest_share,
    claims=lambda rows: {
        "a prefill token costs the same in any batch": flat(rows, "total", "B", phase="prefill"),
        "a decode costs less, the larger the batch": falls(rows, "total", "B", phase="decode"),
    },
    shown=shown,
    repeats=9,
)

if __name__ == "__main__":
    STUDY.main()
