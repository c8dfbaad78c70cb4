"""Segment KV, Fig 4: bytes of the two KV caches of a beam search, four models, by batch size.

    python experiments/segment_memory.py              computed: formulas (1) to (3); seconds

Prompt and response have 1024 tokens each, BW = 4, fp16, at the last step. Standard holds everything
for each beam. Segment holds the prompt once, and the response in segments of 16 steps. GB are 10^9
bytes, as the paper's are. The formulas count the caches alone: no weights, no temporary copies.
"""

import enter  # noqa: F401

from types import SimpleNamespace

from configs import MODELS
from experiments.lib.claims import Claim, bounded
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row
from experiments.lib.segment import COLOURS, TILE, TILES, WIDTH
from experiments.lib.study import Panel, Study
from more.beam.cost import cache_bytes
from more.beam.request import CACHES

LENGTH = 1024  # tokens of the prompt, and of the response
STATED = "gptj-6b", 32  # the paper states numbers of this model at this BS


def memory(engine: SimpleNamespace, L: int, BS: int) -> list[Row]:
    """GB of both caches; segment's share of standard, in %."""
    found = {cache: cache_bytes(MODELS[engine.model], cache, BS, WIDTH, L, L) for cache in CACHES}
    rows: list[Row] = [{"cache": cache, "memory": held / 1e9} for cache, held in found.items()]
    return [*rows, {"segment of standard": 100 * found["segment"] / found["standard"]}]


STUDY = Study(
    "segment_memory",
    __doc__,
    [
        Sweep(
            memory,
            [SimpleNamespace(model=model, hardware="any hardware") for model in TILES],
            cases(L=LENGTH, BS=(1, 2, 4, 8, 16, 32, 64)),
            quick=cases(L=LENGTH, BS=(1, 32)),
        )
    ],
    units={"memory": "GB", "segment of standard": "%"},
    title=(
        f"Segment KV Fig 4: cache of a beam search, BW = {WIDTH}; by formula for"
        f" {LENGTH} + {LENGTH} tokens, fp16 (line: a tile's memory)"
    ),
    panels=[
        Panel(
            "BS", "memory", "cache", facet="model", log="xy", colours=COLOURS,
            rule=TILE.memory / 1e9,
        )
    ],
    columns=2,
    paper={
        f"sk_kv_{cache}": ("memory", {"model": STATED[0], "BS": STATED[1], "cache": cache})
        for cache in ("standard", "segment")
    },
    claims=[Claim("one copy of the prompt takes less", bounded("segment of standard", 50, 75))],
    shown=lambda row, quantity: (
        (quantity == "memory" and (row["model"], row["BS"]) == STATED)
        or (quantity == "segment of standard" and row["BS"] == STATED[1])
    ),
)  # fmt: skip


if __name__ == "__main__":
    STUDY.main()
