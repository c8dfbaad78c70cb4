"""SARATHI, Fig 4: why prefill saturates a GPU and decode does not.

The picture has throughput above, and arithmetic intensity by operator below.

    python experiments/fig4.py              predicted for a layer of LLaMA-13B on an A6000: seconds
    python experiments/fig4.py --measure    and the throughput of the real engine on this machine

One layer is priced, as in the paper (Sec 3.1): forty times as many requests would fit the GPU. One
layer would fit a CPU's caches, so we measure the whole model and divide by its layers. An operator
is bound by compute where its FLOPs per byte exceed the GPU's FLOP/s per byte/s.

"Saturated" means here: at least 90 % of the largest throughput drawn. For prefill that gives the
paper's 512 tokens.
"""

import enter  # noqa: F401

from collections.abc import Sequence
from dataclasses import replace

import matplotlib.pyplot as plt

from batch import Batch
from configs import GPUS, MODELS, ModelConfig
from costmodel import CostModel, make_batch
from experiments.lib import measuring
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure, Scale
from experiments.lib.look import (
    OPERATOR_LOOKS,
    log_ticks,
    measured_title,
    panels,
    plot_curves,
    plot_points,
)

MODEL, GPU, CONTEXT = "llama-13b", "a6000", 1024
WIDE = "gpt3-175b", "a100-80gb"  # SARATHI, Sec 4.2
SATURATED, UNIT = 0.9, "tokens/ms of one layer"
PHASES = ("prefill", "decode")
MARKERS = dict(zip(OPERATOR_LOOKS, "^osDvP", strict=True))


def batches(
    lengths: Sequence[int], batch_sizes: Sequence[int], most: int
) -> dict[tuple[str, int], Batch]:
    """Prefill-only batches of B prompts of L tokens, and decode-only ones; by series and B.

    A prefill-only batch has `most` tokens at most. Decodes attend to the largest L.
    """
    context = max(lengths)
    shapes = {
        (f"prefill L={length}", size): make_batch([(0, length, length)] * size)
        for length in lengths
        for size in batch_sizes
        if length * size <= most
    }
    for size in batch_sizes:
        shapes[f"decode L={context}", size] = make_batch(decodes=size, context=context)
    return shapes


def throughput(batch: Batch, operators: dict[str, float], layers: int = 1) -> float:
    """Tokens per ms of one layer. 'others' does not count: the logits belong to no layer.

    operators: seconds of each operator in all layers.
    """
    seconds = (sum(operators.values()) - operators["others"]) / layers
    return batch.num_tokens / (1e3 * seconds)


def intensities(model: ModelConfig, batch_size: int, rows: int) -> dict[str, float]:
    """FLOPs per byte of each operator in fp16.

    B requests have `rows` new tokens each, which attend to CONTEXT tokens. A linear operator reads
    its weights once for all rows. Attention shares nothing between requests: B changes nothing.
    """
    result, tokens, channels = {}, batch_size * rows, model.n_head * model.head_dim
    for name, (inputs, outputs) in model.linears.items():
        moved = 2 * (inputs * outputs + tokens * (inputs + outputs))
        result[name] = 2 * tokens * inputs * outputs / moved
    keys_and_values = CONTEXT * model.kv_bytes_per_token() / model.n_layer
    # queries in, result out
    result["attn"] = 4 * rows * CONTEXT * channels / (2 * 2 * rows * channels + keys_and_values)
    return result


def predict(quick: bool) -> list[Point]:
    record, layer = Record("fig4", MODEL, GPU), replace(MODELS[MODEL], n_layer=1)
    cost = CostModel(layer, GPUS[GPU])
    sizes = [2**i for i in range(0, 11, 2 if quick else 1)]
    shapes = batches((64, 128, 256, 512, CONTEXT), sizes, most=8192)
    for (series, size), batch in shapes.items():
        record.add(series, throughput(batch, cost.operators(batch)), UNIT, size, "B")
    throughputs = curves(record, "predicted")
    for phase, rows in (("prefill", CONTEXT), ("decode", 1)):
        for size in sizes:
            for name, value in intensities(layer, size, rows).items():
                record.add(f"{phase} intensity, {name}", value, "FLOP/B", size, "B")
    decode = throughputs.pop(f"decode L={CONTEXT}")
    # one prompt at a time, as chunks come
    alone = {series: prefills[0].y for series, prefills in throughputs.items()}
    lost = 100 * (1 - alone["prefill L=256"] / max(alone.values()))
    peak = max(point.y for prefills in throughputs.values() for point in prefills)
    enough = SATURATED * max(point.y for point in decode)
    saturated = min(point.x for point in decode if point.y >= enough)
    record.add("prefill throughput lost with 256 tokens", lost, "%")
    record.add("largest prefill throughput", peak, UNIT)
    record.add("decode saturates at", saturated, "requests")
    record.add("FLOP to bandwidth ratio", GPUS[GPU].peak / GPUS[GPU].bandwidth, "FLOP/B")
    return record + predict_wide()


def predict_wide() -> list[Point]:
    """The wider the model, the fewer tokens saturate the GPU: one layer of GPT-3 on an A100."""
    record, layer = Record("fig4", *WIDE), replace(MODELS[WIDE[0]], n_layer=1)
    cost, rates = CostModel(layer, GPUS[WIDE[1]]), {}
    for tokens in (256, 512, 1024, 2048, 4096):
        batch = make_batch([(0, tokens, tokens)])
        rates[tokens] = throughput(batch, cost.operators(batch))
    record.add("share of the peak with 256 tokens", 100 * rates[256] / max(rates.values()), "%")
    return record


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    record = Record("fig4", *measuring.measured_on(llm))
    shapes = batches(scale.lengths, scale.batch_sizes, most=1024)
    seconds = measuring.time_operators(llm, shapes, scale.repeats)
    for (series, size), operators in seconds.items():
        y = throughput(shapes[series, size], operators, llm.config.n_layer)
        record.add(series, y, UNIT, size, "B")
    return record


def draw_throughput(axes: plt.Axes, found: dict[str, list[Point]], phase: str, title: str) -> None:
    lines = {
        series.removeprefix(f"{phase} "): curve
        for series, curve in found.items()
        if series.startswith(f"{phase} L=")
    }
    plot_curves(axes, lines)
    ticks = sorted({point.x for curve in lines.values() for point in curve})
    log_ticks(axes, ticks[:: 2 if len(ticks) > 6 else 1])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size B", ylabel=UNIT, title=f"{phase}, {title}")


def draw_intensity(axes: plt.Axes, found: dict[str, list[Point]], phase: str) -> None:
    for name, (colour, _) in OPERATOR_LOOKS.items():
        if curve := found.get(f"{phase} intensity, {name}"):
            plot_points(axes, curve, color=colour, marker=MARKERS[name], label=name)
    (balance,) = found["FLOP to bandwidth ratio"]
    axes.axhline(balance.y, color="black", linestyle="--")
    label = f"above: bound by compute ({balance.y:.0f} FLOP/B)"
    axes.text(1, 1.1 * balance.y, label, fontsize=12, va="bottom")
    if phase == "decode":
        style = {"textcoords": "offset points", "fontsize": 13}
        axes.annotate("all linear operators", (32, 32), (14, -8), va="top", **style)
        axes.annotate("attention", (32, 1), (0, 8), **style)
    log_ticks(axes, [4**i for i in range(6)])
    axes.set_yscale("log")
    axes.set_ylim(0.5, 1e4)
    axes.set(xlabel="batch size B", ylabel="FLOP per byte", title=f"{phase}: arithmetic intensity")


def draw(points: list[Point]) -> plt.Figure:
    predicted, paper, measured = (
        curves(points, source) for source in ("predicted", "paper", "measured")
    )
    figure, grid = panels(2, 3 if measured else 2, 8, 5.75)
    for column, phase in enumerate(PHASES):
        draw_throughput(grid[0][column], predicted, phase, f"predicted: {MODEL} on {GPU}")
        draw_intensity(grid[1][column], predicted, phase)
    grid[1][0].legend(loc="lower right", ncols=2)
    (peak,), (saturated,) = paper["largest prefill throughput"], paper["decode saturates at"]
    style = {"color": "black", "linestyle": "--"}
    grid[0][0].axhline(peak.y, label=f"paper: saturates at {peak.y:g}", **style)
    grid[0][1].axvline(saturated.y, label=f"paper: saturates at B = {saturated.y:g}", **style)
    if measured:
        for row, phase in zip(grid, PHASES, strict=True):
            draw_throughput(row[2], measured, phase, measured_title(points))
            row[2].legend()
    for axes in grid[0]:
        axes.legend()
    figure.suptitle(
        "SARATHI Fig 4: prefill saturates with one prompt, decode only with hundreds of requests",
    )
    return figure


FIGURE = Figure(
    name="fig4",
    description=__doc__,
    paper={
        "f4_peak": ("largest prefill throughput", 0),
        "s42_chunk256_drop": ("prefill throughput lost with 256 tokens", 0),
        "s42_gpt3_chunk256": ("share of the peak with 256 tokens", 0),
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

main = FIGURE.main

if __name__ == "__main__":
    main()
