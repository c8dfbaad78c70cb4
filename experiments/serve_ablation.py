"""Sarathi-Serve, Table 4: chunked prefills alone, hybrid batches alone, and both.

    python experiments/serve_ablation.py    predicted for Yi-34B on two A100s: seconds, no GPU
    python experiments/serve_ablation.py --policy-file examples/priority.py
        a policy of your own, too, with both token budgets

Chunks alone bound the time between tokens. But they alternate with decodes, which delays prompts.
Hybrid batches alone let prompts in at once and whole, which stalls decodes. 1024 requests arrive at
1 per second (chat) or 0.5 (arxiv); the token budget is 1024. The rates are those of the paper's
artefact (osdi-experiments/table-6). Its hybrid_only has the longest request as its budget: it cuts
no prompt. For the arxiv rows we have no published numbers.
"""

import enter  # noqa: F401

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import matplotlib.pyplot as plt

from command.flags import Flag
from experiments.lib.common import Point, Record, values
from experiments.lib.figure import Figure
from experiments.lib.flags import POLICIES as POLICY_FLAGS
from experiments.lib.look import COLOURS, labelled_bars, panels
from experiments.lib.papers import ARXIV, CHAT, YI, looks_of
from serving.capacity import median_ttft, p99_tbt

NAME = "serve_ablation"
REQUESTS, BUDGET = 1024, 1024
RATES = ((CHAT, 1.0), (ARXIV, 0.5))  # requests/s
# and the ids of the paper's numbers
POLICIES = {"hybrid_only": "hybrid", "chunked_only": "chunked", "sarathi_serve": "both"}
# that of the artefact's script; 1024 is what we have of the paper's table, second hand
OTHER_BUDGET = 512
RUNS = [
    ("hybrid_only", None),
    ("chunked_only", BUDGET),
    ("sarathi_serve", BUDGET),
    ("chunked_only", OTHER_BUDGET),
    ("sarathi_serve", OTHER_BUDGET),
]
METRICS = {"P50 TTFT": median_ttft, "P99 TBT": p99_tbt}


def predict(
    quick: bool, seed: int = 0, policy: Sequence[str] | None = None, **_: object
) -> list[Point]:
    """policy: more of them, with both token budgets."""
    record, count = Record(NAME, YI.model, YI.hardware), 128 if quick else REQUESTS
    others = [name for name in dict.fromkeys(policy or ()) if name not in POLICIES]
    runs = [*RUNS, *product(others, (BUDGET, OTHER_BUDGET))]
    for (data, rate), (name, budget) in product(RATES, runs):
        trace = YI.serve(data.requests(count, rate, seed), name, budget or data.max_length)
        size = f" C={budget}" if budget == OTHER_BUDGET else ""
        for metric, value in METRICS.items():
            record.add(f"{metric}, {name}{size}, {data.name}", value(trace), "s")
    return record


def policies_of(series: Iterable[str]) -> list[str]:
    """Those with the budget of the table, in their order."""
    names = [each.split(", ")[1] for each in series]
    return [name for name in dict.fromkeys(names) if " C=" not in name]


def draw(points: list[Point]) -> plt.Figure:
    """One panel for each metric and data set; the paper's bars, hatched, beside the predicted."""
    paper, predicted = values(points, "paper"), values(points)
    policies = policies_of(predicted)
    figure, [grid] = panels(1, 4, 4.75 * len(policies) / len(POLICIES), 6)
    colours = [look[0] for look in looks_of(policies).values()]
    for axes, ((data, _), metric) in zip(grid, product(RATES, METRICS), strict=True):
        series = [f"{metric}, {policy}, {data.name}" for policy in policies]
        shift = 0.2 if series[0] in paper else 0.0
        if shift:
            draw_bars(axes, paper, series, -shift, color=COLOURS["sky"], hatch="//")
        draw_bars(axes, predicted, series, shift, color=colours)
        axes.set_xticks(range(len(policies)), [policy.replace("_", "\n") for policy in policies])
        axes.set(title=f"{metric}, {data.name}", ylabel="s")
    grid[0].legend(["paper", "predicted"], loc="upper left")
    grid[0].set_ylim(top=1.3 * grid[0].get_ylim()[1])
    figure.suptitle(
        f"Sarathi-Serve Table 4: what each half of sarathi_serve does, {YI.model} on {YI.hardware}",
        fontsize=18,
    )
    return figure


def draw_bars(
    axes: plt.Axes, heights: Mapping[str, float], series: list[str], shift: float, **style: object
) -> None:
    places = {place + shift: heights[name] for place, name in enumerate(series) if name in heights}
    labelled_bars(axes, places, 0.38, fontsize=12, **style)


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={
        f"ss_t4_{short}_{metric.split()[1].lower()}": (f"{metric}, {policy}, chat", 0)
        for (policy, short), metric in product(POLICIES.items(), METRICS)
    },
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=None,
    draw=draw,
    flags={"seed": Flag("seed of arrivals and lengths", 0)} | POLICY_FLAGS,
)

main = FIGURE.main

if __name__ == "__main__":
    main()
