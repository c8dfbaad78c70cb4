"""Segment KV, Fig 9: throughput of four models, each at the largest batch that the memory holds.

    python experiments/segment_throughput.py              predicted for tiles of the Max 1550
    python experiments/segment_throughput.py --measure    and a small model on this CPU, three
                                                          engines, under --memory GB

Prompts of 1024 tokens, responses of 128, BW = 4. The tiles' memory holds the weights, the caches,
and what is in memory twice while a cache is copied (`segment.temporary_bytes`; all of it, in
transformers). Nothing is left for activations. Throughput is formula (4): BS_max * response /
latency of all, one sequence for each prompt.

What is measured: prompts of 512, a response of 64. The budget bounds what a process takes above
what it holds before the call: caches, their copies and activations, not the weights.
"""

import enter  # noqa: F401

from collections.abc import Sequence

from command.flags import Flag
from experiments.lib.beam_engines import MEASURED, RealBeams
from experiments.lib.claims import Claim, bounded
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.segment import COLOURS, OURS, THEIRS, TILE, TILES, WAYS, WIDTH, PricedBeams
from experiments.lib.study import Panel, Study
from more.beam.cost import throughput

PROMPT, RESPONSE = 1024, 128  # predicted
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
    rows, rates = [], {}
    for way in WAYS:
        size, tried = engine.largest_batch(way, WIDTH, P, R, GB)
        rows += [{"way": way, "BS": n, "peak": peak / 1e6} for n, peak in sorted(tried.items())]
        rows.append({"way": way, "largest batch": size})
        if size:
            rates[way] = rows[-1]["throughput"] = rate(engine, way, size, P, R)
    if OURS in rates and THEIRS in rates:
        rows.append({"gain": rates[OURS] / rates[THEIRS]})
    return rows


def extremes(rows: Rows) -> None:
    """What the paper states of its four models."""
    if rows.sources() == ["predicted"]:
        every, gains = {"model": "four models", "hardware": TILE.name}, rows.column("gain")
        rows.add(rows[0] | every, which="smallest", gain=min(gains))
        rows.add(rows[0] | every, which="largest", gain=max(gains))


def report(rows: Rows) -> None:
    columns = ("source", "model", "way", "largest batch", "throughput")
    print_rows(rows.newest().where("throughput"), columns, "each at its largest batch")


def sweeps(quick: bool = False, memory: float = 1.0) -> Sequence[Sweep]:
    return [
        Sweep(
            batches,
            [PricedBeams(model) for model in TILES],
            cases(P=PROMPT, R=RESPONSE),
            measured=cases(P=512, R=64, GB=memory),
            quick_measured=cases(P=48, R=4, GB=memory),
        )
    ]


STUDY = Study(
    "segment_throughput",
    __doc__,
    sweeps,
    units={"largest batch": "prompts", "peak": "MB", "throughput": "tokens/s", "gain": "x"},
    title=(
        f"Segment KV Fig 9: BW = {WIDTH}; predicted for {TILE.name}, prompt {PROMPT}, response"
        f" {RESPONSE}"
    ),
    panels=[
        *(
            Panel("model", name, "way", "bars", colours=COLOURS)
            for name in ("throughput", "largest batch")
        ),
        Panel(("model", "which"), "gain", kind="bars", title=GAIN),
    ],
    paper={
        "sk_throughput_low": ("gain", {"which": "smallest"}),
        "sk_throughput_high": ("gain", {"which": "largest"}),
    },
    derive=extremes,
    claims=[Claim("segments gain on every model", bounded("gain", 4, 100))],
    shown=lambda row, quantity: "which" in row or row["source"] == "measured",
    report=report,
    flags={"memory": Flag("", 1.0, 0.02, measure=True)},
    **MEASURED,
)

if __name__ == "__main__":
    STUDY.main()
