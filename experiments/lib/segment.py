"""The segment KV paper's set-ups: its GPU, its models, and the ways that are compared.

    segment        the paper's cache: the prompt once, the response in segments, a table
    standard       in the same engine: everything for each beam, concatenated and reordered
    transformers   as standard, and prompts are repeated before the prefill: the paper's baseline

The paper's GPU is one tile of an Intel Data Center GPU Max 1550. We know no measurements of these
models on it that a fit could use. So the share of its peak that products reach is borrowed from the
A6000, and so is the tile of 128 rows. (That share is 0.77. Argonne measured 263 TFLOPS on a tile
with 56 active cores, 0.72 of their 367.) Its bandwidth is not borrowed. The paper's 1000 GB/s
are "effective", a measured rate: nothing is taken off.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt

from batch import Batch, Chunk
from beam.cost import BeamCostModel, cache_bytes, make_beams
from beam.request import STEP, segment_length
from configs import GPUS, LINKS, MODELS, ModelConfig
from experiments.lib.common import Point, curves, print_table, three_digits
from experiments.lib.look import COLOURS

TILE = GPUS["max-1550-tile"]
TILES = {"gptj-6b": 1, "llama2-13b": 1, "opt-30b": 2, "bloom-176b": 8}  # Sec 4; tensor parallel
LINK = {1: "xe-tiles", 2: "xe-tiles", 8: "max-1550-cards"}
WIDTH = 4  # BW
SCORE_BYTES = 24  # see `scores_seconds`


@dataclass(frozen=True)
class Way:
    cache: str
    expanded: bool
    colour: str
    marker: str


WAYS = {
    "segment": Way("segment", False, COLOURS["blue"], "o"),
    "standard": Way("standard", False, COLOURS["orange"], "^"),
    "transformers": Way("standard", True, COLOURS["vermilion"], "D"),
}
OURS, THEIRS = "segment", "transformers"


def cost_model(model: str, way: str) -> BeamCostModel:
    tiles = TILES[model]
    link = LINKS[LINK[tiles]]
    return BeamCostModel(MODELS[model], TILE, tp=tiles, link=link, expanded=WAYS[way].expanded)


def hardware(model: str) -> str:
    tiles = TILES[model]
    return TILE.name if tiles == 1 else f"{tiles} x {TILE.name}"


def first_token(model: str, way: str, batch_size: int, width: int, prompt: int) -> float:
    """Seconds of the prefill, whole, of all requests together."""
    beams = make_beams(WAYS[way].cache, batch_size, width, prompt, 0)
    batch = Batch([Chunk(request, 0, prompt) for request in beams], [])
    return cost_model(model, way).seconds(batch)


def next_token(
    model: str, way: str, batch_size: int, width: int, prompt: int, response: int
) -> float:
    """Seconds of a decode of all requests together: the mean from the second token to the last."""
    cost, cache = cost_model(model, way), WAYS[way].cache
    steps = range(1, response)
    seconds = 0.0
    for step in steps:
        seconds += cost.seconds(Batch([], make_beams(cache, batch_size, width, prompt, step)))
    return seconds / len(steps)


def temporary_bytes(
    model: ModelConfig, way: str, batch_size: int, width: int, prompt: int, response: int
) -> int:
    """Bytes of a batch that are in memory twice, at worst, while caches are copied.

    transformers (4.31): all, for the old cache of every layer lives until the new one is complete.
    Ours copy one search at a time, whatever the batch (beam/memory.py). standard: one layer's keys.
    segment: the keys of all layers, then the values: half of the response, but for its newest
    steps.
    """
    cache = WAYS[way].cache
    if way == "transformers":
        return cache_bytes(model, cache, batch_size, width, prompt, response)
    if way == "standard":
        return cache_bytes(model, cache, 1, width, prompt, response) // (2 * model.n_layer)
    old = width * (segment_length(response) - STEP)
    return old * model.kv_bytes_per_token() // 2


def largest_batch(model: str, way: str, width: int, prompt: int, response: int) -> int:
    """BS_max: prompts whose searches fit the tiles, beside the weights; copies are counted.

    Nothing is left for activations, so that real systems fit fewer.
    """
    config = MODELS[model]
    free = TILES[model] * TILE.memory - 2 * config.parameters
    each = cache_bytes(config, WAYS[way].cache, 1, width, prompt, response)
    twice = temporary_bytes(config, way, 1, width, prompt, response)
    return int(free // (each + twice) if way == THEIRS else (free - twice) // each)


def scores_seconds(model: str, batch_size: int, width: int, prompt: int) -> float:
    """Seconds in which `transformers` 4.31 writes and reads the scores of a prefill, LLaMA's code.

    Our cost model has fused attention, for both ways. Unfused, each score is in memory after each
    operator: product (write 2 bytes), scale (read 2, write 2), mask (2, 2), softmax in float32 (2,
    4), back to fp16 (4, 2), product (read 2). These are the 24 bytes.
    """
    config = MODELS[model]
    scores = config.n_layer * config.n_head * batch_size * width * prompt**2 // TILES[model]
    return SCORE_BYTES * scores / TILE.bandwidth


def prefill_peak(config: ModelConfig, width: int, prompt: int) -> int:
    """Bytes that a prefill of one prompt needs at least in `transformers` 4.31, LLaMA's code.

    Weights, the repeated prompt's cache, and one layer's scores: in fp16 before the softmax, in
    float32 as it ends, and in fp16 again: 8 bytes each.
    """
    cache = width * prompt * config.kv_bytes_per_token()
    return 2 * config.parameters + cache + 8 * config.n_head * width * prompt**2


def print_beside(points: Sequence[Point], series: Sequence[str]) -> None:
    """A row for each series of one number: the paper's, the predicted, the newest measured one."""
    found = {source: curves(points, source) for source in ("paper", "predicted", "measured")}
    rows = []
    for name in series:
        own = [each[name][0] if name in each else None for each in found.values()]
        unit = next((point.y_unit for point in own if point), "")
        rows.append([name, *[three_digits(point.y) if point else "-" for point in own], unit])
    print_table(["what", *found, "unit"], rows)


def plain_log(axes: plt.Axes) -> None:
    """A logarithmic y axis with plain numbers: 1, 3, 10, ..."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    places = [step * 10.0**power for power in range(-4, 8) for step in (1, 3)]
    places = [y for y in places if low <= y <= high]
    axes.set_yticks(places, [f"{y:g}" for y in places])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)


def say(*sentences: str) -> None:
    """Prints a paragraph that fits a terminal."""
    print("\n" + textwrap.fill(" ".join(sentences), 98))
