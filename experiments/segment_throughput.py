"""Segment KV, Fig 4 and 9: memory of a beam search, and the throughput of what fits.

    python experiments/segment_throughput.py              predicted for tiles of the Max 1550
    python experiments/segment_throughput.py --measure    and a small model on this CPU, three
                                                          engines, under --memory GB

Prompts of 1024 tokens, responses of 128, BW = 4. The tiles' memory holds the weights, the caches,
and what is in memory twice while a cache is copied (`segment.temporary_bytes`; all of it, in
transformers). Nothing is left for activations. Throughput is formula (4): BS_max * response /
latency of all, one sequence for each prompt. Causes of the paper's larger gains, alone and together
(lib/segment.py): operators that are not fused, and old caches whose memory is not used again.

Fig 4: GB (10^9 bytes, as the paper's) of the caches alone by formulas (1) to (3), at the last step
of a response of 1024: standard holds everything for each beam, segment the prompt once.

What is measured: prompts of 512, a response of 64. The budget bounds what a process takes above
what it holds before the call: caches, their copies and activations, not the weights.
"""

import enter  # noqa: F401

from collections.abc import Sequence

from command.flags import Flag
from experiments.lib.beam_engines import MEASURED, RealBeams
from experiments.lib.claims import bounded
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.segment import (
    CAUSES,
    COLOURS,
    OURS,
    THEIRS,
    TILE,
    TILES,
    WAYS,
    WIDTH,
    PricedBeams,
)
from experiments.lib.study import Panel, Study
from more.beam.cost import cache_bytes, throughput
from more.beam.request import CACHES

# predicted
PROMPT = 1024
RESPONSE = 128
STATED = {"model": "gptj-6b", "BS": 32}  # Fig 4's numbers
ROOM = "memory of its tiles"
GAIN = "segment over transformers"
Engine = PricedBeams | RealBeams


def rate(engine: Engine, way: str, batch_size: int, P: int, R: int) -> float:
    """Output tokens per second, by formula (4)."""
    first, following = engine.search(way, batch_size, WIDTH, P, R)
    return throughput(batch_size, R, first + (R - 1) * following)


def batches(engine: Engine, P: int, R: int, GB: float | None = None) -> list[Row]:
    """Tokens per second of each way at its largest batch, in prompts; OURS over THEIRS.

    peak: MB, of all batches that were tried.
    """
    rows = []
    rates = {}
    for way in WAYS:
        size, tried = engine.largest_batch(way, WIDTH, P, R, GB)
        rows += [{"way": way, "BS": n, "peak": peak / 1e6} for n, peak in sorted(tried.items())]
        rows.append({"way": way, "largest batch": size})
        if size:
            rates[way] = rows[-1]["throughput"] = rate(engine, way, size, P, R)
    if OURS in rates and THEIRS in rates:
        rows.append({"gain": rates[OURS] / rates[THEIRS]})
    return rows


def caches(engine: PricedBeams, BS: int) -> list[Row]:
    """GB of each cache at the end of a response as long as its prompt."""
    return [
        {
            "cache": cache,
            "memory": cache_bytes(engine.config, cache, BS, WIDTH, PROMPT, PROMPT) / 1e9,
        }
        for cache in CACHES
    ]


def room(engine: PricedBeams) -> Row:
    return {ROOM: engine.tiles * TILE.memory / 1e9}


def with_cause(engine: PricedBeams, P: int, R: int, cause: str) -> list[Row]:
    return [row for row in batches(engine, P, R) if "gain" in row]


def extremes(rows: Rows) -> None:
    """What the paper states of its four models."""
    every = rows[0] | {"model": "four models", "hardware": TILE.name}
    for cause in (None, *CAUSES):
        gains = rows.where("gain", cause=cause).column("gain")
        case = {"cause": cause} if cause else {}
        rows.add(every, which="smallest", gain=min(gains), **case)
        rows.add(every, which="largest", gain=max(gains), **case)


def report(rows: Rows) -> None:
    columns = ("source", "model", "way", "largest batch", "throughput")
    print_rows(rows.newest().where("throughput"), columns, "each at its largest batch")


def sweeps(quick: bool = False, memory: float = 1.0) -> Sequence[Sweep]:
    priced = [PricedBeams(model) for model in TILES]
    slowed = []
    for cause in CAUSES:
        engines = [PricedBeams(model, cause) for model in TILES]
        slowed.append(Sweep(with_cause, engines, cases(P=PROMPT, R=RESPONSE, cause=cause)))
    return [
        Sweep(
            batches,
            priced,
            cases(P=PROMPT, R=RESPONSE),
            measured=cases(P=512, R=64, GB=memory),
            quick_measured=cases(P=48, R=4, GB=memory),
        ),
        *slowed,
        Sweep(caches, priced, cases(BS=(1, 2, 4, 8, 16, 32, 64))),
        Sweep(room, priced, [{}]),
    ]


STUDY = Study(
    "segment_throughput",
    __doc__,
    sweeps,
    units={"memory": "GB", ROOM: "GB", "largest batch": "prompts", "peak": "MB"}
    | {"throughput": "tokens/s", "gain": "x"},
    title=(
        f"Segment KV Fig 4, 9: BW = {WIDTH}; predictions: {TILE.name}, prompt {PROMPT}, response"
        f" {RESPONSE}"
    ),
    panels=[
        *(
            Panel("model", name, "way", "bars", colours=COLOURS)
            for name in ("throughput", "largest batch")
        ),
        Panel(("model", "which"), "gain", kind="bars", title=GAIN, where={"cause": None}),
        Panel("cause", "gain", "which", "bars", title=GAIN, where={"model": "four models"}),
        Panel(
            "BS",
            "memory",
            "cache",
            facet="model",
            title="(Fig 4) response 1024",
            log="xy",
            colours=COLOURS,
            rule=ROOM,
        ),
    ],
    columns=4,
    paper={
        **{f"sk_kv_{cache}": ("memory", {**STATED, "cache": cache}) for cache in CACHES},
        "sk_throughput_low": ("gain", {"which": "smallest", "cause": None}),
        "sk_throughput_high": ("gain", {"which": "largest", "cause": None}),
    },
    derive=extremes,
    claims=lambda rows: {"segments gain on every model": bounded(rows, "gain", 4, 100)},
    shown=lambda row, _: (
        "which" in row or row["source"] == "measured" or STATED.items() <= row.items()
    ),
    report=report,
    flags={"memory": Flag("", 1.0, 0.02, measure=True)},
    **MEASURED,
)

if __name__ == "__main__":
    STUDY.main()
