"""SARATHI, Fig 13: what chunking costs, and what the decodes that ride along give back.

The panels are (a) attention alone, (b) the whole prefill, and (c) end to end.

    python experiments/fig13.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig13.py --measure    and the real engine on this machine: minutes

(a) and (b): the prefill of one prompt of L tokens, in chunks of C over whole. (c): throughput over
the baseline's in a steady state (see fig9.py), at the P:D where the chunks carry all decodes
(`balance` in lib/steady.py). C = 320 is no multiple of the tile, and shows it.

In (a) the cost model falls below 1, where the paper stays above. The cost model counts the masked
half of a whole prompt as work, as its fit wants, and a chunk has less of it. Attention is a small
part of the prefill, so (b) hardly changes.
"""

import enter  # noqa: F401

from operator import itemgetter

from batch import Request
from experiments.lib.claims import Claim, Finding, curves, falls, listed
from experiments.lib.engines import Engine, Priced, Sweep, cases, gain
from experiments.lib.rows import Rows
from experiments.lib.steady import BATCH_SIZES, balanced
from experiments.lib.study import Panel, Study

CHUNK_SIZES = (64, 128, 256, 320, 512)
PARTS = {
    "attention": "attention time, chunked / whole",
    "prefill": "prefill time, chunked / whole",
    "end to end": "throughput / baseline's",
}


def prefill(engine: Engine, policy: str, L: int, C: int) -> dict[str, float]:
    """Seconds of the attention and of everything, of the prefill of one prompt."""
    prompt = [Request(0, range(L), 1)]
    iterations = engine.trace(prompt, policy, C, 1, operators=True).iterations
    return {
        "attention": sum(iteration.operators["attn"] for iteration in iterations),
        "prefill": sum(sum(iteration.operators.values()) for iteration in iterations),
    }


def chunked(engine: Engine, L: int, B: int, C: int) -> dict[str, float]:
    """Chunked over whole; and the throughput of B requests over the baseline's."""
    whole, chunks = prefill(engine, "orca", L, 1), prefill(engine, "sarathi", L, C)
    found = {part: chunks[part] / whole[part] for part in whole}
    return found | {"end to end": gain(engine, balanced(L, B, C), "sarathi", C)}


def largest(rows: Rows) -> None:
    """The paper's text names no length: the largest of all, as its bounds and "up to" mean."""
    if rows.sources() == ["predicted"]:
        for size, own in list(rows.by("C").items()):
            most = {part: max(own.column(part)) for part in PARTS}
            overhead = {"prefill overhead": 100 * (most["prefill"] - 1)}
            rows.add(C=size, which="largest", **most, **overhead)


def tiles_matter(rows: Rows) -> list[Finding]:
    return [
        Finding(
            where,
            listed(own, "end to end", "x", "C"),
            [own[1] is min(own, key=itemgetter("end to end"))],
        )
        for where, own in curves(rows.where("L"), "end to end", "C", C=(256, 320, 512))
        if len(own) == 3
    ]


STUDY = Study(
    "fig13",
    __doc__,
    [
        Sweep(
            chunked,
            [Priced("llama-13b", "a6000")],
            [case for L, B in BATCH_SIZES.items() for case in cases(L=L, B=B, C=CHUNK_SIZES)],
            measured=cases(L=512, B=8, C=(64, 128, 256)),
            quick_measured=cases(L=64, B=3, C=(16, 32)),
        )
    ],
    units={**dict.fromkeys(PARTS, "x"), "prefill overhead": "%"},
    title="SARATHI Fig 13: what chunking costs, and what decode-maximal batching gives back",
    panels=[Panel("C", part, "L", rule=1, title=label) for part, label in PARTS.items()],
    paper={
        f"f13_{short}_c{size}": (quantity, {"C": size, "which": "largest"})
        for short, quantity, size in (
            ("attn", "attention", 64),
            ("prefill", "prefill", 64),
            ("prefill", "prefill", 128),
            ("prefill", "prefill overhead", 256),
            ("prefill", "prefill overhead", 512),
            ("total", "end to end", 64),
            ("total", "end to end", 128),
        )
    },
    derive=largest,
    claims=[
        Claim(
            "small chunks make a prefill dearer", falls("prefill", "C", C=(64, 128, 256, 512)), True
        ),
        Claim("a chunk that is no multiple of the tile gains less", tiles_matter),
    ],
    measure=True,
    repeats=3,
)

if __name__ == "__main__":
    STUDY.main()
