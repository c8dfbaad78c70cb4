"""SARATHI, Fig 10: time by operator, the baseline beside SARATHI where P:D is balanced.

    python experiments/fig10.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig10.py --measure    and the real engine on this machine: minutes

SARATHI shortens the linear operators, because decodes share the weights that a chunk reads anyway.
Attention gains nothing by that. The cost model lets it fall a little, for the reason that fig13.py
gives. Times are of a steady state, per request: see `balance` in more/serving/steady.py.
"""

import enter  # noqa: F401

from experiments.lib.claims import bounded
from experiments.lib.engines import BATCH_SIZES, Engine, Priced, Sweep, balanced, cases
from experiments.lib.published import paper_table
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study

CHUNK_SIZES = (256, 512)  # the paper's rows of panels
LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
PARTS = {"linear operators": LINEAR, "ffn": LINEAR[2:], "preproj and postproj": LINEAR[:2]}


def times(engine: Engine, L: int, B: int, C: int) -> list[Row]:
    """ms per request of each operator, and how many times less SARATHI takes."""
    runs = {
        policy: engine.steady(balanced(L, B, C), policy, C, operators=True).operators
        for policy in ("baseline", "sarathi")
    }
    rows = []
    for policy, operators in runs.items():
        for name, seconds in operators.items():
            rows.append({"policy": policy, "operator": name, "time": 1e3 * seconds})
            if policy == "sarathi" and name in LINEAR:
                rows[-1]["reduction"] = runs["baseline"][name] / seconds
    return rows


def extremes(rows: Rows) -> None:
    """The paper gives ranges over its cases."""
    for part, names in PARTS.items():
        found = rows.where(operator=names).column("reduction")
        rows.add(part=part, which="smallest", reduction=min(found))
        rows.add(part=part, which="largest", reduction=max(found))


PREDICTED = []
for C in CHUNK_SIZES:
    for L, B in BATCH_SIZES.items():
        PREDICTED += cases(L=L, B=(B // 3, 2 * B // 3, B), C=C)
STUDY = Study(
    "fig10",
    __doc__,
    [
        Sweep(
            times,
            [Priced("llama-13b", "a6000")],
            PREDICTED,
            measured=cases(L=512, B=(4, 8), C=(128, 256)),
            quick_measured=cases(L=64, B=3, C=16),
        )
    ],
    units={"time": "ms per request", "reduction": "x"},
    title="SARATHI Fig 10: time by operator at a balanced P:D",
    panels=[
        Panel(("B", "policy"), "time", "operator", "stacks", facet=("C", "L")),
        Panel("part", "reduction", "which", "bars", title="sarathi takes less time"),
    ],
    columns=3,
    paper=paper_table(
        ("part", "which", "reduction"),
        [
            ("linear operators", "largest", "f10_linear"),
            ("ffn", "smallest", "f10_ffn_low"),
            ("ffn", "largest", "f10_ffn_high"),
            ("preproj and postproj", "smallest", "f10_proj_low"),
            ("preproj and postproj", "largest", "f10_proj_high"),
        ],
    ),
    derive=extremes,
    claims=lambda rows: {
        "decodes share the weights of every linear operator": bounded(rows, "reduction", 1.05, 5)
    },
    shown=lambda row, quantity: quantity == "reduction",
    repeats=3,
)

if __name__ == "__main__":
    STUDY.main()
