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
from experiments.lib import look
from experiments.lib.claims import Claim, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.look import COLOURS, SERIES
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study
from experiments.serve_phases import saturating_tokens
from serving.capacity import Deployment

FOUR = Deployment("llama2-70b", tp=4)  # the GPUs of Fig 5
DEGREES = [replace(FOUR, tp=tp) for tp in (1, 2, 4, 8)]
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096)
STATED = (500, 600)  # tokens: what the paper says of Fig 6


def intensity(cost: CostModel, tokens: int) -> float:
    """FLOPs per byte of a layer's four linear operators together, on one GPU."""
    shapes = cost.shapes.values()
    flops = sum(2 * tokens * i * o for i, o in shapes)
    moved = sum((i * o + tokens * (i + o)) * cost.bytes_per_value for i, o in shapes)
    return flops / moved


def linears(engine: Deployment, tokens: int) -> Row:
    """ms of all linear operators, and FLOPs per byte."""
    cost = engine.cost_model
    ms = 1e3 * sum(cost.linears(tokens).values())
    return {"layout": engine.layout, "time": ms, "intensity": intensity(cost, tokens)}


def find_knee(engine: Deployment) -> Row:
    """Tokens."""
    return {"layout": engine.layout, "knee": saturating_tokens(engine.cost_model)}


def data_sheet(engine: Deployment) -> Row:
    gpu = GPUS[engine.gpu]
    return {"layout": engine.layout, "FLOP to bandwidth ratio": gpu.peak / gpu.bandwidth}


def draw(rows: Rows) -> plt.Figure:
    figure, [[left, right]] = look.panels(1, 2, 7.6, 6)
    own = rows.where(source="predicted")
    title = f"(Fig 5) arithmetic intensity\n{FOUR.model}, {FOUR.layout}"
    show = {"ylabel": "FLOP/B", "yscale": "log", "title": title}
    balance = own.one("FLOP to bandwidth ratio")
    panel = Panel("tokens", "intensity", where={"layout": FOUR.layout}, show=show)
    panel.draw(left, own, Rows(), "predicted")
    left.axhline(balance, color="black", linestyle="--")
    text = f"above: bound by compute ({balance:.0f} FLOP/B)"
    left.text(1, 1.15 * balance, text, fontsize=12, va="bottom")
    left.axvspan(1, 128, color=COLOURS["orange"], alpha=0.12, linewidth=0)
    left.text(11, 1.3, "decodes:\none token each", fontsize=12, ha="center")
    title = f"(Fig 6) time of all linear operators\n{FOUR.model}, predicted"
    right.set(ylabel="ms", yscale="log", title=title)
    for (layout, curve), (colour, marker) in zip(own.by("layout").items(), SERIES, strict=False):
        times, knee = curve.where("tokens").column("time"), curve.one("knee")
        label = f"{layout}: knee at {knee:.0f} tokens"
        right.plot(curve.column("tokens"), times, color=colour, marker=marker, label=label)
        right.plot([knee] * 2, [0.8 * times[0], times[0]], color=colour, linewidth=4)
    right.axvspan(*STATED, color="grey", alpha=0.35, linewidth=0, label="paper: knee")
    for axes, ticks in (
        (left, (1, 10, 100, 1000)),
        (right, (10, 20, 50, 100, 200, 500, 1000, 2000)),
    ):
        look.log_ticks(axes, (1, 4, 16, 64, 256, 1024, 4096))
        axes.set_yticks(ticks, ticks)
        axes.set_yticks([], minor=True)
        axes.set(xlabel="tokens in the batch")
    left.legend(loc="lower right")
    right.legend()
    figure.suptitle(STUDY.title)
    return figure


STUDY = Study(
    "serve_linears",
    __doc__,
    [
        Sweep(linears, DEGREES, cases(tokens=TOKENS)),
        Sweep(find_knee, DEGREES, [{}]),
        Sweep(data_sheet, [FOUR], [{}]),
    ],
    units={"time": "ms", "intensity": "FLOP/B", "knee": "tokens"}
    | {"FLOP to bandwidth ratio": "FLOP/B"},
    title="Sarathi-Serve Fig 5 and 6: the linear operators by the tokens of a batch",
    draw=draw,
    paper={"ss_knee": ("knee", {"layout": FOUR.layout})},
    claims=[Claim("more tokens do more FLOPs per byte", rises("intensity", "tokens"))],
    shown=lambda row, quantity: (
        quantity != "intensity" and row.get("tokens", 1) in (1, 128, 256, 512, 1024)
    ),
)

if __name__ == "__main__":
    STUDY.main()
