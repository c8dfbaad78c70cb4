"""Sarathi-Serve, Fig 5 and 6: how many tokens the linear operators need to be bound by compute.

    python experiments/serve_linears.py     predicted for LLaMA2-70B on A100s: seconds, no GPU

A linear operator reads its weights once for all tokens of a batch. So it does more FLOPs per byte,
the more tokens there are (Fig 5). Few tokens cost as much as one, since reading the weights takes
most of the time. From the knee on, each token costs (Fig 6). Here the knee is the number of tokens
that take, at the rate of large batches, as long as one token does.
"""

import enter  # noqa: F401

from dataclasses import replace

import matplotlib.pyplot as plt

from configs import GPUS
from costmodel import CostModel
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure
from experiments.lib.look import COLOURS, SERIES, log_ticks, panels, plot_points
from experiments.serve_phases import saturating_tokens
from serving.capacity import Deployment

NAME = "serve_linears"
FOUR = Deployment("llama2-70b", tp=4)  # the GPUs of Fig 5
DEGREES = (1, 2, 4, 8)  # of tensor parallelism
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096)
# what the paper says of Fig 6
STATED = (500, 600)


def intensity(cost: CostModel, tokens: int) -> float:
    """FLOPs per byte of a layer's four linear operators together, on one GPU."""
    shapes = cost.shapes.values()
    flops = sum(2 * tokens * i * o for i, o in shapes)
    moved = sum((i * o + tokens * (i + o)) * cost.bytes_per_value for i, o in shapes)
    return flops / moved


def predict(quick: bool) -> list[Point]:
    points = []
    for tp in DEGREES:
        where = replace(FOUR, tp=tp)
        record, cost = Record(NAME, where.model, where.hardware), where.cost_model
        for tokens in TOKENS[::3] if quick else TOKENS:
            ms = 1e3 * sum(cost.linears(tokens).values())
            record.add(f"linear operators, TP{tp}", ms, "ms", tokens, "tokens")
            if where == FOUR:
                record.add("intensity", intensity(cost, tokens), "FLOP/B", tokens, "tokens")
        record.add(f"knee, TP{tp}", saturating_tokens(cost), "tokens")
        points += record
    gpu = GPUS[FOUR.gpu]
    record = Record(NAME, FOUR.model, FOUR.hardware)
    record.add("FLOP to bandwidth ratio", gpu.peak / gpu.bandwidth, "FLOP/B")
    return points + record


def draw_intensity(axes: plt.Axes, found: dict[str, list[Point]]) -> None:
    plot_points(axes, found["intensity"], color=COLOURS["blue"], marker="o", label="predicted")
    (balance,) = found["FLOP to bandwidth ratio"]
    axes.axhline(balance.y, color="black", linestyle="--")
    text = f"above: bound by compute ({balance.y:.0f} FLOP/B)"
    axes.text(1, 1.15 * balance.y, text, fontsize=12, va="bottom")
    axes.set_yscale("log")
    axes.set_yticks((1, 10, 100, 1000), ("1", "10", "100", "1000"))
    axes.axvspan(1, 128, color=COLOURS["orange"], alpha=0.12, linewidth=0)
    axes.text(11, 1.3, "decodes:\none token each", fontsize=12, ha="center")
    axes.set(ylabel="FLOP/B", title=f"(Fig 5) arithmetic intensity\n{FOUR.model}, {FOUR.layout}")


def draw_times(axes: plt.Axes, found: dict[str, list[Point]]) -> None:
    """A curve and its knee for each degree."""
    for tp, (colour, marker) in zip(DEGREES, SERIES, strict=False):
        curve = found[f"linear operators, TP{tp}"]
        (knee,) = found[f"knee, TP{tp}"]
        label = f"TP{tp}: knee at {knee.y:.0f} tokens"
        plot_points(axes, curve, color=colour, marker=marker, label=label)
        axes.plot([knee.y] * 2, [0.8 * curve[0].y, curve[0].y], color=colour, linewidth=4)
    axes.axvspan(*STATED, color="grey", alpha=0.35, linewidth=0, label="paper: knee")
    axes.set_yscale("log")
    ticks = (10, 20, 50, 100, 200, 500, 1000, 2000)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set(ylabel="ms", title=f"(Fig 6) time of all linear operators\n{FOUR.model}, predicted")


def draw(points: list[Point]) -> plt.Figure:
    figure, [[left, right]] = panels(1, 2, 7.6, 6)
    found = curves(points, "predicted")
    draw_intensity(left, found)
    draw_times(right, found)
    for axes in (left, right):
        log_ticks(axes, (1, 4, 16, 64, 256, 1024, 4096))
        axes.set(xlabel="tokens in the batch")
    right.legend()
    figure.suptitle("Sarathi-Serve Fig 5 and 6: the linear operators by the tokens of a batch")
    return figure


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={"ss_knee": (f"knee, {FOUR.layout}", 0)},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: point.x_unit == "" or point.x in (1, 128, 256, 512, 1024),
    software={FOUR.gpu: "sarathi_serve"},
)
main = FIGURE.main

if __name__ == "__main__":
    main()
