"""All policies on the same four requests, as Gantt pictures (Sarathi-Serve, Sec 3.2, Fig 7).

    python experiments/policies.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/policies.py --measure    and the real engine: policies_measured.png
    python experiments/policies.py --perfetto out.json    all runs, for https://ui.perfetto.dev

A and B have short prompts and are decoding when C and D arrive together, with long prompts. Who
waits now? With whole prompts (left column), either C and D wait, or A and B stall. With chunks
(right column), the token budget C bounds how long an iteration lasts, and with it every gap between
two tokens. A stall is a gap longer than five decode-only iterations: Sarathi-Serve's strict SLO
(its Table 3).
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from experiments.lib.common import (
    MEASURE_DEFAULTS,
    Point,
    make_directory,
    make_figure_parser,
    parse_options,
    positive,
    print_table,
    progress,
    three_digits,
    with_kept,
    write_csv,
)
from experiments.lib.look import save_figure, use_style
from experiments.lib.measuring import generate, load_llm, measured_on, warm_up
from experiments.lib.steady import simulate_operators
from pictures import perfetto
from pictures.gantt import draw_lanes, legend_handles
from pictures.lanes import request_lanes
from scheduler import POLICIES
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU, CHUNK_SIZE = "llama-13b", "a6000", 512
NAMES = dict(enumerate("ABCD"))
# the left column: policies that never cut a prompt
WHOLE = ("request_level", "vllm_v0", "orca", "hybrid_only")
STALL = 5  # decode-only iterations


def workload(chunk_size: int, arrival: float = 0.0) -> list[Request]:
    """The requests A, B, C and D.

    A and B have half a chunk of prompt, and 14 and 20 output tokens. C and D have two and a half
    chunks and 6 output tokens each, and arrive at `arrival` seconds.
    """
    short, long = max(1, chunk_size // 2), 5 * chunk_size // 2
    sizes = [(short, 14, 0.0), (short, 20, 0.0), (long, 6, arrival), (long, 6, arrival)]
    return [
        Request(i, range(prompt), output, arrival=moment)
        for i, (prompt, output, moment) in enumerate(sizes)
    ]


def arrival_and_bound(alone: Trace) -> tuple[float, float]:
    """When C and D arrive, and what is a stall, both in seconds, from a run of A and B alone.

    C and D arrive halfway between A's tokens 5 and 6.
    """
    tokens = alone.lives[0].tokens
    decode = statistics.median(i.seconds for i in alone.iterations if i.kind == "decode")
    return (tokens[4] + tokens[5]) / 2, STALL * decode


@dataclass(frozen=True)
class Comparison:
    """The same requests under every policy.

    arrival: of C and D. bound: a longer gap between tokens is a stall. Both are in seconds.
    """

    traces: dict[str, Trace]
    arrival: float
    bound: float


def predict() -> Comparison:
    def run(policy: str, requests: list[Request]) -> Trace:
        return simulate_operators(requests, policy, CHUNK_SIZE, len(NAMES), MODEL, GPU)

    arrival, bound = arrival_and_bound(run("sarathi_serve", workload(CHUNK_SIZE)[:2]))
    return Comparison(
        {policy: run(policy, workload(CHUNK_SIZE, arrival)) for policy in POLICIES}, arrival, bound
    )


def measure(llm: "LLM", chunk_size: int, repeats: int) -> Comparison:
    """For real: the machine's own speed says when C and D arrive, and what a stall is.

    The policies run in turns, `repeats` times. The fastest run of each is kept, since whatever else
    a machine does only ever adds time.
    """

    def run(policy: str, requests: list[Request]) -> Trace:
        generate(llm, requests, policy, chunk_size)
        return llm.trace

    def fastest(traces: list[Trace]) -> Trace:
        return min(traces, key=lambda trace: trace.seconds)

    warm_up(llm)
    arrival, bound = arrival_and_bound(
        fastest([run("sarathi_serve", workload(chunk_size)[:2]) for _ in range(repeats)])
    )
    found: dict[str, list[Trace]] = {}
    for policy in progress(repeats * list(POLICIES), "measuring"):
        found.setdefault(policy, []).append(run(policy, workload(chunk_size, arrival)))
    return Comparison({policy: fastest(traces) for policy, traces in found.items()}, arrival, bound)


def figures_of(trace: Trace) -> dict[str, float]:
    """What the policies are judged by, in seconds."""
    return {
        "TTFT of C": trace.lives[2].ttft,
        "TTFT of D": trace.lives[3].ttft,
        "longest gap of A and B": max(trace.lives[0].tbt + trace.lives[1].tbt),
        "total": trace.seconds,
    }


def points(
    found: Comparison, chunk_size: int, source: str, model: str, hardware: str
) -> list[Point]:
    """Rows of policies.csv: x is the token budget."""

    def point(series: str, y: float, unit: str) -> Point:
        return Point("policies", series, chunk_size, "C", y, unit, source, model, hardware)

    rows = [
        point(f"{policy}, {name}", y, "s")
        for policy, trace in found.traces.items()
        for name, y in figures_of(trace).items()
    ]
    stalls = [
        point(f"{policy}, stalls", len(trace.stalls(found.bound)), "gaps")
        for policy, trace in found.traces.items()
    ]
    return [
        *rows,
        *stalls,
        point("C and D arrive", found.arrival, "s"),
        point("stall bound", found.bound, "s"),
    ]


def print_comparison(found: Comparison) -> None:
    names = list(figures_of(next(iter(found.traces.values()))))
    rows = []
    for policy, trace in found.traces.items():
        numbers = [three_digits(y) for y in figures_of(trace).values()]
        rows.append([policy, *numbers, len(trace.stalls(found.bound))])
    print_table(["policy", *[f"{name} (s)" for name in names], "stalls"], rows)


def draw(found: Comparison, title: str) -> plt.Figure:
    """One panel for each policy, on one time axis.

    Whole prompts are in the left column, chunks in the right one.
    """
    columns = [[name for name in found.traces if (name in WHOLE) == whole] for whole in (1, 0)]
    height = max(len(column) for column in columns)
    style = {"sharex": True, "sharey": True, "layout": "constrained", "squeeze": False}
    figure, grid = plt.subplots(height, 2, figsize=(19, 2.65 * height + 1.2), **style)
    end = max(t.iterations[-1].start + t.iterations[-1].seconds for t in found.traces.values())
    drawn = []
    for column, names in enumerate(columns):
        for axes, name in zip(grid[:, column], names, strict=False):
            trace = found.traces[name]
            drawn.append(request_lanes(trace, found.bound, NAMES))
            draw_lanes(axes, drawn[-1], end=end)
            axes.axvline(found.arrival, color="black", linestyle=":", linewidth=1.5, zorder=1)
            axes.tick_params(axis="y", labelleft=True)
            axes.set_title(name, loc="left", fontweight="bold")
            numbers = figures_of(trace)
            told = (
                f"longest gap of A, B {numbers['longest gap of A and B']:.2f} s; first token of C"
                f" {numbers['TTFT of C']:.2f} s"
            )
            axes.set_title(told, loc="right", fontsize=14)
        for axes in grid[len(names) :, column]:
            axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("time (s); dotted: C and D arrive")
    figure.legend(handles=legend_handles(drawn), loc="outside lower center", ncols=6)
    figure.suptitle(title, fontsize=18)
    return figure


def write_picture(path: Path, found: Comparison, title: str) -> None:
    use_style()
    save_figure(draw(found, title), path)


def main() -> None:
    parser, group = make_figure_parser(__doc__)
    add = group.add_argument
    parser.add_output("--perfetto", "write all runs for https://ui.perfetto.dev (JSON)")
    add(
        "--chunk-size",
        type=positive,
        metavar="C",
        help="token budget; prompts are half of it, and 2.5 times (default: 64)",
    )
    add(
        "--repeats",
        type=positive,
        metavar="N",
        help="runs, of which the fastest is shown (default: 5)",
    )
    options = parse_options(
        parser,
        MEASURE_DEFAULTS | {"chunk_size": 64, "repeats": 5},
        {"chunk_size": 16, "repeats": 1},
    )
    llm = (
        load_llm(options, len(NAMES), 5 * options.chunk_size // 2 + 20) if options.measure else None
    )
    make_directory(
        options.out,
        "policies",
        others=["policies.png", *(["policies_measured.png"] if llm else [])],
        force=options.force,
    )

    predicted = predict()
    rows = points(predicted, CHUNK_SIZE, "predicted", MODEL, GPU)
    runs: Mapping[str, Trace] = predicted.traces
    setting = f"C = {CHUNK_SIZE} tokens; a stall is a gap over {1e3 * predicted.bound:.0f} ms"
    title = (
        f"One workload, all policies. Left: whole prompts. Right: chunks.\npredicted: {MODEL} on"
        f" {GPU}, {setting}"
    )
    write_picture(options.out / "policies.png", predicted, title)
    print(f"predicted: {MODEL} on {GPU}, {setting}; C and D arrive at {predicted.arrival:.2f} s\n")
    print_comparison(predicted)
    if llm is not None:
        measured = measure(llm, options.chunk_size, options.repeats)
        source, model, hardware = measured_on(llm)
        rows += points(measured, options.chunk_size, source, model, hardware)
        runs = predicted.traces | {f"measured {p}": trace for p, trace in measured.traces.items()}
        setting = (
            f"C = {options.chunk_size} tokens; a stall is a gap over {1e3 * measured.bound:.0f} ms"
        )
        title = (
            f"One workload, all policies. Left: whole prompts. Right: chunks.\nmeasured: {model},"
            f" {hardware}, {setting}"
        )
        write_picture(options.out / "policies_measured.png", measured, title)
        print(
            f"\nmeasured, the fastest of {options.repeats} runs each: {model}, {hardware},"
            f" {setting}; C and D arrive at {measured.arrival:.2f} s\n"
        )
        print_comparison(measured)
    write_csv(options.out / "policies.csv", with_kept(options.out / "policies.csv", rows))
    if options.perfetto:
        perfetto.save(options.perfetto, runs, NAMES)
        print(f"wrote {options.perfetto}: open it on https://ui.perfetto.dev")
    print(f"\nwrote {options.out / 'policies.png'} and .csv")


if __name__ == "__main__":
    run_main(main)
