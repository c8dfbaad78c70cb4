"""SARATHI, Fig 8: how much cheaper a decode becomes when it rides on a chunk, by batch size.

    python experiments/fig8.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig8.py --measure    and the real engine on this machine

The definition is that of Sec 5.1.1. Baseline: the time of a decode-only batch of B, divided by B.
SARATHI: the time of a decode-maximal batch (a chunk of C - (B-1) tokens and B - 1 decodes) less
that of its chunk alone, divided by B - 1. The weights are read for the chunk anyway; what is left
of a decode is its attention, and that is why the gain falls with B (the baseline shares the weights
among more decodes) and with L (more attention).
"""

import enter  # noqa: F401

from costmodel import make_batch
from experiments.lib.claims import falls
from experiments.lib.engines import BATCH_SIZES, Engine, Priced, Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study

C = 256


def seconds(engine: Engine, L: int, B: int, C: int) -> Row:
    """Of the three batches that the definition names."""
    chunk = (0, C - (B - 1), L)  # of a prompt of L tokens
    return {
        "decodes": engine.seconds(make_batch(decodes=B, context=L)),
        "hybrid": engine.seconds(make_batch([chunk], decodes=B - 1, context=L)),
        "chunk": engine.seconds(make_batch([chunk])),
    }


def speedup(seconds: Row, B: int, **_: int) -> Row:
    """Decode time per token of the baseline over SARATHI's marginal one."""
    baseline = seconds["decodes"] / B
    sarathi = (seconds["hybrid"] - seconds["chunk"]) / (B - 1)
    return {"speedup": baseline / sarathi}


def extremes(rows: Rows) -> None:
    """The two numbers that the paper's text gives."""
    gains = rows.column("speedup")
    rows.add(which="largest", speedup=max(gains))
    rows.add(which="smallest", speedup=min(gains))


def sweeps(quick: bool) -> list[Sweep]:
    every = []
    for L, most in BATCH_SIZES.items():
        every += cases(L=L, B=(2, most) if quick else range(2, most + 1), C=C)
    here = cases(L=(256, 512, 1024), B=(2, 4, 6, 8), C=C)
    if quick:
        here = cases(L=(64, 128), B=(2, 4), C=32)
    return [Sweep(seconds, [Priced("llama-13b", "a6000")], every, measured=here, formula=speedup)]


STUDY = Study(
    "fig8",
    __doc__,
    sweeps,
    units={"speedup": "x"},
    title="SARATHI Fig 8: speedup of a decode that rides on a chunk",
    panels=[Panel("B", "speedup", "L", rule=1, show={"ylim": (0, None)})],
    paper={
        "f8_low": ("speedup", {"which": "smallest"}),
        "f8_high": ("speedup", {"which": "largest"}),
    },
    derive=extremes,
    claims=lambda rows: {
        "the speedup of a piggybacked decode falls with B": falls(rows, "speedup", "B"),
        "... and with L": falls(rows, "speedup", "L"),
    },
    shown=lambda row, _: (
        "which" in row or row["source"] == "measured" or row["B"] in (2, 4, 6, 9, 18)
    ),
    repeats=21,
)

if __name__ == "__main__":
    STUDY.main()
