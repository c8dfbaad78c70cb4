"""The segment KV paper's set-ups: its GPU, its models, and the three ways that are compared.

    segment        the paper's cache: the prompt once, the response in segments, a table
    standard       in the same engine: everything for each beam, concatenated and reordered
    transformers   the paper's baseline: as standard, and prompts are repeated before the prefill

The paper's GPU is one tile of an Intel Data Center GPU Max 1550. We know no measurements of these
models on it. So we borrow two numbers from the A6000: the tile of 128 rows, and the share of the
peak that products reach, 0.77. (Argonne measured 263 TFLOPS on a tile with 56 active cores. That is
0.72 of their 367.) We do not borrow the bandwidth. The paper's 1000 GB/s are "effective", a
measured rate: nothing is taken off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batch import Batch, Chunk
from configs import GPUS, LINKS, MODELS, ModelConfig
from configs.constants import VIDUR
from experiments.lib import look
from experiments.lib.rows import Row, Rows, print_rows
from more.beam.cost import BeamCostModel, cache_bytes, make_beams
from more.beam.request import STEP, segment_length

TILE = GPUS["max-1550-tile"]
TILES = {"gptj-6b": 1, "llama2-13b": 1, "opt-30b": 2, "bloom-176b": 8}  # Sec 4; tensor parallel
LINK = {1: "xe-tiles", 2: "xe-tiles", 8: "max-1550-cards"}
WIDTH = 4  # BW
TOKENS = ("first token", "next token")
# Operators of a layer that transformers runs beside the nine that the paper fuses them to, counted
# in version 5 (segment_fused.py; the paper's 4.31 is older). Each takes an A100's launch of a small
# kernel: the tile's is not known.
UNFUSED = 38 - 9
# What might make transformers slower: how many old caches its allocator holds and cannot use again.
# That this happens is the paper's (Sec 3.2); how many is our guess.
UNFUSED_ALONE = "unfused operators"
CAUSES = {
    UNFUSED_ALONE: 0,
    f"{UNFUSED_ALONE} + 1 stale cache": 1,
    f"{UNFUSED_ALONE} + 2 stale caches": 2,
}


@dataclass(frozen=True)
class Way:
    cache: str
    expanded: bool
    colour: str


WAYS = {
    "segment": Way("segment", False, look.COLOURS["blue"]),
    "standard": Way("standard", False, look.COLOURS["orange"]),
    "transformers": Way("standard", True, look.COLOURS["vermilion"]),
}
COLOURS = {name: way.colour for name, way in WAYS.items()}
OURS = "segment"
THEIRS = "transformers"


class Latency(NamedTuple):
    """Seconds of a token of all requests of a batch; next: the mean from the second to the last."""

    first: float
    next: float


class PricedBeams:
    """Beam searches of a model, priced for the tiles that the paper gives it.

    `RealBeams` of lib/beam_engines.py has the same methods, but for `first_token`.
    """

    def __init__(self, model: str, cause: str | None = None) -> None:
        """cause: one of CAUSES, of what makes transformers slower or larger."""
        self.cause = cause
        self.model = model
        self.config = MODELS[model]
        self.tiles = TILES[model]
        self.hardware = TILE.name if self.tiles == 1 else f"{self.tiles} x {TILE.name}"
        options = {"tp": self.tiles, "link": LINKS[LINK[self.tiles]]}
        self.costs = {
            way: BeamCostModel(self.config, TILE, expanded=each.expanded, **options)
            for way, each in WAYS.items()
        }
        self.cost_model = self.costs[OURS]

    def unfused(self, way: str, rows: int) -> float:
        """Seconds of all layers' operators that transformers runs beside the fused ones."""
        if way != THEIRS or not self.cause:
            return 0.0
        moved = 2 * rows * self.config.hidden * 2 / TILE.bandwidth  # H values, read and written
        return self.config.n_layer * UNFUSED * (VIDUR["launch"] + moved)

    def first_token(self, way: str, batch_size: int, width: int, prompt: int) -> float:
        """Seconds of the prefill, whole, of all requests together."""
        beams = make_beams(WAYS[way].cache, batch_size, width, prompt, 0)
        seconds = self.costs[way].seconds(Batch([Chunk(beam, 0, prompt) for beam in beams], []))
        return seconds + self.unfused(way, batch_size * width * prompt)

    def search(self, way: str, batch_size: int, width: int, prompt: int, response: int) -> Latency:
        steps = range(1, response)
        cost = self.costs[way]
        decodes = [make_beams(WAYS[way].cache, batch_size, width, prompt, n) for n in steps]
        following = sum(cost.seconds(Batch([], beams)) for beams in decodes) / len(steps)
        following += self.unfused(way, batch_size * width)
        return Latency(self.first_token(way, batch_size, width, prompt), following)

    def largest_batch(
        self, way: str, width: int, prompt: int, response: int, memory: float | None = None
    ) -> tuple[int, dict[int, float]]:
        """BS_max: prompts whose searches fit the tiles, beside the weights; copies are counted.

        Nothing is left for activations. Real systems fit fewer. memory: GB that a real engine may
        take. Also returns what was tried, as `RealBeams` does: here, nothing.
        """
        free = self.tiles * TILE.memory - 2 * self.config.parameters
        each = cache_bytes(self.config, WAYS[way].cache, 1, width, prompt, response)
        twice = temporary_bytes(self.config, way, width, prompt, response)
        stale = CAUSES.get(self.cause, 0) * each
        theirs = free // (each + twice + stale)
        return int(theirs if way == THEIRS else (free - twice) // each), {}


def latencies(
    engine: PricedBeams, P: int, R: int, BW: int, ways: Sequence[str] = tuple(WAYS)
) -> list[Row]:
    """ms of both tokens of one search in each way. gain: THEIRS over OURS. engine: or real."""
    seen = {way: engine.search(way, 1, BW, P, R) for way in ways}
    rows: list[Row] = [
        {"way": way, "token": token, "latency": 1e3 * seconds}
        for way, latency in seen.items()
        for token, seconds in zip(TOKENS, latency, strict=True)
    ]
    if THEIRS in seen:
        for row, ours, theirs in zip(rows, seen[OURS], seen[THEIRS], strict=False):
            row["gain"] = theirs / ours
    return rows


def temporary_bytes(model: ModelConfig, way: str, width: int, prompt: int, response: int) -> int:
    """Bytes of a search that are in memory twice, at worst, while caches are copied.

    transformers (4.31): all, of each search. The old cache of every layer lives until the new one
    is complete. Ours copy one search at a time (more/beam/memory.py). standard: one layer's keys.
    segment: the keys of all layers, then the values. That is half of the response, without its
    newest steps.
    """
    if way != OURS:
        twice = cache_bytes(model, WAYS[way].cache, 1, width, prompt, response)
        return twice if way == THEIRS else twice // (2 * model.n_layer)
    old = width * (segment_length(response) - STEP)
    return old * model.kv_bytes_per_token() // 2


def print_latencies(rows: Rows, keys: Sequence[str]) -> None:
    """A table for each source and token: a line for each value of these keys."""
    for source, seen in rows.newest().where("latency").by("source").items():
        for token, own in seen.by("token").items():
            table = own.across("way", "latency")
            for row in table:
                row["ratio"] = row[THEIRS] / row[OURS] if THEIRS in row else None
            title = f"{source}, {own[0]['hardware']}: {token}, ms; ratio: {THEIRS} over {OURS}"
            print_rows(table, (*keys, *WAYS, "ratio"), title)
