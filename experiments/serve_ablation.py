"""Sarathi-Serve, Table 4: chunked prefills alone, hybrid batches alone, and both.

    python experiments/serve_ablation.py    predicted for Yi-34B on two A100s: seconds, no GPU

Chunks alone bound the time between tokens, but alternate with decodes, which delays prompts. Hybrid
batches alone let prompts in at once, and whole, which stalls decodes. 1024 requests arrive at 1 per
second (chat) or 0.5 (arxiv); the token budget is 1024. The rates are those of the paper's artefact
(osdi-experiments/table-6). Its hybrid_only has the longest request as its budget, so that nothing
is ever cut. The arxiv rows have no published counterpart here.
"""

from functools import partial

import matplotlib.pyplot as plt

from cli import run_main
from experiments.lib.common import Point
from experiments.lib.figure import Figure, run_figure
from experiments.lib.look import COLOURS
from experiments.lib.papers import ARXIV, CHAT, LOOKS, YI
from serving.capacity import median_ttft, p99_tbt

REQUESTS, BUDGET = 1024, 1024
RATES = ((CHAT, 1.0), (ARXIV, 0.5))  # requests/s
# and the ids of the paper's numbers
POLICIES = {"hybrid_only": "hybrid", "chunked_only": "chunked", "sarathi_serve": "both"}
# that of the artefact's script; 1024 is what we have of the paper's table, second hand
OTHER_BUDGET = 512
RUNS = [
    ("hybrid_only", None),
    *[(p, budget) for budget in (BUDGET, OTHER_BUDGET) for p in ("chunked_only", "sarathi_serve")],
]
METRICS = {"P50 TTFT": median_ttft, "P99 TBT": p99_tbt}
prediction = partial(
    Point, "serve_ablation", source="predicted", model=YI.model, hardware=YI.hardware
)


def predict(quick: bool) -> list[Point]:
    points = []
    for data, rate in RATES:
        for policy, budget in RUNS:
            trace = YI.serve(
                data.requests(128 if quick else REQUESTS, rate), policy, budget or data.max_length
            )
            for name, metric in METRICS.items():
                series = (
                    f"{name}, {policy}{' C=512' if budget == OTHER_BUDGET else ''}, {data.name}"
                )
                points.append(prediction(series, 0, "", metric(trace), "s"))
    return points


def draw(points: list[Point]) -> plt.Figure:
    """One panel for each metric and data set; the paper's bars, hatched, beside the predicted."""
    values = {(point.source, point.series): point.y for point in points}
    figure, panels = plt.subplots(1, 4, figsize=(19, 6), layout="constrained")
    for axes, (data, metric) in zip(
        panels, [(data, metric) for data, _ in RATES for metric in METRICS], strict=True
    ):
        for source, hatch, colour, shift in (
            ("paper", "//", COLOURS["sky"], -0.2),
            ("predicted", "", None, 0.2),
        ):
            places = [
                place
                for place, policy in enumerate(POLICIES)
                if (source, f"{metric}, {policy}, {data.name}") in values
            ]
            heights = [
                values[source, f"{metric}, {[*POLICIES][place]}, {data.name}"] for place in places
            ]
            if places:
                alone = ("paper", f"{metric}, hybrid_only, {data.name}") not in values
                places = [place + (0 if alone else shift) for place in places]
                colours = colour or [LOOKS[policy][0] for policy in POLICIES]
                style = {"hatch": hatch, "edgecolor": "black", "color": colours}
                drawn = axes.bar(places, heights, 0.38, label=source, **style)
                labels = [f"{height:.2f}" for height in heights]
                axes.bar_label(drawn, labels, fontsize=12, padding=2)
        axes.set_xticks(range(len(POLICIES)), [policy.replace("_", "\n") for policy in POLICIES])
        axes.set(title=f"{metric}, {data.name}", ylabel="s")
        axes.grid(axis="x", visible=False)
    panels[0].legend(["paper", "predicted"], loc="upper left")
    panels[0].set_ylim(top=1.3 * panels[0].get_ylim()[1])
    figure.suptitle(
        f"Sarathi-Serve Table 4: what each half of sarathi_serve does, {YI.model} on {YI.hardware}",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="serve_ablation",
    description=__doc__,
    paper={
        f"ss_t4_{short}_{metric.split()[1].lower()}": (f"{metric}, {policy}, chat", 0)
        for policy, short in POLICIES.items()
        for metric in METRICS
    },
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=None,
    draw=draw,
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
