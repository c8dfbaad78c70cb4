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

import enter  # noqa: F401

from dataclasses import replace

import matplotlib.pyplot as plt

from batch import Batch, Request
from beam.cost import cache_bytes
from beam.request import CACHES, BeamSearchParams
from configs import MODELS
from experiments.lib import common, look, measuring
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure, Scale
from experiments.lib.segment import TILE, TILES, WAYS, WIDTH, say
from loop import Result
from scheduler import make_scheduler

LENGTH = 1024  # tokens of the prompt, and of the response
STATED = "gptj-6b", 32  # the paper states numbers of this model at this BS
SHARE = "segment of standard"
MISS = "more than the formula"
BARS = {"standard": -0.2, "segment": 0.2}  # cache: place of its bar beside the tick


def gigabytes(model: str, cache: str, batch_size: int) -> float:
    return cache_bytes(MODELS[model], cache, batch_size, WIDTH, LENGTH, LENGTH) / 1e9


def predict(quick: bool) -> list[Point]:
    points: list[Point] = []
    for model in TILES:
        record = Record("segment_memory", model, "any hardware")
        for cache in CACHES:
            for size in (1, 32) if quick else (1, 2, 4, 8, 16, 32, 64):
                record.add(f"{model}, {cache}", gigabytes(model, cache, size), "GB", size, "BS")
        share = 100 * gigabytes(model, "segment", 1) / gigabytes(model, "standard", 1)
        record.add(f"{model}, {SHARE}", share, "%")
        points += record
    return points


def largest_bytes(llm: "measuring.LLM", cache: str, batch_size: int, length: int) -> int:
    """Bytes of all K and V, when they are most. length: tokens of prompt, and of response."""
    import torch  # predicting needs none of these

    from beam.executor import enable_beams
    from beam.outputs import beam_requests
    from executor import ModelExecutor
    from loop import Loop

    llm.resize_cache(batch_size, length)
    llm.model.reach(2 * length)  # the response follows the prompt
    scheduler = make_scheduler("request_level", batch_size, length)
    loop = Loop(scheduler, ModelExecutor(llm.model, llm.cache, llm.attend))
    enable_beams(loop, llm.attention)
    prompts = [Request(i, [1 + i] * length, length) for i in range(batch_size)]
    params = BeamSearchParams(WIDTH, length, ignore_eos=True)
    for request in beam_requests(prompts, params, cache, llm.config, llm.cache):
        loop.add(request)
    execute, held = loop.executor.execute, []

    def watched(batch: Batch) -> Result:
        """The last iteration frees all: look before that."""
        result = execute(batch)
        prompt = llm.cache.bytes if cache == "segment" else 0
        held.append(prompt + sum(memory.bytes for memory in loop.executor.memories.values()))
        return result

    loop.executor.execute = watched
    with llm.surroundings(), torch.inference_mode():
        loop.run()
    return max(held)


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    record, (length,) = Record("segment_memory", *measuring.measured_on(llm)), scale.lengths
    name, bytes_per_value = llm.config.name, llm.dtype.itemsize
    for size in common.progress(scale.batch_sizes, "batch sizes"):
        found = {cache: largest_bytes(llm, cache, size, length) for cache in CACHES}
        for cache, held in found.items():
            formula = cache_bytes(llm.config, cache, size, WIDTH, length, length, bytes_per_value)
            record.add(f"{name}, {cache}", held / 1e6, "MB", size, "BS")
            record.add(f"{name}, {cache}, {MISS}", 100 * (held / formula - 1), "%", size, "BS")
    record.add(f"{name}, {SHARE}", 100 * found["segment"] / found["standard"], "%")
    record.add("prompt, and response", length, "tokens")
    return record


def formulas(found: dict[str, list[Point]], model: str) -> dict[tuple[str, float], float]:
    """MB by the formula, of what was measured, by series and batch size."""
    every = {}
    for series in (f"{model}, {cache}" for cache in CACHES):
        for held, miss in zip(found[series], found[f"{series}, {MISS}"], strict=True):
            every[series, held.x] = held.y / (1 + miss.y / 100)
    return every


def draw_caches(
    axes: plt.Axes,
    found: dict[str, list[Point]],
    model: str,
    marks: dict[tuple[str, float], float],
    **style: object,
) -> None:
    """Bars of both caches at each batch size, some of them marked.

    found: points by series. marks: heights by series and batch size. style: of the marks.
    """
    for cache, shift in BARS.items():
        series = f"{model}, {cache}"
        bars = {point.x: place + shift for place, point in enumerate(found[series])}
        heights = [point.y for point in found[series]]
        axes.bar(bars.values(), heights, 0.4, color=WAYS[cache].colour, label=cache)
        axes.set_xticks(range(len(bars)), [f"{size:g}" for size in bars])
        marked = [size for size in bars if (series, size) in marks]
        if marked:
            tops = [marks[series, size] for size in marked]
            axes.plot([bars[size] for size in marked], tops, **style)
            style["label"] = None  # one line of the legend is enough
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("batch size BS")
    axes.legend(loc="upper left")


def draw(points: list[Point]) -> plt.Figure:
    found, measured = curves(points, "predicted"), curves(points, "measured")
    paper = common.values_at(points, "paper")
    figure, [grid] = look.panels(1, len(TILES) + bool(measured), 5, 6.5)
    for axes, (model, tiles) in zip(grid, TILES.items(), strict=False):
        for count in sorted({1, tiles}):
            memory, line = count * TILE.memory / 1e9, ":" if count > 1 else "--"
            label = f"memory of {count} tile{'s' if count > 1 else ''}: {memory:g} GB"
            axes.axhline(memory, color="black", linestyle=line, label=label)
        draw_caches(axes, found, model, paper, **look.STAR, label="paper")
        axes.set_title(model)
    grid[0].set_ylabel("KV cache (GB)")
    if measured:
        (length,), axes = measured["prompt, and response"], grid[-1]
        mark = look.STAR | {"marker": "_", "color": "black", "markersize": 16, "zorder": 2}
        draw_caches(
            axes, measured, length.model, formulas(measured, length.model), **mark, label="formula"
        )
        machine = length.hardware.replace(" (", "\n(")
        title = f"measured: {length.model}, {length.y:g} + {length.y:g} tokens\n{machine}"
        axes.set_title(title, fontsize=13)
        axes.set_ylabel("KV cache (MB)")
    formula = f"predicted by formula for {LENGTH} + {LENGTH} tokens, fp16"
    title = f"Segment KV Fig 4: cache of a beam search, BW = {WIDTH}; {formula}"
    figure.suptitle(title, fontsize=18)
    return figure


def print_measured(found: dict[str, list[Point]]) -> None:
    """Beside the formulas, which are the prediction here; the paper does not have these models."""
    (length,), rows = found["prompt, and response"], []
    for (series, size), formula in formulas(found, length.model).items():
        held = next(point.y for point in found[series] if point.x == size)
        cells = [f"{formula:.2f}", f"{held:.2f}", f"{100 * (held / formula - 1):+.2f} %"]
        rows.append([series.removeprefix(f"{length.model}, "), f"{size:g}", "-", *cells])
    title = f"{length.model} on {length.hardware}; {length.y:g} + {length.y:g} tokens, MB"
    header = ["cache", "BS", "paper", "predicted", "measured", "difference"]
    common.print_table(header, rows, title)
    say(
        "The last output token is never an input: its K and V are never written. Standard lacks",
        f"them: 1 token of {2 * length.y:g}. Segment has a place for them, unless a segment would",
        "begin with it. Our standard cache also leaves each prompt in its slot, which is not",
        f"counted: {100 / (2 * WIDTH):g} % more at these lengths.",
    )


def report(points: list[Point]) -> None:
    measured, (model, size) = curves(points, "measured"), STATED
    if measured:
        print_measured(measured)
    config = MODELS[model]
    real = replace(config, name="real", n_layer=28, n_head=16, n_kv_head=16, head_dim=256)
    sizes = []
    for cache in BARS:
        held = cache_bytes(real, cache, size, WIDTH, LENGTH, LENGTH)
        sizes.append(f"{held / 1e9:.1f} GB ({cache})")
    say(
        f"The paper rounds. Its {model} has 32 layers and 32 heads of 128. The real one has 28",
        f"layers and 16 heads of 256, and would take {' and '.join(sizes)}.",
    )


FIGURE = Figure(
    name="segment_memory",
    description=__doc__,
    paper={f"sk_kv_{cache}": (f"{STATED[0]}, {cache}", STATED[1]) for cache in BARS},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(128,), batch_sizes=(1, 2, 4, 8), repeats=1),
    quick_scale=Scale(lengths=(34,), batch_sizes=(1, 2), repeats=1),
    shown=lambda point: point.series.endswith(SHARE) or point.x == STATED[1],
    report=report,
)


main = FIGURE.main

if __name__ == "__main__":
    main()
