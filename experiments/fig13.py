"""SARATHI, Fig 13: what chunking costs, and what the decodes that ride along give back.

The paper's panels are (a) attention alone, (b) the whole prefill, and (c) end to end. LLaMA-33B's
stars are Table 4's.

    python experiments/fig13.py          predicted, beside the paper's points: seconds, no GPU
        --model mistral-7b --gpu h100    for this model and GPU in place of the paper's
        --measure                        with the real engine, too, on this machine: minutes

(a) and (b): the prefill of one prompt of L tokens, in chunks of C over whole. (c): throughput over
the baseline's in a steady state (see fig9.py), at the P:D where the chunks carry all decodes
(`balance` in more/serving/steady.py). C = 320 is no multiple of the tile, and shows it.

In (a) the cost model falls below 1, where the paper stays above. The cost model counts the masked
half of a whole prompt as work, as its fit wants, and a chunk has less of it. Attention is a small
part of the prefill, so (b) hardly changes.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from batch import Request
from experiments.lib.claims import Claims, falls, rises
from experiments.lib.engines import (
    LLAMA_13B,
    LLAMA_33B,
    Engine,
    Sweep,
    balanced,
    cases,
    gain,
    setups,
)
from experiments.lib.flags import PRICED
from experiments.lib.published import paper_table
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study

NO_TILE = 320  # C that is no multiple of the tile
CHUNK_SIZES = (64, 128, 256, NO_TILE, 512)
PARTS = {
    "attention": "(a) attention time, chunked / whole",
    "prefill": "(b) prefill time, chunked / whole",
    "end to end": "(c) throughput / baseline's",
}


# Numbers by their ids in paper_numbers.csv; None: the paper states none.
PAPER = paper_table(
    ("C", "attention", "prefill", "prefill overhead", "end to end"),
    [
        (64, "f13_attn_c64", "f13_prefill_c64", None, "f13_total_c64"),
        (128, None, "f13_prefill_c128", None, "f13_total_c128"),
        (256, None, None, "f13_prefill_c256", None),
        (512, None, None, "f13_prefill_c512", None),
    ],
    which="largest",
    **LLAMA_13B,
)
PAPER |= paper_table(  # Table 4
    ("L", "C", "end to end"),
    [
        (1024, 256, "t4_33b_1k_total"),
        (2048, 256, "t4_33b_2k_total"),
        (3072, 256, "t4_33b_3k_total"),
    ],
    **LLAMA_33B,
)


def disagree(axes: plt.Axes, rows: Rows) -> None:
    """In words, why (a) is not the paper's."""
    if rows[0]["source"] == "predicted":
        words = (
            "Below 1, the paper disagrees.\nOur fit counts the masked half\nof a whole prompt as"
            " work:\nchunks have less of it."
        )
        axes.text(0.97, 0.6, words, transform=axes.transAxes, ha="right", va="top", fontsize=12)


def prefill(engine: Engine, policy: str, L: int, C: int) -> dict[str, float]:
    """Seconds of the attention and of everything, of the prefill of one prompt."""
    prompt = [Request(0, range(L), 1)]
    iterations = engine.trace(prompt, policy, C, 1, operators=True).iterations
    return {
        "attention": sum(iteration.operators["attn"] for iteration in iterations),
        "prefill": sum(sum(iteration.operators.values()) for iteration in iterations),
    }


def chunked(engine: Engine, L: int, B: int, C: int) -> Row:
    """Chunked over whole; and the throughput of B requests over the baseline's."""
    whole = prefill(engine, "orca", L, 1)
    chunks = prefill(engine, "sarathi", L, C)
    found = {part: chunks[part] / whole[part] for part in whole}
    return found | {"end to end": gain(engine, balanced(L, B, C), "sarathi", C)}


def sweeps(quick: bool, model: str | None = None, gpu: str | None = None) -> list[Sweep]:
    predicted = [
        Sweep(chunked, [engine], cases(L=L, B=B, C=CHUNK_SIZES))
        for engine, batch_sizes in setups(model, gpu).items()
        for L, B in batch_sizes.items()
    ]
    shape = {"L": 64, "B": 3, "C": (16, 32)} if quick else {"L": 512, "B": 8, "C": (64, 128, 256)}
    return [*predicted, Sweep(chunked, measured=cases(**shape))]


def largest(rows: Rows) -> None:
    """The paper's text names no length: the largest of all, as its bounds and "up to" mean."""
    for (_, _, C), own in rows.by("model", "hardware", "C").items():
        most = {part: max(own.column(part)) for part in PARTS}
        most["prefill overhead"] = 100 * (most["prefill"] - 1)
        rows.add(own[0], C=C, which="largest", **most)


def claims(rows: Rows) -> Claims:
    less = falls(rows, "end to end", "C", C=(256, NO_TILE), which=None)
    more = rises(rows, "end to end", "C", C=(NO_TILE, 512), which=None)
    return {
        "small chunks make a prefill dearer": falls(rows, "prefill", "C", C=(64, 128, 256, 512)),
        "a chunk that is no multiple of the tile gains less": less | more,
    }


STUDY = Study(
    "fig13",
    __doc__,
    sweeps,
    units={**dict.fromkeys(PARTS, "x"), "prefill overhead": "%"},
    title="SARATHI Fig 13: what chunking costs, and what decode-maximal batching gives back",
    panels=[
        Panel(
            "C", "attention", "L", facet="model", rule=1, title=PARTS["attention"], also=disagree
        ),
        *(
            Panel("C", part, "L", facet="model", rule=1, title=PARTS[part])
            for part in ("prefill", "end to end")
        ),
    ],
    columns=3,
    paper=PAPER,
    flags=PRICED,
    derive=largest,
    claims=claims,
    repeats=3,
)

if __name__ == "__main__":
    STUDY.main()
