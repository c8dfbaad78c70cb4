"""SARATHI, Table 4: decode speedup and throughput gain for two models on two GPUs.

They are taken at the batch sizes and P:D where they peaked.

    python experiments/table4.py
        predicted for LLaMA-13B on an A6000 and LLaMA-33B on an A100: seconds, no GPU needed
    python experiments/table4.py --measure
        and the real engine on this machine

Decode speedup is as in fig8.py, throughput gain as in fig9.py. The A100 borrows the A6000's shares
of peak and bandwidth, and only its data sheet is new: SARATHI's kernels are known from the A6000
alone. (What costmodel.py has from an A100, "sarathi_serve", are other kernels.) Nothing here was
fitted to this table.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from configs import GPUS
from experiments.fig8 import batches, predicted_speedup, speedup
from experiments.lib import look, measuring
from experiments.lib.common import Point, Record, newest_measured
from experiments.lib.figure import Figure, Scale
from experiments.lib.steady import Workload, balance, predicted_gain

CHUNK_SIZE = 256
ROWS = [  # id of the paper's numbers, model, GPU, L, B, P:D
    ("t4_13b_1k", "llama-13b", "a6000", 1024, 6, 50),
    ("t4_13b_2k", "llama-13b", "a6000", 2048, 6, 50),
    ("t4_13b_3k", "llama-13b", "a6000", 3072, 6, 50),
    ("t4_33b_1k", "llama-33b", "a100-80gb", 1024, 10, 28),
    ("t4_33b_2k", "llama-33b", "a100-80gb", 2048, 5, 63),
    ("t4_33b_3k", "llama-33b", "a100-80gb", 3072, 3, 127),
]
# quantity: its unit, its axis, and where its bars begin
QUANTITIES = {
    "decode speedup": ("x", "baseline's time / sarathi's", 0),
    "throughput gain": ("throughput over baseline", "throughput / baseline's", 1),
}
LOOK = {  # colour, hatch, place beside the tick
    "paper": (look.COLOURS["sky"], "//", -0.2),
    "predicted": (look.COLOURS["blue"], "", 0.2),
    "measured": (look.COLOURS["green"], "..", 0.0),
}


def name(quantity: str, model: str, batch_size: int, ratio: float) -> str:
    return f"{quantity}, {model} B={batch_size} P:D={ratio:.3g}"


def predict(quick: bool) -> list[Point]:
    points = []
    for _, model, gpu, length, batch_size, ratio in ROWS:
        record, work = Record("table4", model, gpu), Workload(length, batch_size, ratio)
        numbers = (
            predicted_speedup(model, gpu, length, batch_size, CHUNK_SIZE),
            predicted_gain(work, "sarathi", CHUNK_SIZE, model, gpu),
        )
        for (quantity, (unit, *_)), y in zip(QUANTITIES.items(), numbers, strict=True):
            record.add(name(quantity, model, batch_size, ratio), y, unit, length, "L")
        points += record
    # why chunks of 256 suffer more on an A100 (Sec 5.1.2)
    for model, gpu in (("llama-13b", "a6000"), ("llama-33b", "a100-80gb")):
        record, ratio = Record("table4", model, gpu), GPUS[gpu].peak / GPUS[gpu].bandwidth
        record.add(f"FLOP to bandwidth ratio, {gpu}", ratio, "FLOP/B")
        points += record
    return points


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    """At the balance of C and B, where the gain is largest."""
    record = Record("table4", *measuring.measured_on(llm))
    (batch_size,), (chunk_size,) = scale.batch_sizes, scale.chunk_sizes
    ratio = balance(chunk_size, batch_size)
    for length in scale.lengths:
        shapes = batches(length, batch_size, chunk_size)
        times = measuring.time_batches(llm, shapes, 3 * scale.repeats)
        run = measuring.Run(Workload(length, batch_size, ratio), "sarathi", chunk_size)
        gain, _, _ = measuring.measured_gains(llm, [run], scale.repeats)[run]
        numbers = (speedup([result.seconds for result in times], batch_size), gain)
        for (quantity, (unit, *_)), y in zip(QUANTITIES.items(), numbers, strict=True):
            series = f"{name(quantity, llm.config.name, batch_size, ratio)} C={chunk_size}"
            record.add(series, y, unit, length, "L")
    return record


def group(point: Point) -> str:
    """What stands below the bars of a point: paper and predicted stand side by side."""
    hardware = "measured" if point.source == "measured" else point.hardware
    return f"L = {point.x:g}\n{point.model}\n{hardware}"


def draw_panel(axes: plt.Axes, points: list[Point], quantity: str) -> None:
    _, label, base = QUANTITIES[quantity]
    points = [point for point in points if point.series.startswith(quantity)]
    groups = list(dict.fromkeys(group(point) for point in points))
    for source in ("paper", *look.sources(points)):
        colour, hatch, shift = LOOK[source]
        bars = [point for point in points if point.source == source]
        places = [groups.index(group(point)) + shift for point in bars]
        style = {"color": colour, "hatch": hatch, "edgecolor": "black", "label": source}
        drawn = axes.bar(places, [point.y - base for point in bars], 0.36, base, **style)
        axes.bar_label(drawn, [f"{point.y:.2f}" for point in bars], fontsize=12, padding=2)
    axes.set_xticks(range(len(groups)), groups, fontsize=11)
    axes.set(title=quantity, ylabel=label)
    axes.grid(axis="x", visible=False)


def draw(points: list[Point]) -> plt.Figure:
    """Decode speedup on the left, throughput gain on the right."""
    measured = newest_measured(points)
    points = [point for point in points if point.source != "measured"] + measured
    figure, [grid] = look.panels(1, 2, 9 if measured else 7.5, 6.5)
    for axes, quantity in zip(grid, QUANTITIES, strict=True):
        draw_panel(axes, points, quantity)
    gains = [point.y for point in points if point.series.startswith("throughput")]
    grid[1].axhline(1, color="black", linewidth=1)
    # bars grow from 1, the baseline
    grid[1].set_ylim(min(1, min(gains) - 0.04), max(gains) + 0.04)
    grid[0].set_ylim(top=1.2 * grid[0].dataLim.ymax)
    grid[0].legend(loc="upper center", ncols=3)
    heading = (
        "SARATHI Table 4: decode speedup and throughput gain; paper and predicted: C = 256, at L, B"
        " and P:D of the paper"
    )
    if measured:
        # of "decode speedup, MODEL B=8 P:D=35.6 C=256"
        shape = measured[0].series.split(" B=")[1]
        heading += "\n" + look.measured_title(points).replace("\n", " on ") + f", B={shape}"
    figure.suptitle(heading)
    return figure


FIGURE = Figure(
    name="table4",
    description=__doc__,
    paper={
        f"{row}_{short}": (name(quantity, model, batch_size, ratio), length)
        for row, model, _, length, batch_size, ratio in ROWS
        for short, quantity in (("decode", "decode speedup"), ("total", "throughput gain"))
    }
    | {
        "s511_ratio_a6000": ("FLOP to bandwidth ratio, a6000", 0),
        "s511_ratio_a100": ("FLOP to bandwidth ratio, a100-80gb", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(8,), chunk_sizes=(256,), repeats=5),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16,), repeats=1),
)

main = FIGURE.main

if __name__ == "__main__":
    main()
