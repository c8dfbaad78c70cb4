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

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from cli import run_main
from configs import GPUS
from experiments.fig8 import batches, predicted_speedup, speedup
from experiments.lib.common import Point, curves
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import COLOURS, measured_title
from experiments.lib.measuring import Run, measured_gains, measured_on, time_batches
from experiments.lib.steady import Workload, balance, predicted_gain

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

CHUNK_SIZE = 256
ROWS = [  # id of the paper's numbers, model, GPU, L, B, P:D
    ("t4_13b_1k", "llama-13b", "a6000", 1024, 6, 50),
    ("t4_13b_2k", "llama-13b", "a6000", 2048, 6, 50),
    ("t4_13b_3k", "llama-13b", "a6000", 3072, 6, 50),
    ("t4_33b_1k", "llama-33b", "a100-80gb", 1024, 10, 28),
    ("t4_33b_2k", "llama-33b", "a100-80gb", 2048, 5, 63),
    ("t4_33b_3k", "llama-33b", "a100-80gb", 3072, 3, 127),
]
UNITS = {"decode speedup": "x", "throughput gain": "throughput over baseline"}


def name(quantity: str, model: str, batch_size: int, ratio: float) -> str:
    return f"{quantity}, {model} B={batch_size} P:D={ratio:.3g}"


def predict(quick: bool) -> list[Point]:
    points = []
    for _, model, gpu, length, batch_size, ratio in ROWS:
        values = {
            "decode speedup": predicted_speedup(model, gpu, length, batch_size, CHUNK_SIZE),
            "throughput gain": predicted_gain(
                Workload(length, batch_size, ratio), "sarathi", CHUNK_SIZE, model, gpu
            ),
        }
        for quantity, y in values.items():
            what = (name(quantity, model, batch_size, ratio), length, "L", y, UNITS[quantity])
            points.append(Point("table4", *what, "predicted", model, gpu))
    # why chunks of 256 suffer more on an A100 (Sec 5.1.2)
    for model, gpu in dict.fromkeys((model, gpu) for _, model, gpu, *_ in ROWS):
        balance = GPUS[gpu].peak / GPUS[gpu].bandwidth
        what = (f"FLOP to bandwidth ratio, {gpu}", 0, "", balance, "FLOP/B")
        points.append(Point("table4", *what, "predicted", model, gpu))
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """At the balance of C and B, where the gain is largest."""
    (batch_size,), (chunk_size,), points = scale.batch_sizes, scale.chunk_sizes, []
    ratio = balance(chunk_size, batch_size)
    for length in scale.lengths:
        run = Run(Workload(length, batch_size, ratio), "sarathi", chunk_size)
        seconds = [
            r.seconds
            for r in time_batches(llm, batches(length, batch_size, chunk_size), 3 * scale.repeats)
        ]
        values = {
            "decode speedup": speedup(seconds, batch_size),
            "throughput gain": measured_gains(llm, [run], scale.repeats)[run][0],
        }
        for quantity, y in values.items():
            series = f"{name(quantity, llm.config.name, batch_size, ratio)} C={chunk_size}"
            points.append(
                Point("table4", series, length, "L", y, UNITS[quantity], *measured_on(llm))
            )
    return points


def draw(points: list[Point]) -> plt.Figure:
    """Decode speedup on the left, throughput gain on the right.

    Paper and predicted stand side by side, measured in bars of their own.
    """
    measured = curves(points, "measured")
    figure, panels = plt.subplots(1, 2, figsize=(18 if measured else 15, 6.5), layout="constrained")
    look = {
        "paper": (COLOURS["sky"], "//", -0.2),
        "predicted": (COLOURS["blue"], "", 0.2),
        "measured": (COLOURS["green"], "..", 0.0),
    }
    for axes, quantity in zip(panels, UNITS, strict=True):
        groups: dict[tuple, str] = {}
        for source, (colour, hatch, shift) in look.items():
            found = {s: c for s, c in curves(points, source).items() if s.startswith(quantity)}
            bars = [point for curve in found.values() for point in curve]
            for point in bars:
                model = point.model
                hardware = (
                    point.hardware if point.hardware in ("a6000", "a100-80gb") else "measured"
                )
                groups.setdefault(
                    (model, hardware, point.x), f"L = {point.x:g}\n{model}\n{hardware}"
                )
            places = [
                list(groups).index(
                    (point.model, point.hardware if source != "measured" else "measured", point.x)
                )
                + shift
                for point in bars
            ]
            if not bars:
                continue
            base = 0 if quantity == "decode speedup" else 1
            style = {"color": colour, "hatch": hatch, "edgecolor": "black"}
            drawn = axes.bar(
                places, [point.y - base for point in bars], 0.36, base, label=source, **style
            )
            axes.bar_label(drawn, [f"{point.y:.2f}" for point in bars], fontsize=12, padding=2)
        axes.set_xticks(range(len(groups)), groups.values(), fontsize=11)
        axes.set(
            title=quantity,
            ylabel=(
                "baseline's time / sarathi's"
                if quantity == "decode speedup"
                else "throughput / baseline's"
            ),
        )
        axes.grid(axis="x", visible=False)
    gains = [point.y for point in points if point.series.startswith("throughput")]
    panels[1].axhline(1, color="black", linewidth=1)
    # bars grow from 1, the baseline
    panels[1].set_ylim(min(1, min(gains) - 0.04), max(gains) + 0.04)
    panels[0].set_ylim(top=1.2 * panels[0].dataLim.ymax)
    panels[0].legend(loc="upper center", ncols=3)
    heading = (
        "SARATHI Table 4: decode speedup and throughput gain; paper and predicted: C = 256, at L, B"
        " and P:D of the paper"
    )
    if measured:
        # of "decode speedup, MODEL B=8 P:D=35.6 C=256"
        shape = next(iter(measured)).split(" B=")[1]
        heading += f"\n{measured_title(points).replace(chr(10), ' on ')}, B={shape}"
    figure.suptitle(heading, fontsize=18)
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


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
