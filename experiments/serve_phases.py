"""Sarathi-Serve, Fig 3 and 4: throughput of prefill and decode, and what their time goes to.

    python experiments/serve_phases.py      predicted for Mistral-7B on an A100, and for Yi-34B on
                                            two; seconds, no GPU needed

One prompt fills the GPU, so a larger batch of prompts is hardly faster. A decode-only batch reads
all weights for B tokens, so its throughput grows with B. In both, most of the time goes to the
linear operators.

Sarathi-Serve's artefact has the times of whole iterations of Yi-34B on two A100s (PCIe cards, each
pair over NVLink). They are the stars of the last column. We price the GPU's work alone. The
difference is what the software of that time took beside it: for each iteration, to start some
twenty kernels in each of 60 layers from Python; for each request, to prepare its row.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from batch import Batch
from costmodel import CostModel, make_batch
from experiments.lib import look
from experiments.lib.claims import Claim, flat, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.look import COLOURS
from experiments.lib.papers import MISTRAL
from experiments.lib.rows import Rows
from experiments.lib.study import AXES, Panel, Study
from serving.capacity import Deployment

# the artefact's machine
NODE = Deployment("yi-34b", tp=2, gpu="a100-80gb-pcie")
LENGTH = 1024  # tokens of a prompt in Fig 3, and of a decode's context
LARGE_SHARE = 80  # %: what the paper states
# of the artefact's runs (osdi-experiments/figure-2)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPES = cases(phase="prefill", L=PROMPTS, B=1) + cases(phase="decode", L=LENGTH, B=BATCH_SIZES)
MANY_PROMPTS = cases(phase="prefill", L=LENGTH, B=BATCH_SIZES[1:])
# those whose times we take; its 256 tokens were the first batch of a run, and took longer than 512
MEASURED = {
    **{f"ss_yi_prefill_{L}": {"phase": "prefill", "L": L} for L in PROMPTS if L != 256},
    **{f"ss_yi_decode_{B}": {"phase": "decode", "B": B} for B in (1, 8, 32, 128)},
}
TABLE_2 = {  # the artefact's osdi-experiments/table-2: chunk, decodes
    "prefill": make_batch([(0, 1024, 1024)]),
    "hybrid": make_batch([(0, 1021, 1024)], decodes=3),
    "decode": make_batch(decodes=4),
}
PARTS = {
    "linear": (COLOURS["blue"], ""),
    "attention": (COLOURS["vermilion"], "//"),
    "others": (COLOURS["orange"], "xx"),
}


def parts(cost: CostModel, batch: Batch) -> dict[str, float]:
    """Seconds of the linear operators, of attention, and of all else."""
    linear, operators = sum(cost.linears(batch.num_tokens).values()), cost.operators(batch)
    others = sum(operators.values()) - linear - operators["attn"]
    return {"linear": linear, "attention": operators["attn"], "others": others}


def saturating_tokens(cost: CostModel) -> float:
    """Tokens at which a straight line through the origin reaches the cost of one token.

    The line has the slope of large batches. So many prompt tokens, at the rate of large batches,
    take the linear operators as long as one decode does.
    """
    low, high, many = (sum(cost.linears(tokens).values()) for tokens in (1, 4096, 8192))
    return low / ((many - high) / 4096)


def iteration(engine: Deployment, phase: str, L: int, B: int) -> dict[str, float]:
    """ms of B whole prompts of L tokens, or of B decodes that attend to L tokens.

    The parts are in ms per token.
    """
    batch = make_batch([(0, L, L)] * B if phase == "prefill" else (), B * (phase == "decode"), L)
    seconds = parts(engine.cost_model, batch)
    whole, tokens = sum(seconds.values()), batch.num_tokens
    return {
        "iteration": 1e3 * whole,
        "throughput": tokens / whole,
        **{name: 1e3 * value / tokens for name, value in seconds.items()},
        "share of linear": 100 * seconds["linear"] / whole,
    }


def linear_operators(engine: Deployment, batch: str) -> dict[str, float]:
    """ms of those of a batch of the artefact's table."""
    return {"linear operators": 1e3 * parts(engine.cost_model, TABLE_2[batch])["linear"]}


def one_decode(engine: Deployment) -> dict[str, float]:
    return {"prefill tokens as dear as one decode": saturating_tokens(engine.cost_model)}


def extremes(rows: Rows) -> None:
    """What the paper states of the shares."""
    own = rows.where("share of linear", model=MISTRAL.model)
    large = Rows(row for row in own if row["share of linear"] >= LARGE_SHARE)
    rows.add(which="smallest", **{"share of linear": min(own.column("share of linear"))})
    longest = max(large.where(phase="prefill", B=1).column("L"))
    rows.add(**{f"largest prefill with a share of {LARGE_SHARE} %": longest})
    largest = max(large.where(phase="decode").column("B"))
    rows.add(**{f"largest decode with a share of {LARGE_SHARE} %": largest})


def draw_parts(axes: plt.Axes, rows: Rows, key: str) -> None:
    """A bar for each iteration, stacked by operator; the linear operators' share above it."""
    places, heights = range(len(rows)), {name: rows.column(name) for name in PARTS}
    look.stacked_bars(axes, places, heights, PARTS, 0.7, linewidth=0.8)
    labels = [f"{share:.0f} %" for share in rows.column("share of linear")]
    axes.bar_label(axes.containers[-1], labels, fontsize=12, padding=2)
    axes.set_xticks(places, rows.column(key))
    title = f"(Fig 4) {rows[0]['phase']}, {MISTRAL.model}\nabove: share of the linear operators"
    axes.set(xlabel=AXES[key], ylabel="ms per token", title=title)
    axes.margins(y=0.12)
    axes.legend(reverse=True)


def draw(rows: Rows) -> plt.Figure:
    figure, grid = look.panels(2, 3, 6.6, 5.4)
    predicted, paper = rows.where(source="predicted"), rows.where(source="paper", model=NODE.model)
    mistral, yi = (predicted.where(model=where.model) for where in (MISTRAL, NODE))
    for (left, middle, right), which, key, ticks in (
        (grid[0], {"phase": "prefill", "B": 1}, "L", (20, 50, 100, 200, 500, 1000, 2000, 4000)),
        (grid[1], {"phase": "decode"}, "B", (20, 50, 100, 200)),
    ):
        phase = which["phase"]
        title = f"(Fig 3) {phase} throughput\n{MISTRAL.model}, {LENGTH} tokens each"
        panel = Panel("B", "throughput", where={"phase": phase, "L": LENGTH}, show={"title": title})
        panel.draw(left, mistral, Rows(), "predicted")
        left.set_ylim(0, 1.2 * left.dataLim.ymax)
        look.log_ticks(left, BATCH_SIZES)
        draw_parts(middle, mistral.where(**which), key)
        title = f"{phase} iteration\n{NODE.model} on {NODE.hardware}"
        panel = Panel(key, "iteration", where=which, show={"title": title, "yscale": "log"})
        panel.draw(right, yi, paper, "predicted: the GPU's work")
        look.log_ticks(right, PROMPTS if key == "L" else BATCH_SIZES)
        right.set_yticks(ticks, ticks)
        right.set_yticks([], minor=True)
    figure.suptitle(
        f"{STUDY.title}: {MISTRAL.model} on {MISTRAL.hardware} (predicted); right:"
        f" {NODE.model}, beside the artefact's times of whole iterations"
    )
    return figure


STUDY = Study(
    "serve_phases",
    __doc__,
    [
        Sweep(iteration, [MISTRAL], [*SHAPES, *MANY_PROMPTS]),
        Sweep(iteration, [NODE], SHAPES),
        Sweep(linear_operators, [NODE], cases(batch=list(TABLE_2))),
        Sweep(one_decode, [MISTRAL], [{}]),
    ],
    units={
        "iteration": "ms",
        "throughput": "tokens/s",
        **dict.fromkeys(PARTS, "ms per token"),
        "share of linear": "%",
        "linear operators": "ms",
        "prefill tokens as dear as one decode": "tokens",
        f"largest prefill with a share of {LARGE_SHARE} %": "tokens",
        f"largest decode with a share of {LARGE_SHARE} %": "requests",
    },
    title="Sarathi-Serve Fig 3 and 4",
    draw=draw,
    paper={
        "ss_linear_share": ("share of linear", {"which": "smallest"}),
        "ss_decode_eq_prefill": ("prefill tokens as dear as one decode", {}),
        **{
            number: ("iteration", {"model": NODE.model, **case})
            for number, case in MEASURED.items()
        },
        **{f"ss_yi_linear_{name}": ("linear operators", {"batch": name}) for name in TABLE_2},
    },
    derive=extremes,
    claims=[
        Claim("one prompt fills the GPU", flat("throughput", "B", phase="prefill", L=LENGTH)),
        Claim("decodes need a large batch", rises("throughput", "B", phase="decode")),
    ],
    shown=lambda row, quantity: (
        quantity in ("throughput", "iteration", "linear operators")
        or "which" in row
        or "L" not in row
    ),
)

if __name__ == "__main__":
    STUDY.main()
