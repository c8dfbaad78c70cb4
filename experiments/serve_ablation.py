"""Sarathi-Serve, Table 4: chunked prefills without hybrid batches, hybrid batches without chunks,
and both (sarathi_serve).

    python experiments/serve_ablation.py      predicted for Yi-34B on two A100s: seconds, no GPU
                                              needed

Chunks alone bound the time between tokens, but alternate with decodes, which delays prompts; hybrid
batches alone let prompts in at once, and whole, which stalls decodes. 1024 requests at 1 per second
(chat) or 0.5 (arxiv), a token budget of 1024; the rates are those of the paper's artefact
(osdi-experiments/table-6), whose hybrid_only has the longest request as its budget, so that nothing
is ever cut. The arxiv rows have no published counterpart here.
"""

import matplotlib.pyplot as plt

from cli import run_main
from experiments.common import Point
from experiments.figure import Figure, run_figure
from experiments.look import COLOURS
from experiments.serving import ARXIV, CHAT, LOOKS, YI, median_ttft, p99_tbt

REQUESTS, BUDGET = 1024, 1024
RATES = ((CHAT, 1.0), (ARXIV, 0.5))  # requests/s
# and the ids of the paper's numbers
POLICIES = {"hybrid_only": "hybrid", "chunked_only": "chunked", "sarathi_serve": "both"}
# that of the artefact's script; 1024 is what we have of the paper's table, second hand
OTHER_BUDGET = 512
RUNS = [
    ("hybrid_only", None),
    *[
        (policy, budget)
        for budget in (BUDGET, OTHER_BUDGET)
        for policy in ("chunked_only", "sarathi_serve")
    ],
]
METRICS = {"P50 TTFT": median_ttft, "P99 TBT": p99_tbt}


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
                points.append(
                    Point(
                        "serve_ablation",
                        series,
                        0,
                        "",
                        metric(trace),
                        "s",
                        "predicted",
                        YI.model,
                        YI.hardware,
                    )
                )
    return points


def draw(points: list[Point]) -> plt.Figure:
    """One panel for each metric and data set; paper's bars hatched beside the predicted."""
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
                drawn = axes.bar(
                    [place + (0 if alone else shift) for place in places], heights, 0.38, hatch=hatch, edgecolor="black", label=source,
                    color=colour or [LOOKS[policy][0] for policy in POLICIES],
                )  # fmt: skip
                axes.bar_label(
                    drawn, [f"{height:.2f}" for height in heights], fontsize=12, padding=2
                )
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
    predict=predict,
    measure=None,
    draw=draw,
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
