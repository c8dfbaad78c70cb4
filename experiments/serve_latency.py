"""Sarathi-Serve, Fig 1b: P99 time between tokens and median time to first token against load.

    python experiments/serve_latency.py
        predicted for Yi-34B on two A100s, chat lengths: seconds, no GPU needed
    python experiments/serve_latency.py --measure
        and the real engine on this machine, in real time: a minute or two

The same 512 requests with Poisson arrivals come at every rate and under every policy; only the
arrival times are scaled. The token budgets are 1536, as in the paper's Fig 1, and 512, its choice
for a strict SLO. The dotted line is that SLO: 5 decode iterations. On this machine three policies
take turns, with a small model, short prompts, B = 8 and a token budget of 64.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np

from cli import run_main
from experiments.lib.common import Point, curves, progress
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import COLOURS, measured_title, plot_points
from experiments.lib.measuring import generate, measured_on, warm_up
from experiments.lib.papers import CHAT, LOOKS, YI
from serving.capacity import STRICT, median_ttft, p99_tbt
from serving.traffic import LogNormal, make_requests, poisson
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

REQUESTS = 512
# requests/s; the paper's artefact has 0.55, 0.7 and 1.0
RATES = (0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.45)
RUNS = {"vllm_v0": ("vllm_v0", 1), "orca": ("orca", 1)} | {
    f"sarathi_serve C={c}": ("sarathi_serve", c) for c in (512, 1536)
}
STYLES = {policy: LOOKS[policy] for policy in ("vllm_v0", "orca", "sarathi_serve")}
SLO = "strict SLO"
METRICS = {
    "P99 TBT": p99_tbt,
    "median TTFT": median_ttft,
    "output tokens/s": (
        lambda trace: sum(len(life.tokens) for life in trace.lives.values()) / trace.seconds
    ),
}
UNITS = {"P99 TBT": "s", "median TTFT": "s", "output tokens/s": "tokens/s"}
prediction = partial(
    Point, "serve_latency", source="predicted", model=YI.model, hardware=YI.hardware
)


def points_of(trace: Trace, series: str, rate: float, *where: str) -> list[Point]:
    return [
        Point(
            "serve_latency",
            f"{name}, {series}",
            rate,
            "requests/s",
            metric(trace),
            UNITS[name],
            *where,
        )
        for name, metric in METRICS.items()
    ]


def predict(quick: bool) -> list[Point]:
    points = [prediction(SLO, 0, "", STRICT * YI.decode_iteration, "s")]
    for rate in progress(RATES[2::3] if quick else RATES, "rates"):
        for series, (policy, budget) in RUNS.items():
            trace = YI.serve(CHAT.requests(64 if quick else REQUESTS, rate), policy, budget)
            points += points_of(trace, series, rate, "predicted", YI.model, YI.hardware)
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """At a third and at two thirds of what this machine can serve.

    Each number is the median over the turns of all policies.
    """
    (length,), (budget,) = scale.lengths, scale.chunk_sizes
    prompts = LogNormal(length / 4, length / 2, 3 * length // 4)
    outputs = LogNormal(length / 16, length / 8, length // 4)
    runs = {policy: (policy, 1) for policy in ("vllm_v0", "orca")}
    runs[f"sarathi_serve C={budget}"] = ("sarathi_serve", budget)
    warm_up(llm)
    together = make_requests([0.0] * scale.requests, prompts, outputs)
    generate(llm, together, "sarathi_serve", budget)
    most = scale.requests / llm.trace.seconds  # requests/s
    seen: dict[tuple[str, float], list[list[Point]]] = {}
    for _ in progress(range(scale.repeats), "measuring"):
        for rate in (round(most / 3, 3), round(2 * most / 3, 3)):
            for series, (policy, chunk) in runs.items():
                generate(
                    llm,
                    make_requests(poisson(scale.requests, rate), prompts, outputs),
                    policy,
                    chunk,
                )
                seen.setdefault((series, rate), []).append(
                    points_of(llm.trace, series, rate, *measured_on(llm))
                )
    rows = []
    for turns in seen.values():
        for number, point in enumerate(turns[-1]):
            median = float(np.median([turn[number].y for turn in turns]))
            rows.append(replace(point, y=median))
    return rows


def draw(points: list[Point]) -> plt.Figure:
    sources = [source for source in ("predicted", "measured") if curves(points, source)]
    figure, panels = plt.subplots(
        len(sources), 2, figsize=(16, 6 * len(sources)), layout="constrained", squeeze=False
    )
    for row, source in zip(panels, sources, strict=True):
        found = curves(points, source)
        for axes, name in zip(row, ("P99 TBT", "median TTFT"), strict=True):
            for series, curve in found.items():
                metric, _, policy = series.partition(", ")
                if metric == name:
                    colour, marker = STYLES[policy.split()[0]]
                    small = policy.endswith("C=512") and source == "predicted"
                    plot_points(
                        axes,
                        curve,
                        color=COLOURS["sky"] if small else colour,
                        marker="P" if small else marker,
                        label=policy,
                    )
            axes.set(xlabel="requests per second", ylabel=f"{name} (s)")
            if source == "predicted":
                axes.set_yscale("log")
            else:  # two rates, and values of one size
                axes.set_ylim(bottom=0)
        if SLO in found:
            row[0].axhline(
                found[SLO][0].y,
                color="black",
                linestyle=":",
                label=f"strict SLO: {found[SLO][0].y:.2f} s",
            )
        row[0].legend()
        title = (
            measured_title(points)
            if source == "measured"
            else f"predicted: {YI.model} on {YI.hardware}, chat lengths"
        )
        row[0].set_title(title)
    figure.suptitle("Sarathi-Serve Fig 1b: latency against load", fontsize=18)
    return figure


FIGURE = Figure(
    name="serve_latency",
    description=__doc__,
    paper={},
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(8,), chunk_sizes=(64,), repeats=1, requests=24),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16,), repeats=1, requests=6),
    shown=lambda point: point.source == "measured" or point.series.startswith(("P99", SLO)),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
