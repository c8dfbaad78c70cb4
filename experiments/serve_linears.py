"""Sarathi-Serve, Fig 5 and 6: how many tokens the linear operators need to be bound by compute.

    python experiments/serve_linears.py     predicted for LLaMA2-70B on A100s: seconds, no GPU

A linear operator reads its weights once for all tokens of a batch. So it does more FLOPs per byte,
the more tokens there are (Fig 5). Few tokens cost as much as one, since reading the weights takes
most of the time. From the knee on, each token costs (Fig 6). Here the knee is the number of tokens
that take, at the rate of large batches, as long as one token does.
"""

import enter  # noqa: F401

from dataclasses import replace

from configs import GPUS
from costmodel import CostModel
from experiments.lib.claims import Claim, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row
from experiments.lib.study import Panel, Study
from experiments.serve_phases import saturating_tokens
from serving.capacity import Deployment

FOUR = Deployment("llama2-70b", tp=4)  # the GPUs of Fig 5
DEGREES = [replace(FOUR, tp=tp) for tp in (1, 2, 4, 8)]
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096)


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
    title=f"Sarathi-Serve Fig 5 and 6: the linear operators of {FOUR.model}",
    panels=[
        Panel(
            "tokens",
            "intensity",
            where={"layout": FOUR.layout},
            title=f"(Fig 5) arithmetic intensity, {FOUR.layout}",
            rule="FLOP to bandwidth ratio",
            log="xy",
        ),
        Panel(
            "tokens",
            "time",
            "layout",
            title="(Fig 6) time of all linear operators",
            log="xy",
        ),
        Panel("layout", "knee", kind="bars", title="(Fig 6) the knee"),
    ],
    paper={"ss_knee": ("knee", {"layout": FOUR.layout})},
    claims=[Claim("more tokens do more FLOPs per byte", rises("intensity", "tokens"))],
    shown=lambda row, quantity: (
        quantity != "intensity" and row.get("tokens", 1) in (1, 128, 256, 512, 1024)
    ),
)

if __name__ == "__main__":
    STUDY.main()
