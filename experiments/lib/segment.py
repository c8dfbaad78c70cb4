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

import textwrap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import matplotlib.pyplot as plt

from batch import Batch, Chunk
from beam.cost import BeamCostModel, cache_bytes, make_beams
from beam.request import STEP, segment_length
from configs import GPUS, LINKS, MODELS, ModelConfig
from experiments.lib.common import Point, newest_measured, print_comparison
from experiments.lib.look import COLOURS

TILE = GPUS["max-1550-tile"]
TILES = {"gptj-6b": 1, "llama2-13b": 1, "opt-30b": 2, "bloom-176b": 8}  # Sec 4; tensor parallel
LINK = {1: "xe-tiles", 2: "xe-tiles", 8: "max-1550-cards"}
WIDTH = 4  # BW
SCORE_BYTES = 24  # see `scores_seconds`
TOKENS = ("first token", "next token")


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

# ---------------------------------------------------------------------------------------- predicted


def cost_model(model: str, way: str) -> BeamCostModel:
    tiles, expanded = TILES[model], WAYS[way].expanded
    return BeamCostModel(MODELS[model], TILE, tp=tiles, link=LINKS[LINK[tiles]], expanded=expanded)


def hardware(model: str) -> str:
    return TILE.name if TILES[model] == 1 else f"{TILES[model]} x {TILE.name}"


def first_token(model: str, way: str, batch_size: int, width: int, prompt: int) -> float:
    """Seconds of the prefill, whole, of all requests together."""
    beams = make_beams(WAYS[way].cache, batch_size, width, prompt, 0)
    batch = Batch([Chunk(request, 0, prompt) for request in beams], [])
    return cost_model(model, way).seconds(batch)


def next_token(
    model: str, way: str, batch_size: int, width: int, prompt: int, response: int
) -> float:
    """Seconds of a decode of all requests together: the mean from the second token to the last."""
    cost, cache, steps = cost_model(model, way), WAYS[way].cache, range(1, response)
    decodes = [make_beams(cache, batch_size, width, prompt, step) for step in steps]
    return sum(cost.seconds(Batch([], beams)) for beams in decodes) / len(steps)


def latencies(model: str, way: str, width: int, prompt: int, response: int) -> dict[str, float]:
    """ms of the first and of the next token (TOKENS), for one prompt."""
    first = first_token(model, way, 1, width, prompt)
    following = next_token(model, way, 1, width, prompt, response)
    return dict(zip(TOKENS, (1e3 * first, 1e3 * following), strict=True))


def temporary_bytes(
    model: ModelConfig, way: str, batch_size: int, width: int, prompt: int, response: int
) -> int:
    """Bytes of a batch that are in memory twice, at worst, while caches are copied.

    transformers (4.31): all. The old cache of every layer lives until the new one is complete. Ours
    copy one search at a time, whatever the batch (beam/memory.py). standard: one layer's keys.
    segment: the keys of all layers, then the values. That is half of the response, without its
    newest steps.
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

    Nothing is left for activations. Real systems fit fewer.
    """
    config = MODELS[model]
    free = TILES[model] * TILE.memory - 2 * config.parameters
    each = cache_bytes(config, WAYS[way].cache, 1, width, prompt, response)
    twice = temporary_bytes(config, way, 1, width, prompt, response)
    return int(free // (each + twice) if way == THEIRS else (free - twice) // each)


def scores_seconds(model: str, batch_size: int, width: int, prompt: int) -> float:
    """Seconds in which `transformers` 4.31 writes and reads the scores of a prefill, LLaMA's code.

    Our cost model has fused attention in all ways. Unfused, each score is in memory after each
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


# ------------------------------------------------------------------------------ tables and pictures

# The columns that `latency_cells` fills: the first token, then the next.
LATENCIES = (*WAYS, "gain", *WAYS, "gain")


def latency_cells(
    times: Mapping[tuple[str, float], float], x: float, prefix: str = ""
) -> list[str]:
    """A table's cells: ms of each way, and transformers over segment.

    times: y by series and x (`values_at`). The series are "PREFIXfirst token, WAY", and so on.
    "PREFIXfirst token, gain", if it is there, is the gain: the median of measured pairs. A way that
    was not run has "-".
    """
    cells = []
    for what in TOKENS:
        found = {way: times.get((f"{prefix}{what}, {way}", x)) for way in WAYS}
        cells += ["-" if ms is None else f"{ms:.1f}" for ms in found.values()]
        ratio = found[THEIRS] / found[OURS] if found[THEIRS] else None
        gain = times.get((f"{prefix}{what}, gain", x), ratio)
        cells.append(f"{gain:.2f}x" if gain else "-")
    return cells


def print_beside(points: Sequence[Point], series: Sequence[str]) -> None:
    """Paper, predicted and newest measured numbers of these series, side by side in one table.

    `print_comparison` would give them a table for each model and machine.
    """
    newest, others = newest_measured(points), [p for p in points if p.source != "measured"]
    chosen = [point for point in others + newest if point.series in series]
    measured = f"; measured: {newest[-1].model} on this machine" if newest else ""
    where = {"model": chosen[0].model, "hardware": f"{TILE.name}{measured}"}
    print_comparison([replace(point, **where) for point in chosen])


def draw_ways(
    axes: plt.Axes,
    groups: Mapping[Hashable, str],
    heights: Mapping[tuple[Hashable, str], float],
    labels: Mapping[tuple[Hashable, str], str],
    fontsize: int = 11,
) -> None:
    """Groups of bars, one for each way.

    groups: what stands below each. heights, labels: of bars, by group and way. fontsize: of these.
    """
    for number, (name, way) in enumerate(WAYS.items()):
        keys = {i: (group, name) for i, group in enumerate(groups) if (group, name) in heights}
        places = [place + 0.27 * (number - 1) for place in keys]
        tops = [heights[key] for key in keys.values()]
        drawn = axes.bar(places, tops, 0.27, color=way.colour, label=name)
        texts = [labels[key] for key in keys.values()]
        axes.bar_label(drawn, texts, padding=2, fontsize=fontsize)
    axes.set_xticks(range(len(groups)), groups.values(), fontsize=12)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", ncols=3)


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
