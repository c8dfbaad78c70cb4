"""Sarathi-Serve, Fig 1a: output tokens over time.

vllm_v0 stalls for seconds whenever prompts come in; sarathi_serve never does.

    python experiments/serve_stalls.py
        predicted for Yi-34B on two A100s: seconds, no GPU needed
    python experiments/serve_stalls.py --measure
        and the real engine on this machine
    python experiments/serve_stalls.py --perfetto out.json
        all runs, for https://ui.perfetto.dev

In the paper's experiment 128 long prompts (arxiv_summarization) wait from the start, and the token
budget is 1536 tokens. Whenever a request ends, the next one's prompt is prefilled; what the running
requests do meanwhile is the policy's choice. On this machine we look for the same shape, with
prompts and a budget that a laptop's model runs three times in two minutes.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from cli import run_main
from experiments.lib.common import Point, curves, progress
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import measured_title
from experiments.lib.measuring import generate, measured_on, warm_up
from experiments.lib.papers import ARXIV, LOOKS, YI
from serving.capacity import p99_tbt, token_times
from serving.traffic import Uniform, make_requests
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

POLICIES = ("vllm_v0", "orca", "sarathi_serve")
REQUESTS, BUDGET = 128, 1536  # of the paper's artefact (osdi-experiments/figure-1)
STALL = 1.0  # s: gaps longer than this are counted
STEPS = 250  # points of each curve
TRACES: dict[str, Trace] = {}  # the runs, for --perfetto


def waiting(requests: list[Request]) -> list[Request]:
    """The same requests, all there from the start."""
    return [Request(request.request_id, request.prompt, request.max_tokens) for request in requests]


def points_of(trace: Trace, policy: str, source: str, model: str, hardware: str) -> list[Point]:
    """The curve of one run, and what its gaps are like."""

    def point(series: str, x: float, x_unit: str, y: float, y_unit: str) -> Point:
        return Point(
            "serve_stalls", f"{series}, {policy}", x, x_unit, y, y_unit, source, model, hardware
        )

    moments, start = np.linspace(0, trace.seconds, STEPS), trace.iterations[0].start
    tokens = np.searchsorted(np.array(token_times(trace)) - start, moments, side="right")
    tokens[-1] = len(token_times(trace))  # all, whatever the difference was rounded to
    numbers = {
        "longest gap": (max(trace.tbts), "s"),
        f"gaps above {STALL:g} s": (len(trace.stalls(STALL)), "gaps"),
        "P99 TBT": (p99_tbt(trace), "s"),
        "all requests done": (trace.seconds, "s"),
    }
    curve = [
        point("output tokens", float(x), "s", int(y), "tokens")
        for x, y in zip(moments, tokens, strict=True)
    ]
    return curve + [point(name, 0, "", y, unit) for name, (y, unit) in numbers.items()]


def predict(quick: bool) -> list[Point]:
    points = []
    for policy in POLICIES:
        requests = waiting(ARXIV.requests(40 if quick else REQUESTS))
        TRACES[policy] = YI.serve(requests, policy, BUDGET)
        points += points_of(TRACES[policy], policy, "predicted", YI.model, YI.hardware)
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """The median of the numbers over `repeats` turns of all policies.

    The curves are those of the last turn.
    """
    (length,), (budget,) = scale.lengths, scale.chunk_sizes
    seen: list[list[Point]] = []
    warm_up(llm)
    for _ in progress(range(scale.repeats), "measuring"):
        turn = []
        for policy in POLICIES:
            requests = make_requests(
                [0.0] * scale.requests,
                Uniform(length // 4, 3 * length // 4),
                Uniform(length // 16, length // 4),
            )
            generate(llm, requests, policy, budget)
            TRACES[f"measured {policy}"] = llm.trace
            turn += points_of(llm.trace, policy, *measured_on(llm))
        seen.append(turn)
    columns = zip(*[[point.y for point in turn] for turn in seen], strict=True)
    medians = [float(np.median(column)) for column in columns]
    return [
        point if point.x_unit else replace(point, y=median)
        for point, median in zip(seen[-1], medians, strict=True)
    ]


def draw(points: list[Point]) -> plt.Figure:
    sources = [source for source in ("predicted", "measured") if curves(points, source)]
    figure, rows = plt.subplots(
        1, len(sources), figsize=(10 * len(sources), 6.5), layout="constrained", squeeze=False
    )
    for axes, source in zip(rows[0], sources, strict=True):
        found = curves(points, source)
        for policy in POLICIES:
            curve, (gap,) = found[f"output tokens, {policy}"], found[f"longest gap, {policy}"]
            label = f"{policy}: longest gap {gap.y:.2f} s"
            axes.plot(
                [point.x for point in curve],
                [point.y for point in curve],
                color=LOOKS[policy][0],
                drawstyle="steps-post",
                label=label,
            )
        title = (
            measured_title(points)
            if source == "measured"
            else f"predicted: {YI.model} on {YI.hardware}\narxiv lengths, token budget {BUDGET}"
        )
        axes.set(xlabel="seconds", ylabel="output tokens of all requests", title=title)
        axes.legend()
    figure.suptitle("Sarathi-Serve Fig 1a: output tokens over time", fontsize=18)
    return figure


FIGURE = Figure(
    name="serve_stalls",
    description=__doc__,
    paper={},
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(8,), chunk_sizes=(64,), repeats=3, requests=24),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16,), repeats=1, requests=6),
    shown=lambda point: not point.x_unit,
    traces=TRACES,
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
