"""How far off are the predictions?

Random workloads run for real on this machine, and are predicted from its calibration.

    python experiments/calibrate.py && python experiments/validate.py
        20 workloads over all policies: some minutes
    OMP_NUM_THREADS=1 python experiments/calibrate.py --json results/calibration-stage.json
        one thread: what a stage gets of two cores; two of four
    python experiments/validate.py --pipeline
        8 workloads on a real pipeline of two processes
    python experiments/validate.py --td-pipe
        there, the same workloads under TD-Pipe, sarathi, sarathi_serve and vllm_v0

All requests of a workload are there from the start. They go through the same scheduler twice: for
real, and on `CalibratedModel`. Workloads run in turn, several times; medians are compared. The
prediction is made from the calibration file alone and never re-scaled.

A machine's speed drifts (frequency, neighbours). So two fixed batches are timed before each
workload: the `drift` column says how many times the calibrated seconds they took, and corrects
nothing.

A stage is predicted to take its share of the layers, and the last one the head as well
(`pipeline.StageCosts`). A first run, which does not count, measures the way between stages. The
stages share the memory, and a calibration of one process does not know what one costs the other.
`time alone` is the same prediction with all costs scaled by `work`: measured over predicted seconds
of each process. It says how well clock and schedules agree when costs are right, and is not the
result.
"""

import enter  # noqa: F401

import json
import operator
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import matplotlib.pyplot as plt

import pipeline
from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from costmodel import CostModel, make_batch
from experiments.lib.common import ROOT, print_table
from experiments.lib.engines import Real, Sweep
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.look import panels
from experiments.lib.rows import SOURCES, Row, Rows, make_directory, print_rows, with_kept
from experiments.lib.steady import run_priced
from experiments.lib.study import finish
from experiments.lib.validation import draw_agreement, error_summary, errors, newest, pairs
from scheduler import POLICIES
from serving.calibration import RESULTS, CalibratedModel, Calibration
from simulate import CostExecutor

BATCH_SIZES, CHUNK_SIZES = (2, 8), (64, 128, 256, 512)
PROMPTS, OUTPUTS = (32, 1024), (4, 128)  # tokens, without a pipeline
STAGES, STAGE_PROMPTS, STAGE_OUTPUTS, STAGE_SIZES = 2, (32, 400), (4, 24), (3, 128)  # B and C
WHOLE_PROMPTS = ("request_level", "orca", "vllm_v0")  # policies that have no C
# With --td-pipe: more requests than slots, so that TD-Pipe has several phases.
COMPARED = ("td_pipe", "sarathi", "sarathi_serve", "vllm_v0")
FEW_REQUESTS, MANY_REQUESTS = (5, 8), (14, 20)
QUANTITIES = {"total time": "s", "mean iteration": "ms", "throughput": "tokens/s"}  # compared
STAGED = {"total time": "s", "bubble share": "%"}
WORKS = ("work of process 0", "work of process 1")
BESIDE = {"drift": "x", **dict.fromkeys(WORKS, "x"), "time alone": "s"}
UNITS = QUANTITIES | STAGED | BESIDE
TARGET = 10.0  # %: the band that the pictures show; of quantities WITHIN, in points
WITHIN = {"bubble share": {"absolute": 5.0}}
# alone, and of a pipeline; each also with --quick
SAMPLES = {"laptop": (20, len(POLICIES)), "stage": (8, 2)}
FLAGS = {
    "pipeline": Flag(),
    "td_pipe": Flag(f"run each workload under {', '.join(COMPARED)}, on a pipeline"),
    "calibration": Flag(
        "calibration of this machine",
        shown="results/calibration-laptop.json; of a pipeline, calibration-stage.json",
    ),
    "samples": Flag("workloads that are drawn", shown="20; of a pipeline, 8"),
    "seed": Flag("seed of the draw", 0),
    "repeats": Flag("runs of each workload, whose median is taken", 3, 1),
}


@dataclass(frozen=True)
class Draw:
    """One random workload: (prompt, output) tokens of each request, all there from the start."""

    policy: str
    batch_size: int  # B
    chunk_size: int  # C
    lengths: tuple[tuple[int, int], ...]

    def requests(self) -> list[Request]:
        """Fresh ones: a scheduler changes them."""
        return [Request(i, range(prompt), o) for i, (prompt, o) in enumerate(self.lengths)]

    @property
    def flag(self) -> str:
        return f"{self.policy}@" + ",".join(f"{prompt}:{output}" for prompt, output in self.lengths)


Range = tuple[int, int]  # the smallest and the largest value


def draw_lengths(dice: random.Random, requests: Range, prompts: Range, outputs: Range) -> tuple:
    """(prompt, output) tokens of a random number of requests."""
    count = dice.randint(*requests)
    return tuple((dice.randint(*prompts), dice.randint(*outputs)) for _ in range(count))


def draw_workloads(count: int, seed: int) -> list[Draw]:
    """`count` workloads of B to 2 B requests each, taking turns over the policies."""
    dice, policies = random.Random(seed), sorted(POLICIES)
    workloads = []
    for i in range(count):
        size = dice.randint(*BATCH_SIZES)
        lengths = draw_lengths(dice, (size, 2 * size), PROMPTS, OUTPUTS)
        policy = policies[i % len(policies)]
        workloads.append(Draw(policy, size, dice.choice(CHUNK_SIZES), lengths))
    return workloads


def draw_staged(count: int, seed: int, compared: bool = False) -> list[Draw]:
    """The same for a pipeline; compared: each of them under each policy of COMPARED."""
    dice, policies = random.Random(seed), sorted(POLICIES)
    number = MANY_REQUESTS if compared else FEW_REQUESTS
    drawn = [draw_lengths(dice, number, STAGE_PROMPTS, STAGE_OUTPUTS) for _ in range(count)]
    return [
        Draw(policy, *STAGE_SIZES, lengths)
        for i, lengths in enumerate(drawn)
        for policy in (COMPARED if compared else [policies[i % len(policies)]])
    ]


# ----------------------------------------------------------------------------------- without stages


def run(engine: SimpleNamespace | Real, cost: CostModel, works: Sequence[Draw], **case: int) -> Row:
    """QUANTITIES of a workload, and the drift.

    That is measured over predicted seconds of a prompt and of a step of decodes: 1 if the machine
    runs as it did when it was calibrated.
    """
    probes = [make_batch([(0, 256, 257)]), make_batch(decodes=BATCH_SIZES[1], context=512)]
    drift = fmean(engine.seconds(batch) / cost.seconds(batch) for batch in probes)
    work = works[case["workload"] - 1]
    trace = engine.trace(work.requests(), work.policy, work.chunk_size, work.batch_size)
    mean = 1e3 * trace.seconds / len(trace.iterations)
    found = dict(zip(QUANTITIES, (trace.seconds, mean, trace.processed), strict=True))
    return found | ({"drift": drift} if isinstance(engine, Real) else {})


def calibrated(cost: CostModel) -> SimpleNamespace:
    """The calibrated machine, as an engine."""
    return SimpleNamespace(
        model=cost.model.name,
        hardware=cost.gpu.name,
        seconds=cost.seconds,
        trace=lambda *work: run_priced(CostExecutor(cost), *work),
    )


def compare(calibration: Calibration, works: Sequence[Draw], repeats: int) -> Rows:
    """A predicted and a measured row of each workload."""
    most = PROMPTS[1] + OUTPUTS[1]
    if calibration.model.max_length < most:
        raise UserError(
            f"{calibration.model.name} allows {calibration.model.max_length} tokens; the workloads"
            f" need up to {most}"
        )
    from engine import LLM  # here, since predicting needs no torch

    sizes = {"max_batch_size": BATCH_SIZES[1], "max_length": most}
    # what was calibrated: operators are timed one by one, which no CUDA graph allows
    where = {"dtype": calibration.dtype, "device": calibration.device, "cuda_graphs": "off"}
    real = Real(LLM(calibration.load, **where, **sizes), repeats)
    cost, cases = CalibratedModel(calibration), []
    for number, work in enumerate(works, start=1):
        case = {"workload": number, "policy": work.policy, "B": work.batch_size}
        cases.append(case | ({} if work.policy in WHOLE_PROMPTS else {"C": work.chunk_size}))
    sweep = Sweep(partial(run, cost=cost, works=works), [calibrated(cost)], cases, measured=cases)
    both = zip(sweep.predict(quick=False), sweep.measure(real, quick=False), strict=True)
    return Rows([row for each in both for row in each], UNITS)


# -------------------------------------------------------------------------------------- with stages


def predict(
    calibration: Calibration, work: Draw, hop: float, slower: Sequence[float] = (1.0, 1.0)
) -> pipeline.PipelineTrace:
    """The same schedulers on the calibrated clock. slower: a factor on the costs of each stage."""
    model = CalibratedModel(calibration)
    costs = pipeline.StageCosts(model, pipeline.even_layers(model.model.n_layer, STAGES))
    sizes, prices = (STAGES, STAGES, *STAGE_SIZES), pipeline.seconds_of_rows(model)
    filled = pipeline.make_micro_batches(work.policy, *sizes, seconds_of=prices)
    for request in work.requests():
        filled.add(request)
    trace = pipeline.PipelineTrace(STAGES, filled.count)
    scaled = lambda batch: list(map(operator.mul, slower, costs(batch)))
    return pipeline.run_pipeline(filled, scaled, trace, pipeline.Hop(latency=hop))


def run_for_real(calibration: Calibration, works: Sequence[Draw], repeats: int) -> list[list[dict]]:
    """What `generate.py --stages` measured: for each workload, one dict for each repeat."""
    size, chunk_size = STAGE_SIZES
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.json"
        options = {
            "--stages": STAGES,
            "--model": calibration.load,
            "--max-batch-size": size,
            "--chunk-size": chunk_size,
            "--max-length": STAGE_PROMPTS[1] + STAGE_OUTPUTS[1],
            "--dtype": calibration.dtype,
            "--device": "cpu",
            "--json": out,
        }
        command = [sys.executable, str(ROOT / "generate.py")]
        command += [word for work in works for word in ("--lengths", work.flag)] * repeats
        command += [str(word) for option in options.items() for word in option]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"generate.py failed: {last}")
        runs = json.loads(out.read_text(encoding="utf-8"))
    return [runs[index :: len(works)] for index in range(len(works))]


def compare_staged(calibration: Calibration, works: Sequence[Draw], repeats: int) -> Rows:
    """As `compare`. The same requests are the same workload.

    The first one is run once more before, to warm up and to measure the hop.
    """
    warm_up, *measured = run_for_real(calibration, [works[0], *works], repeats)
    hop, rows = median(run["hop"] for run in warm_up), Rows((), UNITS)
    where = {"model": calibration.model.name, "hardware": calibration.gpu.name}
    numbers = list(dict.fromkeys(work.lengths for work in works))
    foretell = partial(predict, calibration, hop=hop)
    for work, runs in zip(works, measured, strict=True):
        ours, real = foretell(work), [SimpleNamespace(**run) for run in runs]
        busy = map(median, zip(*(run.busy for run in real), strict=True))
        slower = list(map(operator.truediv, busy, ours.busy))
        case = where | {"workload": 1 + numbers.index(work.lengths), "policy": work.policy}
        for source, several, beside in (
            ("predicted", [ours], {"time alone": foretell(work, slower=slower).seconds}),
            ("measured", real, dict(zip(WORKS, slower, strict=True))),
        ):
            found = {"total time": median(run.seconds for run in several)}
            found["bubble share"] = 100 * median(run.bubble_share for run in several)
            rows.append({"source": source} | case | found | beside)
    return rows


# ------------------------------------------------------------------------------- tables and picture


def compared_in(rows: Rows) -> dict[str, str]:
    """The quantities that were predicted and measured."""
    return {name: unit for name, unit in UNITS.items() if name not in BESIDE and rows.where(name)}


def print_outcomes(rows: Rows) -> None:
    """Each workload, then the errors of all."""
    lines = Rows(rows.case(real) for _, real in pairs(rows))
    for name, unit in compared_in(rows).items():
        off, ending = off_by(rows, name)
        for line, (ours, real), error in zip(lines, pairs(rows), off, strict=True):
            line |= {f"{name}, {unit}": ours[name], f"measured {name}": real[name]}
            line[f"error of {name}"] = f"{error:+.1f} {ending}"
    for line, both in zip(lines, pairs(rows), strict=True):
        line |= {name: row[name] for row in both for name in BESIDE if name in row}
    print_rows(lines, list(dict.fromkeys(name for line in lines for name in line)))
    print_errors(rows)
    if drifts := newest(rows).column("drift"):
        print(f"\nmedian drift since the calibration: {100 * (median(drifts) - 1):+.1f} %")


def off_by(rows: Rows, name: str) -> tuple[list[float], str]:
    """What the predictions of a quantity are off by, and in what."""
    return errors(rows, name, name not in WITHIN), "points" if name in WITHIN else "%"


def print_errors(rows: Rows) -> None:
    title = f"Absolute error over {len(pairs(rows))} workloads"
    table = []
    for name in compared_in(rows):
        off, unit = off_by(rows, name)
        table.append([name, *error_summary(off, unit)])
    print_table(["quantity", "median", "p90", "worst", "signed median"], table, title)


def print_compared(rows: Rows) -> None:
    """Each policy beside TD-Pipe on the same workloads: medians."""
    groups, cells = newest(rows).by("policy"), []
    for policy, group in groups.items():
        cells.append([policy])
        for source in SOURCES[1:]:
            own, these = (each.where(source=source) for each in (groups[COMPARED[0]], group))
            times = zip(these.column("total time"), own.column("total time"), strict=True)
            time = median(seconds / other for seconds, other in times)
            cells[-1] += [f"{median(these.column('bubble share')):.1f}", f"{time:.3f}"]
    title = f"medians over {len(own)} workloads: bubbles in %, and time over TD-Pipe's"
    header = ["policy", "predicted: bubbles", "time", "measured: bubbles", "time"]
    print_table(header, cells, title)


def draw(rows: Rows) -> plt.Figure:
    """A panel for each quantity."""
    rows = newest(rows)
    found = compared_in(rows)
    figure, [grid] = panels(1, len(found), 6.5, 6.7)
    for axes, (quantity, unit) in zip(grid, found.items(), strict=True):
        draw_agreement(
            axes, rows, quantity, unit, **WITHIN.get(quantity, {"relative": TARGET / 100})
        )
    grid[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    processes = "" if "throughput" in found else f", {STAGES} processes"
    where = f"{rows[0]['model']}{processes} on {rows[0]['hardware']}"
    figure.suptitle(f"{where}: predicted from a calibration of this machine", fontsize=18)
    return figure


def read_calibration(path: Path, kind: str) -> Calibration:
    """The calibration in a file. Raises UserError where it is not of this machine."""
    if kind != "laptop" and not path.exists():
        threads = max(1, (os.cpu_count() or 1) // STAGES)  # as `launch.take_cores` shares them out
        raise UserError(
            f"no calibration {path}: make one, with the threads that a {kind} gets, by"
            f" OMP_NUM_THREADS={threads} python experiments/calibrate.py --json {path}"
        )
    calibration = Calibration.read(path)
    calibration.check()
    return calibration


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | WRITES).parse_args()
    way = next((each for each in ("td_pipe", "pipeline") if getattr(options, each)), "")
    kind = "stage" if way else "laptop"
    name = f"validate_{way}".rstrip("_")
    standard = RESULTS / f"calibration-{kind}.json"
    calibration = read_calibration(options.calibration or standard, kind)
    make_directory(options.out, name, force=options.force)
    count = options.samples or SAMPLES[kind][options.quick]
    if way:
        works = draw_staged(count, options.seed, options.td_pipe)
        rows = compare_staged(calibration, works, options.repeats)
    else:
        rows = compare(calibration, draw_workloads(count, options.seed), options.repeats)
    print(f"{calibration.model.name} on {calibration.gpu.name}, calibrated {calibration.date}\n")
    print_outcomes(rows)
    if options.td_pipe:
        print_compared(rows)
    path = options.out / f"{name}.csv"
    finish(path, with_kept(path, rows, sources=SOURCES[1:]), draw)


if __name__ == "__main__":
    run_main(main)
