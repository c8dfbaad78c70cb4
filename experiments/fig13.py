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

from dataclasses import replace

import matplotlib.pyplot as plt

from batch import Request
from experiments.lib import look, measuring, steady
from experiments.lib.common import SPREAD, Point, Record, curves, progress, series_options
from experiments.lib.figure import Figure, Scale
from experiments.lib.steady import BATCH_SIZES, balanced
from timeline import Trace

MODEL, GPU = "llama-13b", "a6000"
CHUNK_SIZES = (64, 128, 256, 320, 512)
PARTS = {
    "attention": "attention time, chunked / whole",
    "prefill": "prefill time, chunked / whole",
    "end to end": "throughput / baseline's",
}


def attention_and_all(trace: Trace) -> dict[str, float]:
    """Seconds of the attention and of everything in a run with operator times."""
    return {
        "attention": sum(iteration.operators["attn"] for iteration in trace.iterations),
        "prefill": sum(sum(iteration.operators.values()) for iteration in trace.iterations),
    }


def predicted_prefill(length: int, policy: str, chunk_size: int) -> dict[str, float]:
    prompt = [Request(0, range(length), 1)]
    return attention_and_all(steady.simulate_operators(prompt, policy, chunk_size, 1, MODEL, GPU))


def predict(quick: bool) -> list[Point]:
    record = Record("fig13", MODEL, GPU)
    # the paper's text names no length: the largest of the three, as its bounds and "up to" mean
    largest: dict[str, dict[int, float]] = {part: dict.fromkeys(CHUNK_SIZES, 0) for part in PARTS}
    for length, batch_size in progress(list(BATCH_SIZES.items()), "predicting"):
        whole = predicted_prefill(length, "orca", 1)
        for size in CHUNK_SIZES:
            chunked = predicted_prefill(length, "sarathi", size)
            work = balanced(length, batch_size, size)
            gain = steady.predicted_gain(work, "sarathi", size, MODEL, GPU)
            found = {part: chunked[part] / whole[part] for part in whole} | {"end to end": gain}
            for part, y in found.items():
                shape = f"L={length} B={batch_size}" if part == "end to end" else f"L={length}"
                record.add(f"{part} {shape}", y, "x", size, "C")
                largest[part][size] = max(largest[part][size], y)
    for part, by_size in largest.items():
        for size, y in by_size.items():
            record.add(f"{part}, largest", y, "x", size, "C")
    for size in (256, 512):
        overhead = 100 * (largest["prefill"][size] - 1)
        record.add("prefill overhead, largest", overhead, "%", size, "C")
    return record


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    """The whole prompt and each chunk size in alternation; the medians of `repeats` turns."""
    record = Record("fig13", *measuring.measured_on(llm))
    (length,), (batch_size,) = scale.lengths, scale.batch_sizes
    plan = [("orca", 1)] + [("sarathi", size) for size in scale.chunk_sizes]
    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
    measuring.warm_up(llm)
    for run in progress(plan * scale.repeats, "measuring prefills"):
        measuring.generate(llm, [Request(0, range(length), 1)], *run, operators=True)
        seen.setdefault(run, []).append(attention_and_all(llm.trace))
    for run in plan[1:]:
        for part in ("attention", "prefill"):
            turns = zip(seen[run], seen["orca", 1], strict=True)
            ratio = measuring.median_ratio(
                [(chunked[part], whole[part]) for chunked, whole in turns]
            )
            measuring.add_spread(record, f"{part} L={length}", ratio, "x", run[1], "C")
    runs = {
        size: measuring.Run(balanced(length, batch_size, size), "sarathi", size)
        for size in scale.chunk_sizes
    }
    gains = measuring.measured_gains(llm, list(runs.values()), -(-scale.repeats // 3))
    for size, run in runs.items():
        series = f"end to end L={length} B={batch_size}"
        measuring.add_spread(record, series, gains[run], "x", size, "C")
    return record


def draw_panel(
    axes: plt.Axes, found: dict[str, list[Point]], part: str, paper: list[Point], title: str
) -> None:
    """One curve for each length; measured ones with their spread."""
    lines = {
        series: curve
        for series, curve in found.items()
        if series.startswith(f"{part} L=") and not series.endswith(SPREAD)
    }
    for (series, curve), (colour, marker) in zip(lines.items(), look.SERIES, strict=False):
        label = "L = {L}".format(**series_options(series))
        look.plot_points(axes, curve, color=colour, marker=marker, label=label)
        look.shade_spread(axes, found, series, colour)
    look.stars(axes, paper)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(sorted({int(point.x) for curve in lines.values() for point in curve}))
    axes.tick_params(axis="x", rotation=45)
    axes.set(xlabel="chunk size C", ylabel=PARTS[part], title=title)
    if part != "end to end":
        axes.set_ylim(bottom=0)


def draw(points: list[Point]) -> plt.Figure:
    rows, paper = look.sources(points), curves(points, "paper")
    figure, grid = look.panels(len(rows), 3, 6, 6)
    for row, source in zip(grid, rows, strict=True):
        where = look.source_title(points, source, f"{MODEL} on {GPU}")
        titles = (f"(a) attention; {where}", "(b) prefill", "(c) end to end")
        for axes, part, title in zip(row, PARTS, titles, strict=True):
            stars = paper.get(f"{part}, largest", []) if source == "predicted" else []
            draw_panel(axes, curves(points, source), part, stars, title)
    bounds = [replace(point, y=1 + point.y / 100) for point in paper["prefill overhead, largest"]]
    look.stars(grid[0][1], bounds, marker="v", markersize=14, label="paper: at most")
    for row in grid:
        row[1].legend()
    figure.suptitle(
        "SARATHI Fig 13: what chunking costs, and what decode-maximal batching gives back",
    )
    return figure


FIGURE = Figure(
    name="fig13",
    description=__doc__,
    paper={
        "f13_attn_c64": ("attention, largest", 64),
        "f13_prefill_c64": ("prefill, largest", 64),
        "f13_prefill_c128": ("prefill, largest", 128),
        "f13_prefill_c256": ("prefill overhead, largest", 256),
        "f13_prefill_c512": ("prefill overhead, largest", 512),
        "f13_total_c64": ("end to end, largest", 64),
        "f13_total_c128": ("end to end, largest", 128),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(8,), chunk_sizes=(64, 128, 256), repeats=6),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16, 32), repeats=1),
)

main = FIGURE.main

if __name__ == "__main__":
    main()
