"""All policies on the same four requests, as Gantt pictures (Sarathi-Serve, Sec 3.2, Fig 7).

    python experiments/policies.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/policies.py --measure    and the real engine: policies_measured.png
    python experiments/policies.py --perfetto out.json    all runs, for https://ui.perfetto.dev
    python experiments/policies.py --policy-file examples/target_tbt.py    yours, too

W and X have short prompts and are decoding when Y and Z arrive together, with long prompts. Who
waits now? With whole prompts (left), either Y and Z wait, or W and X stall. With chunks (right),
the token budget C bounds how long an iteration lasts, and with it every gap between two tokens.
prefill_first has chunks, too, and yet W and X stall. A stall is a gap longer than five decode-only
iterations: Sarathi-Serve's strict SLO (its Table 3). The table has all policies.
"""

import enter  # noqa: F401

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import matplotlib.pyplot as plt

from batch import Request
from command.cli import claim, run_main
from command.flags import Flag
from experiments.lib import flags, look, measuring
from experiments.lib.common import progress
from experiments.lib.engines import Priced
from experiments.lib.flags import MEASURE, file_name, start
from experiments.lib.rows import WHERE, Row, Rows, print_rows, with_kept
from experiments.lib.study import finish
from more.pictures import perfetto
from more.pictures.gantt import draw_lanes, legend_handles
from more.pictures.lanes import request_lanes
from more.policies import compared
from timeline import Trace

MODEL = "llama-13b"
GPU = "a6000"
CHUNK_SIZE = 512
NAMES = dict(enumerate("WXYZ"))
# the left column: policies that never cut a prompt
WHOLE = ("request_level", "vllm_v0", "orca", "hybrid_only")
# of ours; the table has all
PICTURED = ("request_level", "vllm_v0", "orca", "sarathi", "sarathi_serve", "prefill_first")
NOT_PICTURED = {*compared()}.difference(PICTURED)
STALL = 5  # decode-only iterations
SECONDS = (
    "TTFT of Y",
    "TTFT of Z",
    "longest gap of W and X",
    "total",
    "Y and Z arrive",
    "stall bound",
)
UNITS = dict.fromkeys(SECONDS, "s") | {"stalls": "gaps"}
FLAGS = (
    MEASURE
    | flags.POLICIES
    | {
        "perfetto": Flag("write all runs for https://ui.perfetto.dev (JSON)"),
        "chunk_size": Flag(
            "token budget; prompts have half of it, and 2.5 times it", 64, 16, measure=True
        ),
        "repeats": Flag("runs of each policy, of which the fastest is shown", 5, 1, measure=True),
    }
)


def workload(chunk_size: int, arrival: float = 0.0) -> list[Request]:
    """The requests W, X, Y and Z.

    W and X have half a chunk of prompt, and 14 and 20 output tokens. Y and Z have two and a half
    chunks and 6 output tokens each, and arrive at `arrival` seconds.
    """
    short = max(1, chunk_size // 2)
    long = 5 * chunk_size // 2
    sizes = [(short, 14, 0.0), (short, 20, 0.0), (long, 6, arrival), (long, 6, arrival)]
    return [
        Request(i, range(prompt), output, arrival=moment)
        for i, (prompt, output, moment) in enumerate(sizes)
    ]


def arrival_and_bound(alone: Trace) -> tuple[float, float]:
    """When Y and Z arrive, and what is a stall, both in seconds, from a run of W and X alone.

    Y and Z arrive halfway between W's tokens 5 and 6.
    """
    tokens = alone.lives[0].tokens
    decode = statistics.median(i.seconds for i in alone.iterations if i.kind == "decode")
    return (tokens[4] + tokens[5]) / 2, STALL * decode


@dataclass(frozen=True)
class Comparison:
    """The same requests under every policy.

    arrival: of Y and Z. bound: a longer gap between tokens is a stall. Both are in seconds. where:
    source, model, hardware.
    """

    traces: dict[str, Trace]
    chunk_size: int
    arrival: float
    bound: float
    where: tuple[str, str, str]

    def describe(self) -> str:
        source, model, hardware = self.where
        place = f"{model} on {hardware}" if source == "predicted" else f"{model}, {hardware}"
        bound = f"a stall is a gap over {1e3 * self.bound:.0f} ms"
        return f"{source}: {place}, C = {self.chunk_size} tokens; {bound}"

    def about(self) -> dict[str, perfetto.About]:
        """What each run was, for --perfetto."""
        return {name: perfetto.About(*self.where, name, self.chunk_size) for name in self.traces}


def compare(
    run: Callable[[str, list[Request]], Trace],
    where: tuple[str, str, str],
    chunk_size: int = CHUNK_SIZE,
    repeats: int = 1,
    policies: Sequence[str] | None = None,
) -> Comparison:
    """`run` the requests under all policies in turns, `repeats` times. policies: those to add.

    A run of W and X alone says when Y and Z arrive, and what a stall is. The fastest run of each
    policy is kept, since whatever else a machine does only ever adds time.
    """
    alone = [run("sarathi_serve", workload(chunk_size)[:2]) for _ in range(repeats)]
    fastest = partial(min, key=attrgetter("seconds"))
    arrival, bound = arrival_and_bound(fastest(alone))
    runs: dict[str, list[Trace]] = {policy: [] for policy in (*compared(), *(policies or ()))}
    for policy in progress(repeats * list(runs), "running"):
        runs[policy].append(run(policy, workload(chunk_size, arrival)))
    kept = {policy: fastest(traces) for policy, traces in runs.items()}
    return Comparison(kept, chunk_size, arrival, bound, where)


def predict(policies: Sequence[str] | None = None) -> Comparison:
    engine = Priced(MODEL, GPU)

    def run(policy: str, requests: list[Request]) -> Trace:
        return engine.trace(requests, policy, CHUNK_SIZE, len(NAMES), operators=True)

    return compare(run, ("predicted", MODEL, GPU), policies=policies)


def measure(
    llm: "measuring.LLM", chunk_size: int, repeats: int, policies: Sequence[str] | None = None
) -> Comparison:
    def run(policy: str, requests: list[Request]) -> Trace:
        measuring.generate(llm, requests, policy, chunk_size)
        return llm.trace

    measuring.warm_up(llm)
    where = "measured", llm.config.name, measuring.hardware_of(llm)
    return compare(run, where, chunk_size, repeats, policies)


def figures_of(trace: Trace) -> dict[str, float]:
    """What the policies are judged by, in seconds."""
    return {
        "TTFT of Y": trace.lives[2].ttft,
        "TTFT of Z": trace.lives[3].ttft,
        "longest gap of W and X": max(trace.lives[0].tbt + trace.lives[1].tbt),
        "total": trace.seconds,
    }


def rows_of(found: Comparison) -> list[Row]:
    """A row for each policy, and one for what all share. C: the token budget."""
    run = dict(zip(WHERE, found.where, strict=True)) | {"C": found.chunk_size}
    rows = [
        {**run, "policy": policy, **figures_of(trace), "stalls": len(trace.stalls(found.bound))}
        for policy, trace in found.traces.items()
    ]
    return [*rows, {**run, "Y and Z arrive": found.arrival, "stall bound": found.bound}]


def print_comparison(found: Comparison) -> None:
    rows = Rows(rows_of(found), UNITS).where("policy")
    title = f"{found.describe()}; Y and Z arrive at {found.arrival:.2f} s"
    print_rows(rows, ["policy", *SECONDS[:4], "stalls"], title)


def draw(found: Comparison) -> plt.Figure:
    """One panel for each policy, on one time axis: whole prompts left, chunks right."""
    whole = [name for name in found.traces if name in WHOLE]
    chunks = [name for name in found.traces if name not in WHOLE]
    columns = [whole, chunks]
    rows = max(len(column) for column in columns)
    figure, grid = look.panels(rows, 2, 9.5, 2.65 + 1.2 / rows, sharex=True, sharey=True)
    last = [trace.iterations[-1] for trace in found.traces.values()]
    end = max(iteration.end for iteration in last)
    drawn = []
    for column, names in zip(zip(*grid, strict=True), columns, strict=True):
        for axes, name in zip(column, names, strict=False):
            trace = found.traces[name]
            lanes = request_lanes(trace, found.bound, NAMES)
            drawn.append(draw_lanes(axes, lanes, end=end))
            axes.axvline(found.arrival, color="black", linestyle=":", linewidth=1.5, zorder=1)
            axes.tick_params(axis="y", labelleft=True)
            axes.set_title(name, loc="left", fontweight="bold")
            numbers = figures_of(trace)
            gap = numbers["longest gap of W and X"]
            first = numbers["TTFT of Y"]
            told = f"longest gap of W, X {gap:.2f} s; first token of Y {first:.2f} s"
            axes.set_title(told, loc="right", fontsize=14)
        for axes in column[len(names) :]:
            axes.set_axis_off()
        if names:  # the time axis stands below the column's last policy
            lowest = column[len(names) - 1]
            lowest.tick_params(axis="x", labelbottom=True)
            lowest.set_xlabel("time (s); dotted: Y and Z arrive")
    figure.legend(handles=legend_handles(drawn), loc="outside lower center", ncols=6)
    figure.suptitle(f"One workload. Left: whole prompts. Right: chunks\n{found.describe()}")
    return figure


def pictured(found: Comparison) -> plt.Figure:
    """Of PICTURED, and of a user's own."""
    traces = {name: run for name, run in found.traces.items() if name not in NOT_PICTURED}
    return draw(replace(found, traces=traces))


def main() -> None:
    options = start("policies", __doc__, **FLAGS)
    name = file_name("policies", options)
    llm = None
    picture = options.out / f"{name}_measured.png"
    if options.measure:
        claim(picture, options.force)
        llm = measuring.load_llm(options, len(NAMES), 5 * options.chunk_size // 2 + 20)
    predicted = predict(options.policy)
    print_comparison(predicted)
    rows = rows_of(predicted)
    runs = dict(predicted.traces)
    about = predicted.about()
    if llm is not None:
        measured = measure(llm, options.chunk_size, options.repeats, options.policy)
        print_comparison(measured)
        print(f"\nRuns of each policy: {options.repeats}. The fastest is shown.")
        rows += rows_of(measured)
        runs |= {f"measured {policy}": trace for policy, trace in measured.traces.items()}
        about |= {f"measured {policy}": run for policy, run in measured.about().items()}
        look.use_style()
        look.save_figure(pictured(measured), picture)
        print(f"\nwrote {picture}")
    path = options.out / f"{name}.csv"
    finish(path, with_kept(path, Rows(rows, UNITS)), lambda rows: pictured(predicted))
    if options.perfetto:
        perfetto.save(options.perfetto, runs, NAMES, about=about)
        print(f"wrote {options.perfetto}: open it on https://ui.perfetto.dev")


if __name__ == "__main__":
    run_main(main)
