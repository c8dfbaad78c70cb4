"""Does the simulated pipeline tell the truth?

Random workloads run on a real pipeline of two processes, and the same ones are predicted.

    OMP_NUM_THREADS=1 python experiments/calibrate.py --json results/calibration-stage.json
        one thread: what a stage gets of two cores; two of four
    python experiments/validate_pipeline.py --calibration results/calibration-stage.json
        some minutes
    python experiments/validate_pipeline.py --td-pipe --calibration results/calibration-stage.json
        the same workloads under TD-Pipe, sarathi, sarathi_serve and vllm_v0

The calibration is of the whole model in one process. A stage is predicted to take its share of the
layers, and the last one the head as well (`pipeline.StageCosts`). A first run, which does not
count, measures the way between stages. Predictions are made from these two alone. Workloads run in
turn, several times; medians are compared.

The two stages share the memory, and all else that a machine has only once. A calibration of one
process does not know what one stage costs the other. The `alone` column is the same prediction with
all costs scaled: by the measured work of the stages over the predicted work. It says how well clock
and schedules agree when costs are right. It is shown to tell the two apart, and is not the result.
"""

import enter  # noqa: F401

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt

import pipeline
from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from experiments.lib.common import ROOT, print_table
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.look import panels
from experiments.lib.rows import SOURCES, WHERE, Rows, make_directory
from experiments.lib.study import finish
from experiments.lib.validation import draw_agreement, draw_lengths, errors, pairs
from scheduler import POLICIES
from serving.calibration import CalibratedModel, Calibration

STAGES, BATCH_SIZE, CHUNK_SIZE = 2, 3, 128
REQUESTS, PROMPTS, OUTPUTS = (5, 8), (32, 400), (4, 24)
# With --td-pipe: more requests than slots, so that TD-Pipe has several phases.
COMPARED, MANY_REQUESTS = ("td_pipe", "sarathi", "sarathi_serve", "vllm_v0"), (14, 20)
TARGET_TIME, TARGET_SHARE = 10.0, 5.0  # %, points: medians that we set out to reach
# work: the stages' measured work over the predicted. time alone: predicted with costs scaled by it.
UNITS = {"total time": "s", "bubble share": "%", "work": "x", "time alone": "s"}
FLAGS = {
    "calibration": Flag("calibration of this machine", ROOT / "results" / "calibration-stage.json"),
    "samples": Flag("workloads that are drawn", 8, 2),
    "repeats": Flag("runs of each workload, whose median is taken", 3, 1),
    "seed": Flag("seed of the draw", 0),
    "td_pipe": Flag(f"run each workload under {', '.join(COMPARED)} (writes validate_td_pipe)"),
}


@dataclass(frozen=True)
class Draw:
    """One random workload: (prompt, output) tokens of each request, all there from the start."""

    policy: str
    lengths: tuple[tuple[int, int], ...]

    @property
    def flag(self) -> str:
        return f"{self.policy}@" + ",".join(f"{prompt}:{output}" for prompt, output in self.lengths)


def draw_workloads(count: int, seed: int) -> list[Draw]:
    """Random workloads, taking turns over the policies."""
    dice, policies = random.Random(seed), sorted(POLICIES)
    return [
        Draw(policies[i % len(policies)], draw_lengths(dice, REQUESTS, PROMPTS, OUTPUTS))
        for i in range(count)
    ]


def draw_compared(count: int, seed: int) -> list[Draw]:
    """Each of `count` random workloads under each policy of COMPARED."""
    dice = random.Random(seed)
    lengths = [draw_lengths(dice, MANY_REQUESTS, PROMPTS, OUTPUTS) for _ in range(count)]
    return [Draw(policy, each) for each in lengths for policy in COMPARED]


# --------------------------------------------------------------------------- predicted and measured


def predict(
    calibration: Calibration, work: Draw, hop: float, slower: float = 1.0
) -> pipeline.PipelineTrace:
    """The same schedulers on the calibrated clock. slower: a factor on all costs."""
    model = CalibratedModel(calibration)
    costs = pipeline.StageCosts(model, pipeline.even_layers(model.model.n_layer, STAGES))
    sizes, prices = (STAGES, STAGES, BATCH_SIZE, CHUNK_SIZE), pipeline.seconds_of_rows(model)
    filled = pipeline.make_micro_batches(work.policy, *sizes, seconds_of=prices)
    for i, (prompt, output) in enumerate(work.lengths):
        filled.add(Request(i, range(prompt), output))
    trace = pipeline.PipelineTrace(STAGES, filled.count)
    scaled = lambda batch: [slower * seconds for seconds in costs(batch)]
    return pipeline.run_pipeline(filled, scaled, trace, pipeline.Hop(latency=hop))


def run_for_real(
    calibration: Calibration, workloads: Sequence[Draw], repeats: int
) -> list[list[dict]]:
    """What distributed.py measured: for each workload, one dict for each repeat."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.json"
        options = {
            "--stages": STAGES,
            "--model": calibration.load,
            "--max-batch-size": BATCH_SIZE,
            "--chunk-size": CHUNK_SIZE,
            "--max-length": PROMPTS[1] + OUTPUTS[1],
            "--dtype": calibration.dtype,
            "--device": "cpu",
            "--repeats": repeats,
            "--json": out,
        }
        command = [sys.executable, str(ROOT / "distributed.py")]
        command += [word for work in workloads for word in ("--lengths", work.flag)]
        command += [str(word) for option in options.items() for word in option]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"distributed.py failed: {last}")
        runs = json.loads(out.read_text(encoding="utf-8"))
    return [[run for run in runs if run["workload"] == index] for index in range(len(workloads))]


def compare(calibration: Calibration, workloads: Sequence[Draw], repeats: int) -> Rows:
    """A predicted and a measured row of each workload. The same requests are the same workload.

    The first one is run once more before, to warm up and to measure the hop.
    """
    warm_up, *measured = run_for_real(calibration, [workloads[0], *workloads], repeats)
    hop = median(run["hop"] for run in warm_up)
    rows, place = Rows((), UNITS), (calibration.model.name, calibration.gpu.name)
    numbers = list(dict.fromkeys(work.lengths for work in workloads))
    for work, runs in zip(workloads, measured, strict=True):
        trace = predict(calibration, work, hop)
        slower = median(sum(run["busy"]) for run in runs) / sum(trace.busy)
        alone = predict(calibration, work, hop, slower).seconds
        real = [median(run[what] for run in runs) for what in ("seconds", "bubble_share")]
        for source, (seconds, share), more in (
            ("predicted", (trace.seconds, trace.bubble_share), {"time alone": alone}),
            ("measured", real, {"work": slower}),
        ):
            row = dict(zip(WHERE, (source, *place), strict=True))
            row |= {"workload": 1 + numbers.index(work.lengths), "policy": work.policy}
            rows.append(row | {"total time": seconds, "bubble share": 100 * share} | more)
    return rows


# ------------------------------------------------------------------------------- tables and picture


def show(workloads: Sequence[Draw], rows: Rows) -> None:
    cells = []
    for work, (ours, real) in zip(workloads, pairs(rows), strict=True):
        cells.append([work.policy, len(work.lengths)])
        cells[-1] += [f"{row['total time']:.2f}" for row in (ours, real)]
        cells[-1].append(f"{100 * (ours['total time'] / real['total time'] - 1):+.1f} %")
        cells[-1] += [f"{row['bubble share']:.1f}" for row in (ours, real)]
        cells[-1].append(f"{ours['bubble share'] - real['bubble share']:+.1f}")
        alone = 100 * (ours["time alone"] / real["total time"] - 1)
        cells[-1] += [f"{real['work']:.3f}", f"{alone:+.1f} %"]
    names = ["policy", "requests", "total time, s", "measured", "error", "bubbles, %", "measured"]
    print_table([*names, "error", "work, measured/predicted", "alone"], cells)
    print(f"\nmedian error over {len(workloads)} workloads")
    for name, scale, target, unit in (
        ("total time", 100, TARGET_TIME, "%"),
        ("bubble share", 1, TARGET_SHARE, "points"),
    ):
        sizes = [scale * abs(error) for error in errors(rows, name, relative=unit == "%")]
        verdict = "met" if median(sizes) <= target else "missed"
        found = f"{median(sizes):.1f} {unit} (worst {max(sizes):.1f})"
        print(f"  {name}: {found}; target {target:g} {unit}: {verdict}")


def show_compared(rows: Rows) -> None:
    """Each policy beside TD-Pipe on the same workloads: medians."""
    groups, cells = rows.by("policy"), []
    for policy, group in groups.items():
        cells.append([policy])
        for source in SOURCES[1:]:
            own, these = (each.where(source=source) for each in (groups[COMPARED[0]], group))
            times = zip(these.column("total time"), own.column("total time"), strict=True)
            time = median(seconds / other for seconds, other in times)
            cells[-1] += [f"{median(these.column('bubble share')):.1f}", f"{time:.3f}"]
    print(f"\nmedians over {len(own)} workloads: bubbles in %, and time over TD-Pipe's")
    print_table(["policy", "predicted: bubbles", "time", "measured: bubbles", "time"], cells)


def draw(rows: Rows) -> plt.Figure:
    figure, [grid] = panels(1, 2, 7, 6.8)
    for axes, quantity, band in (
        (grid[0], "total time", {"relative": TARGET_TIME / 100}),
        (grid[1], "bubble share", {"absolute": TARGET_SHARE}),
    ):
        draw_agreement(axes, rows, quantity, f"{quantity} ({UNITS[quantity]})", **band)
    grid[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    where = f"{rows[0]['model']}, {STAGES} processes on {rows[0]['hardware']}"
    figure.suptitle(where, fontsize=15)
    return figure


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file. Raises UserError where it is not of this machine."""
    if not path.exists():
        threads = max(1, (os.cpu_count() or 1) // STAGES)  # as distributed.py shares the cores out
        raise UserError(
            f"no calibration {path}: make one, with the threads that a stage gets, by"
            f" OMP_NUM_THREADS={threads} python experiments/calibrate.py --json {path}"
        )
    calibration = Calibration.read(path)
    calibration.check_machine()
    return calibration


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | WRITES).parse_args()
    calibration = read_calibration(options.calibration)
    name = "validate_td_pipe" if options.td_pipe else "validate_pipeline"
    make_directory(options.out, name, force=options.force)
    drawn = draw_compared if options.td_pipe else draw_workloads
    workloads = drawn(options.samples, options.seed)
    rows = compare(calibration, workloads, options.repeats)
    where = f"{calibration.model.name} on {calibration.gpu.name}"
    print(f"{__doc__.splitlines()[0]}\n\n{where}, {STAGES} stages of one process each\n")
    show(workloads, rows)
    if options.td_pipe:
        show_compared(rows)
    finish(options.out / f"{name}.csv", rows, draw)


if __name__ == "__main__":
    run_main(main)
