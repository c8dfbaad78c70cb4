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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt

import pipeline
from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from experiments.lib.common import ROOT, Point, Record, print_table, values_at
from experiments.lib.figure import finish
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.look import panels
from experiments.lib.rows import make_directory
from experiments.lib.validation import draw_agreement, draw_lengths
from scheduler import POLICIES
from serving.calibration import CalibratedModel, Calibration

STAGES, BATCH_SIZE, CHUNK_SIZE = 2, 3, 128
REQUESTS, PROMPTS, OUTPUTS = (5, 8), (32, 400), (4, 24)
# With --td-pipe: more requests than slots, so that TD-Pipe has several phases.
COMPARED, MANY_REQUESTS = ("td_pipe", "sarathi", "sarathi_serve", "vllm_v0"), (14, 20)
TARGET_TIME, TARGET_SHARE = 10.0, 5.0  # %, points: medians that we set out to reach
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


@dataclass(frozen=True)
class Row:
    """A workload's seconds and bubble share, predicted and measured; `alone`: see above."""

    work: Draw
    predicted: tuple[float, float]
    measured: tuple[float, float]
    alone: tuple[float, float]
    busy: float  # measured work over predicted work

    @property
    def time_error(self) -> float:
        return 100 * (self.predicted[0] / self.measured[0] - 1)

    @property
    def share_error(self) -> float:
        return 100 * (self.predicted[1] - self.measured[1])


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


def compare(calibration: Calibration, workloads: Sequence[Draw], repeats: int) -> list[Row]:
    """The first workload is run once more before, to warm up and to measure the hop."""
    warm_up, *measured = run_for_real(calibration, [workloads[0], *workloads], repeats)
    hop = median(run["hop"] for run in warm_up)
    rows = []
    for work, runs in zip(workloads, measured, strict=True):
        trace = predict(calibration, work, hop)
        slower = median(sum(run["busy"]) for run in runs) / sum(trace.busy)
        scaled = predict(calibration, work, hop, slower)
        real = (median(run["seconds"] for run in runs), median(run["bubble_share"] for run in runs))
        predicted, alone = ((each.seconds, each.bubble_share) for each in (trace, scaled))
        rows.append(Row(work, predicted, real, alone, slower))
    return rows


# ------------------------------------------------------------------------------- tables and picture


def show(rows: Sequence[Row]) -> None:
    cells = []
    for row in rows:
        times = [f"{seconds:.2f}" for seconds, _ in (row.predicted, row.measured)]
        shares = [f"{100 * share:.1f}" for _, share in (row.predicted, row.measured)]
        alone = 100 * (row.alone[0] / row.measured[0] - 1)
        errors = (f"{row.time_error:+.1f} %", f"{row.share_error:+.1f}")
        start = [row.work.policy, len(row.work.lengths), *times, errors[0], *shares, errors[1]]
        cells.append([*start, f"{row.busy:.3f}", f"{alone:+.1f} %"])
    names = ["policy", "requests", "total time, s", "measured", "error", "bubbles, %", "measured"]
    print_table([*names, "error", "work, measured/predicted", "alone"], cells)
    print(f"\nmedian error over {len(rows)} workloads")
    for name, errors, target, unit in (
        ("total time", [abs(row.time_error) for row in rows], TARGET_TIME, "%"),
        ("bubble share", [abs(row.share_error) for row in rows], TARGET_SHARE, "points"),
    ):
        verdict = "met" if median(errors) <= target else "missed"
        found = f"{median(errors):.1f} {unit} (worst {max(errors):.1f})"
        print(f"  {name}: {found}; target {target:g} {unit}: {verdict}")


def show_compared(rows: Sequence[Row]) -> None:
    """Each policy beside TD-Pipe on the same workloads: medians."""
    own = {row.work.lengths: row for row in rows if row.work.policy == COMPARED[0]}
    cells = []
    for policy in COMPARED:
        these = [row for row in rows if row.work.policy == policy]
        pairs = [(row, own[row.work.lengths]) for row in these]
        predicted = median(row.predicted[0] / other.predicted[0] for row, other in pairs)
        measured = median(row.measured[0] / other.measured[0] for row, other in pairs)
        bubbles = [100 * median(row.predicted[1] for row in these)]
        bubbles.append(100 * median(row.measured[1] for row in these))
        numbers = [f"{bubbles[0]:.1f}", f"{predicted:.3f}", f"{bubbles[1]:.1f}", f"{measured:.3f}"]
        cells.append([policy, *numbers])
    print(f"\nmedians over {len(own)} workloads: bubbles in %, and time over TD-Pipe's")
    print_table(["policy", "predicted: bubbles", "time", "measured: bubbles", "time"], cells)


def make_points(rows: Sequence[Row], calibration: Calibration, figure: str) -> list[Point]:
    record = Record(figure, calibration.model.name, calibration.gpu.name)
    for number, row in enumerate(rows, start=1):
        for source, (seconds, share) in (("predicted", row.predicted), ("measured", row.measured)):
            record.add(f"total time, {row.work.policy}", seconds, "s", number, "workload")
            record.add(f"bubble share, {row.work.policy}", 100 * share, "%", number, "workload")
            record[-2:] = [replace(point, source=source) for point in record[-2:]]
    return record


def draw(points: Sequence[Point]) -> plt.Figure:
    figure, [grid] = panels(1, 2, 7, 6.8)
    predicted, measured = values_at(points), values_at(points, "measured")
    for axes, name, unit, band in (
        (grid[0], "total time", "s", {"relative": TARGET_TIME / 100}),
        (grid[1], "bubble share", "%", {"absolute": TARGET_SHARE}),
    ):
        pairs: dict[str, list[tuple[float, float]]] = {}
        for place, value in predicted.items():
            what, policy = place[0].split(", ")
            if what == name:
                pairs.setdefault(policy, []).append((measured[place], value))
        draw_agreement(axes, pairs, f"{name} ({unit})", **band)
    grid[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    where = f"{points[0].model}, {STAGES} processes on {points[0].hardware}"
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
    rows = compare(calibration, drawn(options.samples, options.seed), options.repeats)
    where = f"{calibration.model.name} on {calibration.gpu.name}"
    print(f"{__doc__.splitlines()[0]}\n\n{where}, {STAGES} stages of one process each\n")
    show(rows)
    if options.td_pipe:
        show_compared(rows)
    points = make_points(rows, calibration, name)
    finish(options, name, points, lambda: draw(points))


if __name__ == "__main__":
    run_main(main)
