"""SARATHI, Fig 4: why prefill saturates a GPU and decode does not.

The picture has throughput above, and arithmetic intensity by operator below.

    python experiments/fig4.py              predicted for a layer of LLaMA-13B on an A6000: seconds
    python experiments/fig4.py --measure    and the throughput of the real engine on this machine

One layer, as in the paper (Sec 3.1): forty times as many requests would fit the GPU. An operator is
bound by compute where its FLOPs per byte exceed the GPU's FLOP/s per byte/s. One layer would fit a
CPU's caches, so there we measure the whole model and divide by its layers.

"Saturated" means here: at least 90 % of the largest throughput drawn. For prefill that gives the
paper's 512 tokens.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Batch
from cli import run_main
from configs import GPUS, MODELS, ModelConfig
from costmodel import CostModel, make_batch
from experiments.fig3 import LOOK
from experiments.lib.common import Point, curves
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import SERIES, log_ticks, measured_title, plot_points
from experiments.lib.measuring import measured_on, time_batches

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU, CONTEXT = "llama-13b", "a6000", 1024
SATURATED = 0.9
MARKERS = dict(zip(LOOK, "^osDvP", strict=True))
prediction = partial(Point, "fig4", source="predicted", model=MODEL, hardware=GPU)


def batches(
    lengths: tuple[int, ...], batch_sizes: list[int], context: int, most: int
) -> dict[tuple[str, int], Batch]:
    """Prefill-only batches of B prompts of L tokens, and decode-only ones; by series and B.

    A prefill-only batch has `most` tokens at most.
    """
    prefills = {
        (f"prefill L={n}", size): make_batch([(0, n, n)] * size)
        for n in lengths
        for size in batch_sizes
        if n * size <= most
    }
    return prefills | {
        (f"decode L={context}", size): make_batch(decodes=size, context=context)
        for size in batch_sizes
    }


def throughput_points(
    seconds: dict[tuple[str, int], float], shapes: dict[tuple[str, int], Batch], *where: str
) -> list[Point]:
    """The throughput of one layer.

    seconds: of that layer, by series and B. where: source, model, hardware.
    """
    rows, unit = [], "tokens/ms of one layer"
    for (series, size), value in seconds.items():
        y = shapes[series, size].num_tokens / (1e3 * value)
        rows.append(Point("fig4", series, size, "B", y, unit, *where))
    return rows


def intensities(model: ModelConfig, batch_size: int, rows: int, context: int) -> dict[str, float]:
    """FLOPs per byte of each operator in fp16.

    B requests have `rows` new tokens each, which attend to `context`. A linear operator reads its
    weights once for all rows. Attention shares nothing between requests: B changes nothing.
    """
    result, tokens, channels = {}, batch_size * rows, model.n_head * model.head_dim
    for name, (inputs, outputs) in model.linears.items():
        result[name] = (
            2 * tokens * inputs * outputs / (2 * (inputs * outputs + tokens * (inputs + outputs)))
        )
    keys_and_values = context * model.kv_bytes_per_token() / model.n_layer
    # queries in, result out
    result["attn"] = 4 * rows * context * channels / (2 * 2 * rows * channels + keys_and_values)
    return result


def saturation(curve: list[Point]) -> float:
    """The smallest x with SATURATED of the curve's largest throughput."""
    return min(point.x for point in curve if point.y >= SATURATED * max(other.y for other in curve))


def predict(quick: bool) -> list[Point]:
    layer = replace(MODELS[MODEL], n_layer=1)
    cost = CostModel(layer, GPUS[GPU])
    sizes = [2**i for i in range(0, 11, 2 if quick else 1)]
    shapes = batches((64, 128, 256, 512, 1024), sizes, CONTEXT, most=8192)
    operators = {key: cost.operators(batch) for key, batch in shapes.items()}
    # the logits belong to no layer
    seconds = {key: sum(times.values()) - times["others"] for key, times in operators.items()}
    points = throughput_points(seconds, shapes, "predicted", MODEL, GPU)
    for phase, rows in (("prefill", CONTEXT), ("decode", 1)):
        for size in sizes:
            for name, value in intensities(layer, size, rows, CONTEXT).items():
                points.append(prediction(f"{phase} intensity, {name}", size, "B", value, "FLOP/B"))
    peak = max(point.y for point in points if point.series.startswith("prefill L"))
    decode = [point for point in points if point.series == f"decode L={CONTEXT}"]
    balance = GPUS[GPU].peak / GPUS[GPU].bandwidth
    alone = {
        p.series: p.y for p in points if p.x == 1 and p.series.startswith("prefill L=")
    }  # one prompt at a time, as chunks come
    lost = 100 * (1 - alone["prefill L=256"] / max(alone.values()))
    return [
        *points,
        prediction("prefill throughput lost with 256 tokens", 0, "", lost, "%"),
        prediction("largest prefill throughput", 0, "", peak, "tokens/ms of one layer"),
        prediction("decode saturates at", 0, "", saturation(decode), "requests"),
        prediction("FLOP to bandwidth ratio", 0, "", balance, "FLOP/B"),
    ]


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    shapes = batches(scale.lengths, list(scale.batch_sizes), max(scale.lengths), most=1024)
    results = time_batches(llm, list(shapes.values()), scale.repeats, operators=True)
    seconds = {
        key: (sum(result.operators.values()) - result.operators["others"]) / llm.config.n_layer
        for key, result in zip(shapes, results, strict=True)
    }
    return throughput_points(seconds, shapes, *measured_on(llm))


def draw_throughput(axes: plt.Axes, found: dict[str, list[Point]], phase: str, title: str) -> None:
    lines = {series: curve for series, curve in found.items() if series.startswith(f"{phase} L=")}
    for (series, curve), (colour, marker) in zip(lines.items(), SERIES, strict=False):
        plot_points(
            axes, curve, color=colour, marker=marker, label=series.removeprefix(f"{phase} ")
        )
    ticks = sorted({point.x for curve in lines.values() for point in curve})
    log_ticks(axes, ticks[:: 2 if len(ticks) > 6 else 1])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size B", ylabel="tokens/ms of one layer", title=f"{phase}, {title}")


def draw_intensity(axes: plt.Axes, found: dict[str, list[Point]], phase: str) -> None:
    for name, (colour, _) in LOOK.items():
        if curve := found.get(f"{phase} intensity, {name}"):
            plot_points(axes, curve, color=colour, marker=MARKERS[name], label=name)
    (balance,) = found["FLOP to bandwidth ratio"]
    axes.axhline(balance.y, color="black", linestyle="--")
    label = f"above: bound by compute ({balance.y:.0f} FLOP/B)"
    axes.text(1, 1.1 * balance.y, label, fontsize=12, va="bottom")
    if phase == "decode":
        style = {"textcoords": "offset points", "fontsize": 13, "va": "top"}
        axes.annotate("all linear operators", (32, 32), (14, -8), **style)
        axes.annotate("attention", (32, 1), (0, 8), textcoords="offset points", fontsize=13)
    log_ticks(axes, [4**i for i in range(6)])
    axes.set_yscale("log")
    axes.set_ylim(0.5, 1e4)
    axes.set(xlabel="batch size B", ylabel="FLOP per byte", title=f"{phase}: arithmetic intensity")


def draw(points: list[Point]) -> plt.Figure:
    predicted, paper, measured = (
        curves(points, source) for source in ("predicted", "paper", "measured")
    )
    columns = 3 if measured else 2
    figure, grid = plt.subplots(2, columns, figsize=(8 * columns, 11.5), layout="constrained")
    for axes, phase in zip(grid[0], ("prefill", "decode"), strict=False):
        draw_throughput(axes, predicted, phase, f"predicted: {MODEL} on {GPU}")
    for axes, phase in zip(grid[1], ("prefill", "decode"), strict=False):
        draw_intensity(axes, predicted, phase)
    grid[1][0].legend(loc="lower right", ncols=2)
    (peak,), (saturated,) = paper["largest prefill throughput"], paper["decode saturates at"]
    grid[0][0].axhline(
        peak.y, color="black", linestyle="--", label=f"paper: saturates at {peak.y:g}"
    )
    grid[0][1].axvline(
        saturated.y, color="black", linestyle="--", label=f"paper: saturates at B = {saturated.y:g}"
    )
    if measured:
        for axes, phase in zip(grid[:, 2], ("prefill", "decode"), strict=True):
            draw_throughput(axes, measured, phase, measured_title(points))
            axes.legend()
    for axes in grid[0]:
        axes.legend()
    figure.suptitle(
        "SARATHI Fig 4: prefill saturates with one prompt, decode only with hundreds of requests",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="fig4",
    description=__doc__,
    paper={
        "f4_peak": ("largest prefill throughput", 0),
        "s42_chunk256_drop": ("prefill throughput lost with 256 tokens", 0),
        "f4_decode_sat": ("decode saturates at", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(64, 128, 256, 512), batch_sizes=(1, 2, 4, 8, 16, 32), repeats=7),
    quick_scale=Scale(lengths=(32, 64), batch_sizes=(1, 2), repeats=2),
    shown=lambda point: (
        point.x_unit == ""
        or point.series.startswith("decode L=")
        or ("L=" in point.series and point.x == 1)
    ),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
