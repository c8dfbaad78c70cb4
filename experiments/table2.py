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

from costmodel import make_batch
from experiments.lib.engines import Engine, Priced, Sweep, cases
from experiments.lib.published import paper_table
from experiments.lib.rows import Row
from experiments.lib.study import Panel, Study

LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
# The paper's table: its numbers by their ids in paper_numbers.csv
COLUMNS = ("batch", "linear", "attention", "total", "per token")
TABLE = [
    (
        "prefill-only",
        "t2_prefill_linear",
        "t2_prefill_attn",
        "t2_prefill_total",
        "t2_prefill_per_token",
    ),
    ("decode-only", "t2_decode_linear", "t2_decode_attn", "t2_decode_total", "t2_decode_per_token"),
    (
        "decode-maximal",
        "t2_hybrid_linear",
        "t2_hybrid_attn",
        "t2_hybrid_total",
        "t2_hybrid_decode_per_token",
    ),
]


def parts(engine: Engine, L: int, B: int) -> list[Row]:
    """ms of a prompt of L; of B decodes; of a chunk of L - (B-1) with B - 1 decodes."""
    chunk = L - (B - 1)
    batches = {
        "prefill-only": make_batch([(0, L, L)]),
        "decode-only": make_batch(decodes=B, context=L),
        "decode-maximal": make_batch([(0, chunk, chunk)], decodes=B - 1, context=L),
    }
    rows = []
    for name, batch in batches.items():
        seconds = engine.operators(batch)
        linear = 1e3 * sum(seconds[each] for each in LINEAR)
        rows.append({"batch": name, "linear": linear, "attention": 1e3 * seconds["attn"]})
    return rows


def with_totals(rows: list[Row], L: int, B: int) -> list[Row]:
    """Like the paper's, totals are linear + attention: 'others' (norms, logits) are left out."""
    for row in rows:
        row["total"] = row["linear"] + row["attention"]
    prefill, decode, hybrid = rows
    prefill["per token"] = prefill["total"] / L
    decode["per token"] = decode["total"] / B
    added = hybrid["total"] - prefill["total"]  # what its decodes add
    hybrid["per token"] = added / (B - 1)
    return rows


STUDY = Study(
    "table2",
    __doc__,
    [
        Sweep(
            parts,
            [Priced("llama-13b", "a6000")],
            cases(L=1024, B=4),
            measured=cases(L=512, B=4),
            quick_measured=cases(L=64, B=3),
            formula=with_totals,
        )
    ],
    units=dict.fromkeys(COLUMNS[1:], "ms"),
    title=(
        "SARATHI Table 2: a decode alone, and one that rides on a prefill: in the paper, it costs a"
        " tenth"
    ),
    panels=[
        Panel("batch", ("linear", "attention"), kind="stacks", title="ms of a batch"),
        Panel("batch", "per token", kind="bars", title="ms of a prompt token, or of a decode"),
    ],
    paper=paper_table(COLUMNS, TABLE),
    predicted="fitted",
    repeats=25,
)

if __name__ == "__main__":
    STUDY.main()
