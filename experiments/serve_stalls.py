"""Sarathi-Serve, Fig 1a: output tokens over time.

vllm_v0 stalls for seconds whenever prompts come in; sarathi_serve never does.

    python experiments/serve_stalls.py
        predicted for Yi-34B on two A100s: seconds, no GPU needed
    python experiments/serve_stalls.py --measure
        and the real engine on this machine
    python experiments/serve_stalls.py --perfetto out.json
        all runs, for https://ui.perfetto.dev

In the paper's experiment 128 long prompts (arxiv_summarization) wait from the start, and the token
budget is 1536 tokens. Whenever a request ends, the next one's prompt is prefilled. The policy
decides what the running requests do meanwhile. On this machine we look for the same shape, with
prompts and a budget that a laptop's model runs three times in two minutes.
"""

import enter  # noqa: F401

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from command.flags import Flag
from experiments.lib import measuring
from experiments.lib.common import Point, Record, curves, progress
from experiments.lib.figure import Figure, Scale
from experiments.lib.flags import POLICIES as POLICY_FLAGS
from experiments.lib.look import panels, plot_points, source_title, sources
from experiments.lib.papers import ARXIV, POLICIES, YI, looks_of
from pictures.perfetto import About
from serving.capacity import p99_tbt, token_times
from serving.traffic import Uniform, make_requests
from timeline import Trace

NAME = "serve_stalls"
REQUESTS, BUDGET = 128, 1536  # of the paper's artefact (osdi-experiments/figure-1)
STALL = 1.0  # s: gaps longer than this are counted
STEPS = 250  # points of each curve
TRACES: dict[str, Trace] = {}  # the runs, for --perfetto
ABOUT: dict[str, About] = {}  # what they are


def waiting(requests: list[Request]) -> list[Request]:
    """The same requests, all there from the start."""
    return [Request(request.request_id, request.prompt, request.max_tokens) for request in requests]


def add_run(record: Record, trace: Trace, policy: str) -> None:
    """The curve of one run, and what its gaps are like."""
    moments, start = np.linspace(0, trace.seconds, STEPS), trace.iterations[0].start
    tokens = np.searchsorted(np.array(token_times(trace)) - start, moments, side="right")
    tokens[-1] = len(token_times(trace))  # all, whatever the difference was rounded to
    for x, y in zip(moments, tokens, strict=True):
        record.add(f"output tokens, {policy}", int(y), "tokens", float(x), "s")
    record.add(f"longest gap, {policy}", max(trace.tbts), "s")
    record.add(f"gaps above {STALL:g} s, {policy}", len(trace.stalls(STALL)), "gaps")
    record.add(f"P99 TBT, {policy}", p99_tbt(trace), "s")
    record.add(f"all requests done, {policy}", trace.seconds, "s")


def predict(
    quick: bool, seed: int = 0, policy: Sequence[str] | None = None, **_: object
) -> list[Point]:
    """policy: more of them, with the same token budget."""
    record = Record(NAME, YI.model, YI.hardware)
    for name in (*POLICIES, *(policy or ())):
        requests = waiting(ARXIV.requests(40 if quick else REQUESTS, seed=seed))
        TRACES[name] = YI.serve(requests, name, BUDGET)
        ABOUT[name] = About("predicted", YI.model, YI.hardware, name, BUDGET)
        add_run(record, TRACES[name], name)
    return record


def measure(llm: "measuring.LLM", scale: Scale, policy: Sequence[str] | None = None) -> list[Point]:
    """The median of the numbers over `repeats` turns of all policies. policy: more of them.

    The curves are those of the last turn.
    """
    (length,), (budget,) = scale.lengths, scale.chunk_sizes
    prompts, outputs = Uniform(length // 4, 3 * length // 4), Uniform(length // 16, length // 4)
    measuring.warm_up(llm)
    turns = []
    for _ in progress(range(scale.repeats), "measuring"):
        turn = Record(NAME, *measuring.measured_on(llm))
        for name in (*POLICIES, *(policy or ())):
            requests = make_requests([0.0] * scale.requests, prompts, outputs)
            measuring.generate(llm, requests, name, budget)
            TRACES[f"measured {name}"] = llm.trace
            model, hardware, source = measuring.measured_on(llm)
            ABOUT[f"measured {name}"] = About(source, model, hardware, name, budget)
            add_run(turn, llm.trace, name)
        turns.append(turn)
    medians = measuring.median_points(turns)
    return [
        point if point.x_unit else median for point, median in zip(turns[-1], medians, strict=True)
    ]


def draw(points: list[Point]) -> plt.Figure:
    rows = sources(points)
    figure, [grid] = panels(1, len(rows), 10, 6.5)
    place = f"{YI.model} on {YI.hardware}\narxiv lengths, token budget {BUDGET}"
    for axes, source in zip(grid, rows, strict=True):
        found = curves(points, source)
        names = [name.split(", ")[1] for name in found if name.startswith("output tokens")]
        for policy, (colour, _) in looks_of(names).items():
            curve, (gap,) = found[f"output tokens, {policy}"], found[f"longest gap, {policy}"]
            style = {"color": colour, "drawstyle": "steps-post"}
            plot_points(axes, curve, label=f"{policy}: longest gap {gap.y:.2f} s", **style)
        title = source_title(points, source, place)
        axes.set(xlabel="seconds", ylabel="output tokens of all requests", title=title)
        axes.legend()
    figure.suptitle("Sarathi-Serve Fig 1a: output tokens over time", fontsize=18)
    return figure


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={},
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=measure,
    draw=draw,
    flags={"seed": Flag("seed of the predicted requests", 0)} | POLICY_FLAGS,
    scale=Scale(lengths=(512,), batch_sizes=(8,), chunk_sizes=(64,), repeats=3, requests=24),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16,), repeats=1, requests=6),
    shown=lambda point: not point.x_unit,
    traces=TRACES,
    about=ABOUT,
)

main = FIGURE.main

if __name__ == "__main__":
    main()
