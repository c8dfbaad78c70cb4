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

import enter  # noqa: F401

from collections.abc import Sequence
from itertools import product

import matplotlib.pyplot as plt

from command.flags import Flag
from experiments.lib import measuring
from experiments.lib.common import Point, Record, curves, progress
from experiments.lib.figure import Figure, Scale
from experiments.lib.flags import POLICIES
from experiments.lib.look import COLOURS, panels, plot_points, source_title, sources
from experiments.lib.papers import CHAT, OURS, RIVALS, YI, looks_of
from serving.capacity import STRICT, median_ttft, p99_tbt
from serving.traffic import LogNormal, make_requests, poisson
from timeline import Trace

NAME = "serve_latency"
REQUESTS = 512
# requests/s; the paper's artefact has 0.55, 0.7 and 1.0
RATES = (0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3, 1.45)
QUICK_RATES = (0.3, 1.0, 1.45)  # those of the caption
SMALL = f"{OURS} C=512"
RUNS = {rival: (rival, 1) for rival in RIVALS} | {
    SMALL: (OURS, 512),
    f"{OURS} C=1536": (OURS, 1536),
}
SLO = "strict SLO"


def add_metrics(record: Record, trace: Trace, series: str, rate: float) -> None:
    tokens = sum(len(life.tokens) for life in trace.lives.values())
    for name, y, unit in (
        ("P99 TBT", p99_tbt(trace), "s"),
        ("median TTFT", median_ttft(trace), "s"),
        ("output tokens/s", tokens / trace.seconds, "tokens/s"),
    ):
        record.add(f"{name}, {series}", y, unit, rate, "requests/s")


def predict(
    quick: bool, seed: int = 0, policy: Sequence[str] | None = None, **_: object
) -> list[Point]:
    """policy: more of them, with the token budget of the strict SLO."""
    runs = RUNS | {f"{name} C=512": (name, 512) for name in policy or ()}
    record = Record(NAME, YI.model, YI.hardware)
    record.add(SLO, STRICT * YI.decode_iteration, "s")
    count = 64 if quick else REQUESTS
    for rate in progress(QUICK_RATES if quick else RATES, "rates"):
        for series, (name, budget) in runs.items():
            trace = YI.serve(CHAT.requests(count, rate, seed), name, budget)
            add_metrics(record, trace, series, rate)
    return record


def measure(llm: "measuring.LLM", scale: Scale, policy: Sequence[str] | None = None) -> list[Point]:
    """At a third and at two thirds of what this machine can serve. policy: more of them.

    Each number is the median over the turns of all policies.
    """
    (length,), (budget,), count = scale.lengths, scale.chunk_sizes, scale.requests
    prompts = LogNormal(length / 4, length / 2, 3 * length // 4)
    outputs = LogNormal(length / 16, length / 8, length // 4)
    runs = {rival: (rival, 1) for rival in RIVALS}
    runs |= {f"{name} C={budget}": (name, budget) for name in (OURS, *(policy or ()))}
    measuring.warm_up(llm)
    together = make_requests([0.0] * count, prompts, outputs)
    measuring.generate(llm, together, OURS, budget)
    most = count / llm.trace.seconds  # requests/s
    turns = []
    for _ in progress(range(scale.repeats), "measuring"):
        turn = Record(NAME, *measuring.measured_on(llm))
        for rate, (series, run) in product((most / 3, 2 * most / 3), runs.items()):
            rate = round(rate, 3)
            requests = make_requests(poisson(count, rate), prompts, outputs)
            measuring.generate(llm, requests, *run)
            add_metrics(turn, llm.trace, series, rate)
        turns.append(turn)
    return measuring.median_points(turns)


def draw(points: list[Point]) -> plt.Figure:
    rows = sources(points)
    figure, grid = panels(len(rows), 2, 8, 6)
    for row, source in zip(grid, rows, strict=True):
        found = curves(points, source)
        for axes, name in zip(row, ("P99 TBT", "median TTFT"), strict=True):
            shown = [series for series in found if series.startswith(name)]
            looks = looks_of([series.removeprefix(f"{name}, ").split()[0] for series in shown])
            for series in shown:
                policy = series.removeprefix(f"{name}, ")
                colour, marker = looks[policy.split()[0]]
                if policy == SMALL and source == "predicted":
                    colour, marker = COLOURS["sky"], "P"
                plot_points(axes, found[series], color=colour, marker=marker, label=policy)
            axes.set(xlabel="requests per second", ylabel=f"{name} (s)")
            if source == "predicted":
                axes.set_yscale("log")
            else:  # two rates, and values of one size
                axes.set_ylim(bottom=0)
        for slo in found.get(SLO, []):
            label = f"strict SLO: {slo.y:.2f} s"
            row[0].axhline(slo.y, color="black", linestyle=":", label=label)
        row[0].legend()
        place = f"{YI.model} on {YI.hardware}, chat lengths"
        row[0].set_title(source_title(points, source, place))
    figure.suptitle("Sarathi-Serve Fig 1b: latency against load", fontsize=18)
    return figure


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={},
    software={YI.gpu: "sarathi_serve"},
    predict=predict,
    measure=measure,
    draw=draw,
    flags={"seed": Flag("seed of the predicted requests", 0)} | POLICIES,
    scale=Scale(lengths=(512,), batch_sizes=(8,), chunk_sizes=(64,), repeats=1, requests=24),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16,), repeats=1, requests=6),
    shown=lambda point: point.source == "measured" or point.series.startswith(("P99", SLO)),
)

main = FIGURE.main

if __name__ == "__main__":
    main()
