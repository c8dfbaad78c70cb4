"""Segment KV, Fig 4: bytes of the two KV caches of a beam search, four models, by batch size.

    python experiments/segment_memory.py              computed: formulas (1) to (3); seconds
    python experiments/segment_memory.py --measure    and the real engine on this machine

Prompt and response have 1024 tokens each, BW = 4, fp16, at the last step. Standard holds everything
for each beam. Segment holds the prompt once, and the response in segments of 16 steps. GB are 10^9
bytes, as the paper's are. The formulas count the caches alone: no weights, no temporary copies.

What is measured are the bytes of the tensors that hold K and V, in a loop that runs the searches
for real: summed at the end of each iteration, and the largest of them. Segment: the slots that the
prompts lie in, and the responses. Standard: the copies of all beams.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Request
from beam.cost import cache_bytes
from beam.request import CACHES, BeamSearchParams
from cli import run_main
from configs import MODELS
from experiments.lib.common import Point, curves, print_table, progress
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import measured_title, star
from experiments.lib.measuring import measured_on
from experiments.lib.segment import TILE, TILES, WAYS, WIDTH, say
from scheduler import make_scheduler

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

LENGTH = 1024  # tokens of the prompt, and of the response
STATED = "gptj-6b", 32  # the paper states numbers of this model at this BS
SHARE = "segment of standard"
MISS = "more than the formula"
prediction = partial(Point, "segment_memory", source="predicted", hardware="any hardware")


def gigabytes(model: str, cache: str, batch_size: int) -> float:
    return cache_bytes(MODELS[model], cache, batch_size, WIDTH, LENGTH, LENGTH) / 1e9


def predict(quick: bool) -> list[Point]:
    points, sizes = [], (1, 32) if quick else (1, 2, 4, 8, 16, 32, 64)
    for model in TILES:
        for cache in CACHES:
            for size in sizes:
                y = gigabytes(model, cache, size)
                points.append(prediction(f"{model}, {cache}", size, "BS", y, "GB", model=model))
        share = 100 * gigabytes(model, "segment", 1) / gigabytes(model, "standard", 1)
        points.append(prediction(f"{model}, {SHARE}", 0, "", share, "%", model=model))
    return points


def largest_bytes(llm: "LLM", cache: str, batch_size: int, length: int) -> int:
    """Bytes of all K and V, when they are most. length: tokens of prompt, and of response."""
    import torch  # predicting needs none of these

    from beam.executor import enable_beams
    from beam.outputs import beam_requests
    from executor import ModelExecutor
    from loop import Loop

    llm.resize_cache(batch_size, length)
    loop = Loop(
        make_scheduler("request_level", batch_size, length),
        ModelExecutor(llm.model, llm.cache, llm.attend),
    )
    enable_beams(loop, llm.attention)
    prompts = [Request(i, [1 + i] * length, length) for i in range(batch_size)]
    params = BeamSearchParams(WIDTH, length, ignore_eos=True)
    for request in beam_requests(prompts, params, cache, llm.config, llm.cache):
        loop.add(request)
    execute, most = loop.executor.execute, 0

    def watched(batch):  # the last iteration frees all: look before that
        nonlocal most
        result = execute(batch)
        held = sum(memory.bytes for memory in loop.executor.memories.values())
        most = max(most, held + (llm.cache.bytes if cache == "segment" else 0))
        return result

    loop.executor.execute = watched
    with llm.surroundings(), torch.inference_mode():
        loop.run()
    return most


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    (length,), model, points = scale.lengths, llm.config, []
    what, _, hardware = measured_on(llm)
    point = partial(Point, "segment_memory", source=what, model=model.name, hardware=hardware)
    for size in progress(scale.batch_sizes, "batch sizes"):
        found = {cache: largest_bytes(llm, cache, size, length) for cache in CACHES}
        for cache, held in found.items():
            shape = model, cache, size, WIDTH, length, length, llm.dtype.itemsize
            miss = 100 * (held / cache_bytes(*shape) - 1)
            series = f"{model.name}, {cache}"
            points.append(point(series, size, "BS", held / 1e6, "MB"))
            points.append(point(f"{series}, {MISS}", size, "BS", miss, "%"))
    share = 100 * found["segment"] / found["standard"]
    points.append(point(f"{model.name}, {SHARE}", 0, "", share, "%"))
    points.append(point("prompt, and response", 0, "", length, "tokens"))
    return points


def print_measured(points: list[Point]) -> None:
    """Beside the formulas, which are the prediction here; the paper has these models not."""
    found = curves(points, "measured")
    if not found:
        return
    (length,) = found["prompt, and response"]
    table = []
    for cache in CACHES:
        series = f"{length.model}, {cache}"
        for held, miss in zip(found[series], found[f"{series}, {MISS}"], strict=True):
            formula = held.y / (1 + miss.y / 100)
            cells = [f"{formula:.2f}", f"{held.y:.2f}", f"{miss.y:+.2f} %"]
            table.append([cache, f"{held.x:g}", "-", *cells])
    print(f"\n{length.model} on {length.hardware}; {length.y:g} + {length.y:g} tokens, MB\n")
    print_table(["cache", "BS", "paper", "predicted", "measured", "difference"], table)
    say(
        "The last output token is never an input: its K and V are never written. Standard lacks"
        f" them: 1 token of {2 * length.y:g}. Segment has a place for them, unless a segment would"
        " begin with it. Our standard cache also leaves each prompt in its slot, which is not"
        f" counted: {100 / (2 * WIDTH):g} % more at these lengths."
    )


def draw_caches(axes: plt.Axes, found: dict[str, list[Point]], model: str) -> None:
    """Bars of both caches at each batch size. found: points by series."""
    for number, cache in enumerate(("standard", "segment")):
        curve = found[f"{model}, {cache}"]
        places = [place + 0.4 * (number - 0.5) for place in range(len(curve))]
        heights = [point.y for point in curve]
        axes.bar(places, heights, 0.4, color=WAYS[cache].colour, label=cache)
        axes.set_xticks(range(len(curve)), [f"{point.x:g}" for point in curve])
    axes.grid(axis="x", visible=False)


def draw_measured(axes: plt.Axes, found: dict[str, list[Point]], title: str) -> None:
    """Bars as they were measured, and the formula as a mark on each."""
    (length,) = found["prompt, and response"]
    draw_caches(axes, found, length.model)
    for number, cache in enumerate(("standard", "segment")):
        series = f"{length.model}, {cache}"
        pairs = zip(found[series], found[f"{series}, {MISS}"], strict=True)
        heights = [held.y / (1 + miss.y / 100) for held, miss in pairs]
        places = [place + 0.4 * (number - 0.5) for place in range(len(heights))]
        label = "formula" if number == 0 else None
        axes.plot(places, heights, "_", color="black", markersize=16, label=label)
    machine, _, dtype = title.rpartition(", ")
    model, _, machine = machine.partition("\n")
    machine = machine.replace(" (", "\n(")
    axes.set_title(f"{model}, {length.y:g} + {length.y:g} tokens\n{machine}, {dtype}", fontsize=13)
    axes.set(xlabel="batch size BS", ylabel="KV cache (MB)")
    axes.legend(loc="upper left")


def draw(points: list[Point]) -> plt.Figure:
    found, paper = curves(points, "predicted"), curves(points, "paper")
    measured = curves(points, "measured")
    count = len(TILES) + bool(measured)
    figure, panels = plt.subplots(1, count, figsize=(5 * count, 6.5), layout="constrained")
    for axes, (model, tiles) in zip(panels, TILES.items(), strict=False):
        draw_caches(axes, found, model)
        for count, line in {1: "--", tiles: ":"}.items():
            y = count * TILE.memory / 1e9
            label = f"memory of {count} tile{'s' if count > 1 else ''}: {y:g} GB"
            axes.axhline(y, color="black", linestyle=line if tiles > 1 else "--", label=label)
        for number, cache in enumerate(("standard", "segment")):
            sizes = [point.x for point in found[f"{model}, {cache}"]]
            for point in paper.get(f"{model}, {cache}", []):
                place = sizes.index(point.x) + 0.4 * (number - 0.5)
                star(axes, place, point.y, label="paper" if number == 0 else None)
        axes.set(xlabel="batch size BS", title=model)
        axes.legend(loc="upper left")
    panels[0].set_ylabel("KV cache (GB)")
    if measured:
        draw_measured(panels[-1], measured, measured_title(points))
    figure.suptitle(
        f"Segment KV Fig 4: cache of a beam search, BW = {WIDTH}; predicted by formula for {LENGTH}"
        f" + {LENGTH} tokens, fp16",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="segment_memory",
    description=__doc__,
    paper={
        f"sk_kv_{cache}": (f"{STATED[0]}, {cache}", STATED[1]) for cache in ("standard", "segment")
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(128,), batch_sizes=(1, 2, 4, 8), repeats=1),
    quick_scale=Scale(lengths=(34,), batch_sizes=(1, 2), repeats=1),
    shown=lambda point: point.series.endswith(SHARE) or point.x == STATED[1],
)


def main() -> None:
    points = run_figure(FIGURE)
    print_measured(points)
    model, size = STATED
    config = MODELS[model]
    real = replace(config, name="real", n_layer=28, n_head=16, n_kv_head=16, head_dim=256)
    sizes = [
        f"{cache_bytes(real, cache, size, WIDTH, LENGTH, LENGTH) / 1e9:.1f} GB ({cache})"
        for cache in ("standard", "segment")
    ]
    say(
        f"The paper rounds. Its {model} has 32 layers and 32 heads of 128. The real one has 28"
        f" layers and 16 heads of 256, and would take {' and '.join(sizes)}.",
    )


if __name__ == "__main__":
    run_main(main)
