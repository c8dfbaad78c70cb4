r"""The token budget: time to first token against time between tokens (Sarathi-Serve, Sec 4.3).

It also finds the budget that an SLO allows.

    python experiments/serve_budget.py
        predicted for Mistral-7B on an A100: seconds
    python experiments/serve_budget.py --tbt-slo 50
        the budget for an SLO of 50 ms
    python experiments/serve_budget.py --calibration results/calibration-laptop.json \
            --tbt-slo 300 --decodes 8 --context 512 --longest-prompt 512
        for the machine that calibrate.py measured

A small budget keeps each iteration short, and so the time between tokens. But it reads the weights
more often for the same prompts, and at some load the queue grows. Take the largest multiple of the
tile whose worst iteration stays within the SLO. One profile finds it, without running a single
request. The curves check it on 512 chat requests at 2.5 per second, under sarathi_serve.
"""

import enter  # noqa: F401

from argparse import Namespace

import matplotlib.pyplot as plt

from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from costmodel import TILE
from experiments.lib.common import Point, Record, curves, progress
from experiments.lib.figure import Figure
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.look import SERIES, log_ticks, panels, plot_points
from experiments.lib.papers import CHAT, MISTRAL, YI
from serving import capacity
from serving.calibration import CalibratedModel, Calibration
from serving.capacity import token_budget, worst_iteration

NAME = "serve_budget"
REQUESTS, RATE = 512, 2.5
BUDGETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SLOS = {"strict": capacity.STRICT, "relaxed": capacity.RELAXED}
FLAGS = {
    "tbt_slo": Flag("SLO of your own, in ms: print its budget and end"),
    "calibration": Flag("with --tbt-slo: calibration of a machine, made by calibrate.py"),
    "decodes": Flag("with --tbt-slo: requests that decode", capacity.DECODES),
    "context": Flag("with --tbt-slo: tokens of each of them", capacity.CONTEXT),
    "longest_prompt": Flag("with --tbt-slo: tokens of the longest prompt", capacity.LONGEST),
    "seed": Flag("seed of arrivals and lengths", 0),
}


def predict(quick: bool, seed: int = 0, **_: object) -> list[Point]:
    """The other flags are those of `print_budget`."""
    records = {where: Record(NAME, where.model, where.hardware) for where in (MISTRAL, YI)}
    count = 64 if quick else REQUESTS
    for budget in progress(BUDGETS[1::4] if quick else BUDGETS, "budgets"):
        trace = MISTRAL.serve(CHAT.requests(count, RATE, seed), "sarathi_serve", budget)
        numbers = {
            "P99 TBT": capacity.p99_tbt(trace),
            "longest TBT": max(trace.tbts),
            "worst iteration": worst_iteration(MISTRAL.cost_model, budget),
            "median TTFT": capacity.median_ttft(trace),
            "P90 TTFT": capacity.percentile(trace.ttfts, 90),
        }
        for series, seconds in numbers.items():
            records[MISTRAL].add(series, seconds, "s", budget, "C")
    for deployment, record in records.items():
        for name, iterations in SLOS.items():
            slo = iterations * deployment.decode_iteration
            budget = token_budget(deployment.cost_model, slo)
            record.add(f"{name} SLO, {deployment.model}", slo, "s")
            record.add(f"token budget for the {name} SLO, {deployment.model}", budget, "tokens")
    return records[MISTRAL] + records[YI]


def draw(points: list[Point]) -> plt.Figure:
    found = curves(points, "predicted")
    figure, [[gaps, firsts]] = panels(1, 2, 8.5, 6.5)
    (slo,) = found[f"strict SLO, {MISTRAL.model}"]
    (budget,) = found[f"token budget for the strict SLO, {MISTRAL.model}"]
    for axes, title, names in (
        (gaps, "time between tokens", ("worst iteration", "longest TBT", "P99 TBT")),
        (firsts, "time to first token", ("P90 TTFT", "median TTFT")),
    ):
        for name, (colour, marker) in zip(names, SERIES, strict=False):
            plot_points(axes, found[name], color=colour, marker=marker, label=name)
        log_ticks(axes, [budget for budget in BUDGETS if budget not in (384, 768, 1536, 3072)])
        axes.set(xlabel="token budget C", ylabel="s", ylim=0, title=title)
    gaps.axhline(slo.y, color="black", linestyle=":", label=f"strict SLO: {1000 * slo.y:.0f} ms")
    style = {"color": "black", "linestyle": "--", "linewidth": 1.2}
    gaps.axvline(budget.y, label=f"budget that it allows: {budget.y:.0f}", **style)
    gaps.legend()
    firsts.legend()
    figure.suptitle(
        f"The token budget: {MISTRAL.model} on {MISTRAL.hardware}, chat lengths, {RATE:g}"
        " requests/s (predicted)",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={
        "ss_slo_strict_mistral": (f"strict SLO, {MISTRAL.model}", 0),
        "ss_slo_relaxed_mistral": (f"relaxed SLO, {MISTRAL.model}", 0),
        "ss_slo_relaxed_yi": (f"relaxed SLO, {YI.model}", 0),
        "ss_budget_strict": (f"token budget for the strict SLO, {MISTRAL.model}", 0),
        "ss_budget_relaxed": (f"token budget for the relaxed SLO, {MISTRAL.model}", 0),
    },
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=None,
    draw=draw,
    shown=lambda point: not point.series.startswith(("longest", "P90")),
    flags=FLAGS,
)


def print_budget(options: Namespace) -> None:
    """The budget for --tbt-slo."""
    cost = MISTRAL.cost_model
    if options.calibration:
        cost = CalibratedModel(Calibration.read(options.calibration))
    shape = options.decodes, options.context, options.longest_prompt
    budget = token_budget(cost, options.tbt_slo / 1000, *shape)
    worst, larger = (1000 * worst_iteration(cost, size, *shape) for size in (budget, budget + TILE))
    print(f"token budget: {budget} tokens. The worst iteration takes {worst:.1f} ms.")
    print(f"With {budget + TILE} tokens (a tile more) it takes {larger:.1f} ms.")
    print(
        f"A worst iteration has {options.decodes} decodes of {options.context} tokens, and the end"
        f" of a prompt of {options.longest_prompt}."
    )
    print(
        "It is a safe budget for any traffic. plan.py finds the best for yours, and its capacity."
    )


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | WRITES).parse_args()
    if options.tbt_slo:
        print_budget(options)
    elif options.calibration:
        raise UserError("--calibration needs --tbt-slo, the time between tokens to be kept")
    else:
        FIGURE.run()


if __name__ == "__main__":
    run_main(main)
