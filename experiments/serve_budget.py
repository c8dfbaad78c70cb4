"""The token budget: time to first token against time between tokens (Sarathi-Serve, Sec 4.3).

It also finds the budget that an SLO allows.

    python experiments/serve_budget.py
        predicted for Mistral-7B on an A100: seconds
    python experiments/serve_budget.py --tbt-slo 50
        the budget for an SLO of 50 ms
    python experiments/serve_budget.py --calibration results/calibration-laptop.json \
            --tbt-slo 300 --decodes 8 --context 512 --longest 512
        for the machine that calibrate.py measured

A small budget keeps each iteration short, and so the time between tokens. But it reads the weights
more often for the same prompts, and at some load the queue grows. Take the largest multiple of the
tile whose worst iteration stays within the SLO: one profile says which, without running a single
request. The curves check it on 512 chat requests at 2.5 per second, under sarathi_serve.
"""

from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt

from cli import run_main
from configs import UserError
from costmodel import TILE, make_batch
from experiments.lib.calibration import CalibratedModel, Calibration
from experiments.lib.common import Point, curves, make_directory, make_parser, positive, progress
from experiments.lib.figure import Figure, save_results
from experiments.lib.look import SERIES, log_ticks, plot_points
from experiments.lib.papers import CHAT, MISTRAL, YI
from serving.capacity import (
    CONTEXT,
    DECODES,
    LONGEST,
    RELAXED,
    STRICT,
    median_ttft,
    p99_tbt,
    percentile,
    token_budget,
    worst_iteration,
)

REQUESTS, RATE = 512, 2.5
BUDGETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SLOS = {"strict": STRICT, "relaxed": RELAXED}
prediction = partial(
    Point, "serve_budget", source="predicted", model=YI.model, hardware=YI.hardware
)


def chunking_overhead(chunk: int, prompt: int) -> float:
    """By how many percent chunks lengthen a prefill of Yi-34B on two A100s (Fig 14)."""
    cost = YI.cost_model

    def seconds(size: int) -> float:
        return sum(
            cost.seconds(make_batch([(start, min(size, prompt - start), prompt)]))
            for start in range(0, prompt, size)
        )

    return 100 * (seconds(chunk) / seconds(prompt) - 1)


def predict(quick: bool) -> list[Point]:
    points, cost = [], MISTRAL.cost_model

    def point(series: str, x: float, x_unit: str, y: float, y_unit: str) -> None:
        where = (y, y_unit, "predicted", MISTRAL.model, MISTRAL.hardware)
        points.append(Point("serve_budget", series, x, x_unit, *where))

    for budget in progress(BUDGETS[1::4] if quick else BUDGETS, "budgets"):
        trace = MISTRAL.serve(
            CHAT.requests(64 if quick else REQUESTS, RATE), "sarathi_serve", budget
        )
        point("P99 TBT", budget, "C", p99_tbt(trace), "s")
        point("longest TBT", budget, "C", max(trace.tbts), "s")
        point("worst iteration", budget, "C", worst_iteration(cost, budget), "s")
        point("median TTFT", budget, "C", median_ttft(trace), "s")
        point("P90 TTFT", budget, "C", percentile(trace.ttfts, 90), "s")
    for deployment in (MISTRAL, YI):
        for name, iterations in SLOS.items():
            slo = iterations * deployment.decode_iteration
            budget = token_budget(deployment.cost_model, slo)
            for series, y, unit in (("", slo, "s"), ("token budget for the ", budget, "tokens")):
                series += f"{name} SLO, {deployment.model}"
                where = ("predicted", deployment.model, deployment.hardware)
                points.append(Point("serve_budget", series, 0, "", y, unit, *where))
    overhead = max(chunking_overhead(512, prompt) for prompt in (2048, 4096, 8192, 16384))
    points.append(prediction("prefill overhead of chunk 512, largest", 0, "", overhead, "%"))
    return points


def draw(points: list[Point]) -> plt.Figure:
    found = curves(points, "predicted")
    figure, (gaps, firsts) = plt.subplots(1, 2, figsize=(17, 6.5), layout="constrained")
    for axes, names in (
        (gaps, ("worst iteration", "longest TBT", "P99 TBT")),
        (firsts, ("P90 TTFT", "median TTFT")),
    ):
        for name, (colour, marker) in zip(names, SERIES, strict=False):
            plot_points(axes, found[name], color=colour, marker=marker, label=name)
        log_ticks(axes, [budget for budget in BUDGETS if budget not in (384, 768, 1536, 3072)])
        axes.set(xlabel="token budget C", ylabel="s", ylim=0)
    slo = found[f"strict SLO, {MISTRAL.model}"][0].y
    budget = found[f"token budget for the strict SLO, {MISTRAL.model}"][0].y
    gaps.axhline(slo, color="black", linestyle=":", label=f"strict SLO: {1000 * slo:.0f} ms")
    style = {"color": "black", "linestyle": "--", "linewidth": 1.2}
    gaps.axvline(budget, label=f"budget that it allows: {budget:.0f}", **style)
    gaps.set_title("time between tokens")
    firsts.set_title("time to first token")
    gaps.legend()
    firsts.legend()
    figure.suptitle(
        f"The token budget: {MISTRAL.model} on {MISTRAL.hardware}, chat lengths, {RATE:g}"
        " requests/s (predicted)",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="serve_budget",
    description=__doc__,
    paper={
        "ss_slo_strict_mistral": (f"strict SLO, {MISTRAL.model}", 0),
        "ss_slo_relaxed_mistral": (f"relaxed SLO, {MISTRAL.model}", 0),
        "ss_slo_relaxed_yi": (f"relaxed SLO, {YI.model}", 0),
        "ss_budget_strict": (f"token budget for the strict SLO, {MISTRAL.model}", 0),
        "ss_budget_relaxed": (f"token budget for the relaxed SLO, {MISTRAL.model}", 0),
        "ss_fig14_overhead": ("prefill overhead of chunk 512, largest", 0),
    },
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: not point.series.startswith(("longest", "P90")),
)


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--tbt-slo",
        type=float,
        metavar="MS",
        help="an SLO of your own, in ms: prints its budget and ends",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="with --tbt-slo: of the machine that calibrate.py measured",
    )
    add(
        "--decodes",
        type=positive,
        default=DECODES,
        metavar="N",
        help=f"with --tbt-slo: running requests (default: {DECODES})",
    )
    add(
        "--context",
        type=positive,
        default=CONTEXT,
        metavar="N",
        help=f"with --tbt-slo: their tokens (default: {CONTEXT})",
    )
    add(
        "--longest",
        type=positive,
        default=LONGEST,
        metavar="N",
        help=f"with --tbt-slo: the longest prompt (default: {LONGEST})",
    )
    options = parser.parse_args()
    if options.tbt_slo is None:
        if options.calibration:
            raise UserError(
                "--calibration needs --tbt-slo: say which time between tokens the machine is to"
                " keep"
            )
        make_directory(options.out, "serve_budget", force=options.force)
        print(__doc__.splitlines()[0])
        save_results(options.out, FIGURE, FIGURE.published_and_predicted(options.quick))
        return
    cost = MISTRAL.cost_model
    if options.calibration:
        cost = CalibratedModel(Calibration.read(options.calibration))
    shape = options.decodes, options.context, options.longest
    budget = token_budget(cost, options.tbt_slo / 1000, *shape)
    worst, next_worst = (
        1000 * worst_iteration(cost, size, *shape) for size in (budget, budget + TILE)
    )
    print(
        f"token budget: {budget} tokens. The worst iteration takes {worst:.1f} ms; with a tile"
        f" more, {next_worst:.1f} ms."
    )
    print(
        f"(It has {options.decodes} decodes of {options.context} tokens, and the end of a prompt of"
        f" {options.longest}.)"
    )


if __name__ == "__main__":
    run_main(main)
