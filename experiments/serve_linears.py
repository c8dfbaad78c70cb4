"""Sarathi-Serve, Fig 5 and 6: how many tokens the linear operators need to be bound by compute.

    python experiments/serve_linears.py     predicted for LLaMA2-70B on A100s: seconds, no GPU
    python experiments/serve_linears.py --model llama3.1-8b --gpu h100 --tp 1
        for your model and GPU. Nothing is served: it takes no requests and no policies

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
from experiments.lib.flags import DEPLOYED
from experiments.lib.papers import deployments
from experiments.lib.rows import Row
from experiments.lib.study import Panel, Study
from experiments.serve_phases import saturating_tokens
from serving.capacity import Deployment

FOUR = Deployment("llama2-70b", tp=4)  # the GPUs of Fig 5
DEGREES = (1, 2, 4, 8)
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096)


def intensity(cost: CostModel, tokens: int) -> float:
    """FLOPs per byte of a layer's four linear operators together, on one GPU."""
    shapes = cost.shapes.values()
    flops = sum(2 * tokens * i * o for i, o in shapes)
    moved = sum((i * o + tokens * (i + o)) * cost.bytes_per_value for i, o in shapes)
    return flops / moved


def linears(engine: Deployment, tokens: int) -> Row:
    """ms of all linear operators."""
    ms = 1e3 * sum(engine.cost_model.linears(tokens).values())
    return {"layout": engine.layout, "time": ms}


def intensities(engine: Deployment, tokens: int) -> Row:
    return {"layout": engine.layout, "intensity": intensity(engine.cost_model, tokens)}


def find_knee(engine: Deployment) -> Row:
    """Tokens."""
    return {"layout": engine.layout, "knee": saturating_tokens(engine.cost_model)}


def data_sheet(engine: Deployment) -> Row:
    gpu = GPUS[engine.gpu]
    return {"layout": engine.layout, "FLOP to bandwidth ratio": gpu.peak / gpu.bandwidth}


def sweeps(quick: bool, **own: object) -> list[Sweep]:
    """own: see DEPLOYED."""
    [one] = deployments([FOUR], **own)
    heads = one.cost_model.model.n_kv_head
    degrees = {one.tp, *(tp for tp in DEGREES if heads % tp == 0)}
    on = [replace(one, tp=tp) for tp in sorted(degrees)]
    return [
        Sweep(linears, on, cases(tokens=TOKENS)),
        Sweep(intensities, [one], cases(tokens=TOKENS)),
        Sweep(find_knee, on, [{}]),
        Sweep(data_sheet, [one], [{}]),
    ]


STUDY = Study(
    "serve_linears",
    __doc__,
    sweeps,
    units={"time": "ms", "intensity": "FLOP/B", "knee": "tokens"}
    | {"FLOP to bandwidth ratio": "FLOP/B"},
    title="Sarathi-Serve Fig 5 and 6: the linear operators",
    panels=[
        Panel(
            "tokens",
            "intensity",
            facet="layout",
            title="(Fig 5) arithmetic intensity",
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
    flags=DEPLOYED,
)

if __name__ == "__main__":
    STUDY.main()
