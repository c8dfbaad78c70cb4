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
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure
from experiments.lib.look import (
    COLOURS,
    log_ticks,
    panels,
    plot_points,
    stacked_bars,
    stars,
)
from experiments.lib.papers import MISTRAL
from serving.capacity import Deployment

# the artefact's machine
NODE = Deployment("yi-34b", tp=2, gpu="a100-80gb-pcie")
NAME, LENGTH = "serve_phases", 1024  # tokens of a prompt in Fig 3, and of a decode's context
PHASES, LARGE_SHARE = ("prefill", "decode"), 80  # %: what the paper states
# of the artefact's runs (osdi-experiments/figure-2)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PARTS = {
    "linear": (COLOURS["blue"], ""),
    "attention": (COLOURS["vermilion"], "//"),
    "others": (COLOURS["orange"], "xx"),
}
# those whose times we take; its 256 tokens were the first batch of a run, and took longer than 512
MEASURED = {"prefill": (128, 512, 1024, 2048, 4096, 8192, 16384), "decode": (1, 8, 32, 128)}
TABLE_2 = {  # the artefact's osdi-experiments/table-2: chunk, decodes
    "prefill": make_batch([(0, 1024, 1024)]),
    "hybrid": make_batch([(0, 1021, 1024)], decodes=3),
    "decode": make_batch(decodes=4),
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


def add_phases(record: Record, where: Deployment, quick: bool) -> None:
    """Whole iterations of prompts of each length, and of each number of decodes."""
    cost = where.cost_model
    step = 2 if quick else 1
    shapes = {("prefill", tokens): make_batch([(0, tokens, tokens)]) for tokens in PROMPTS[::step]}
    shapes |= {
        ("decode", size): make_batch(decodes=size, context=LENGTH) for size in BATCH_SIZES[::step]
    }
    for (phase, x), batch in shapes.items():
        unit = "tokens" if phase == "prefill" else "B"
        seconds = parts(cost, batch)
        whole = sum(seconds.values())
        record.add(f"{phase} iteration, {where.model}", 1e3 * whole, "ms", x, unit)
        for name, value in seconds.items():
            record.add(f"{phase}, {name} per token", 1e3 * value / batch.num_tokens, "ms", x, unit)
        record.add(f"{phase}, share of linear", 100 * seconds["linear"] / whole, "%", x, unit)


def predict(quick: bool) -> list[Point]:
    mistral, yi = (Record(NAME, where.model, where.hardware) for where in (MISTRAL, NODE))
    cost = MISTRAL.cost_model
    for size in (1, 2, 4, 8) if quick else BATCH_SIZES:
        prompts, decodes = make_batch([(0, LENGTH, LENGTH)] * size), make_batch(decodes=size)
        for phase, batch in (("prefill", prompts), ("decode", decodes)):
            rate = batch.num_tokens / cost.seconds(batch)
            mistral.add(f"{phase} throughput", rate, "tokens/s", size, "B")
    add_phases(mistral, MISTRAL, quick)
    add_phases(yi, NODE, quick=False)
    found = curves(mistral, "predicted")
    shares = [point for phase in PHASES for point in found[f"{phase}, share of linear"]]
    mistral.add("smallest share of the linear operators", min(p.y for p in shares), "%")
    for phase, unit in (("prefill", "tokens"), ("decode", "requests")):
        large = [p.x for p in found[f"{phase}, share of linear"] if p.y >= LARGE_SHARE]
        mistral.add(f"largest {phase} with a share of {LARGE_SHARE} %", max(large), unit)
    mistral.add("prefill tokens as dear as one decode", saturating_tokens(cost), "tokens")
    for name, batch in TABLE_2.items():
        yi.add(f"{name} batch, linear", 1e3 * parts(NODE.cost_model, batch)["linear"], "ms")
    return mistral + yi


def draw_throughput(axes: plt.Axes, found: dict[str, list[Point]], phase: str) -> None:
    curve = found[f"{phase} throughput"]
    plot_points(axes, curve, color=COLOURS["blue"], marker="o", label="predicted")
    log_ticks(axes, [point.x for point in curve])
    axes.set_ylim(0, 1.2 * max(point.y for point in curve))
    axes.set(xlabel="batch size B", ylabel="tokens/s")
    axes.set_title(f"(Fig 3) {phase} throughput\n{MISTRAL.model}, {LENGTH} tokens each")


def draw_parts(axes: plt.Axes, found: dict[str, list[Point]], phase: str) -> None:
    """A bar for each iteration, stacked by operator; the linear operators' share above it."""
    heights = {name: [p.y for p in found[f"{phase}, {name} per token"]] for name in PARTS}
    places = range(len(heights["linear"]))
    stacked_bars(axes, places, heights, PARTS, 0.7, linewidth=0.8)
    shares = found[f"{phase}, share of linear"]
    labels = [f"{point.y:.0f} %" for point in shares]
    axes.bar_label(axes.containers[-1], labels, fontsize=12, padding=2)
    axes.set_xticks(places, [f"{point.x:g}" for point in shares])
    axes.set(xlabel="prompt tokens" if phase == "prefill" else "batch size B")
    axes.set(ylabel="ms per token")
    axes.margins(y=0.12)
    axes.set_title(f"(Fig 4) {phase}, {MISTRAL.model}\nabove: share of the linear operators")
    axes.legend(reverse=True)


def draw_iterations(
    axes: plt.Axes, found: dict[str, list[Point]], paper: dict[str, list[Point]], phase: str
) -> None:
    series = f"{phase} iteration, {NODE.model}"
    curve = found[series]
    plot_points(axes, curve, color=COLOURS["blue"], marker="o", label="predicted: the GPU's work")
    stars(axes, paper.get(series, []), label="the artefact: whole iterations")
    log_ticks(axes, [point.x for point in curve])
    axes.set_yscale("log")
    ticks = (20, 50, 100, 200, 500, 1000, 2000, 4000) if phase == "prefill" else (20, 50, 100, 200)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set(xlabel="prompt tokens" if phase == "prefill" else "batch size B", ylabel="ms")
    axes.set_title(f"{phase} iteration\n{NODE.model} on {NODE.hardware}")
    axes.legend()


def draw(points: list[Point]) -> plt.Figure:
    figure, grid = panels(2, 3, 6.6, 5.4)
    mistral, yi = (
        curves([p for p in points if p.model == where.model], "predicted")
        for where in (MISTRAL, NODE)
    )
    paper = curves(points, "paper")
    for row, phase in zip(grid, PHASES, strict=True):
        draw_throughput(row[0], mistral, phase)
        draw_parts(row[1], mistral, phase)
        draw_iterations(row[2], yi, paper, phase)
    grid[0][0].legend()
    figure.suptitle(
        f"Sarathi-Serve Fig 3 and 4: {MISTRAL.model} on {MISTRAL.hardware} (predicted); right:"
        f" {NODE.model}, beside the artefact's times"
    )
    return figure


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={
        "ss_linear_share": ("smallest share of the linear operators", 0),
        "ss_decode_eq_prefill": ("prefill tokens as dear as one decode", 0),
        **{
            f"ss_yi_{phase}_{x:g}": (f"{phase} iteration, {NODE.model}", x)
            for phase, places in MEASURED.items()
            for x in places
        },
        **{f"ss_yi_linear_{name}": (f"{name} batch, linear", 0) for name in TABLE_2},
    },
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: (
        point.x_unit == "" or "throughput" in point.series or "iteration" in point.series
    ),
    software={where.gpu: "sarathi_serve" for where in (MISTRAL, NODE)},
)
main = FIGURE.main

if __name__ == "__main__":
    main()
