"""How far off are the predictions?

Random workloads run for real on this machine, and are predicted from its calibration.

    python experiments/calibrate.py && python experiments/validate.py
        20 workloads over all policies: some minutes

A workload draws its batch size (2 to 8), its chunk size, and for each request a prompt of 32 to
1024 and an output of 4 to 128 tokens. The same requests go through the same scheduler twice: on the
real engine, and on `CalibratedModel`. The prediction is made from the calibration file alone and
never re-scaled. A machine's speed drifts (frequency, neighbours). So two fixed batches are timed
before each workload: the `drift` column says how much slower than calibrated they were, and
corrects nothing. Every workload runs three times, in three rounds, and its median counts.
"""

import enter  # noqa: F401

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from costmodel import CostModel, make_batch
from experiments.lib.common import ROOT, Point, Record, print_table, progress, values_at
from experiments.lib.figure import finish
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.look import panels
from experiments.lib.measuring import generate, time_batches, warm_up
from experiments.lib.rows import make_directory
from experiments.lib.steady import run_priced
from experiments.lib.validation import draw_agreement, draw_lengths, error_summary
from scheduler import POLICIES
from serving.calibration import CalibratedModel, Calibration
from simulate import CostExecutor
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

BATCH_SIZES, PROMPTS, OUTPUTS, CHUNK_SIZES = (2, 8), (32, 1024), (4, 128), (64, 128, 256, 512)
QUANTITIES = {  # what is compared
    "total time": ("s", lambda trace: trace.seconds),
    "mean iteration": ("ms", lambda trace: 1e3 * trace.seconds / len(trace.iterations)),
    "throughput": ("tokens/s", lambda trace: trace.throughput),
}
WHOLE_PROMPTS = ("request_level", "orca", "vllm_v0")  # policies that have no C
FLAGS = {
    "calibration": Flag(
        "calibration of this machine", ROOT / "results" / "calibration-laptop.json"
    ),
    "samples": Flag("workloads that are drawn", 20, len(POLICIES)),
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


@dataclass(frozen=True)
class Outcome:
    """What became of a workload. drift: measured over predicted seconds of two fixed batches."""

    work: Draw
    predicted: Trace
    measured: Trace
    drift: float

    def error(self, quantity: str) -> float:
        """(predicted - measured) / measured."""
        _, value = QUANTITIES[quantity]
        return value(self.predicted) / value(self.measured) - 1


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


def load_llm(calibration: Calibration) -> "LLM":
    """The model that was calibrated, on the machine that it was calibrated on."""
    calibration.check_machine()
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
    return LLM(calibration.load, **where, **sizes)


def predict(cost: CostModel, work: Draw) -> Trace:
    executor, sizes = CostExecutor(cost), (work.chunk_size, work.batch_size)
    return run_priced(executor, work.requests(), work.policy, *sizes)


def compare(llm: "LLM", cost: CostModel, workloads: Sequence[Draw], rounds: int) -> list[Outcome]:
    """There is an odd number of rounds over all workloads; the run of median length counts."""
    warm_up(llm)
    runs: list[list[tuple[Trace, float]]] = [[] for _ in workloads]
    for i in progress(rounds * list(range(len(workloads))), "validating"):
        work, drift = workloads[i], measured_drift(llm, cost)
        llm.max_batch_size = work.batch_size  # the cache has slots for the largest
        generate(llm, work.requests(), work.policy, work.chunk_size)
        runs[i].append((llm.trace, drift))
    middle = [sorted(run, key=lambda pair: pair[0].seconds)[rounds // 2] for run in runs]
    pairs = zip(workloads, middle, strict=True)
    return [Outcome(work, predict(cost, work), *pair) for work, pair in pairs]


def measured_drift(llm: "LLM", cost: CostModel) -> float:
    """Measured over predicted seconds of a prompt and of a step of decodes.

    1 if the machine runs as it did when it was calibrated.
    """
    probes = [make_batch([(0, 256, 257)]), make_batch(decodes=BATCH_SIZES[1], context=512)]
    results = zip(probes, time_batches(llm, probes, repeats=3), strict=True)
    return statistics.mean(result.seconds / cost.seconds(batch) for batch, result in results)


def print_outcomes(found: Sequence[Outcome]) -> None:
    rows, names = [], []
    for quantity, (unit, _) in QUANTITIES.items():
        names += [f"{quantity}, {unit}", "measured", "error"]
    for number, each in enumerate(found, start=1):
        work = each.work
        chunk_size = "-" if work.policy in WHOLE_PROMPTS else work.chunk_size
        cells = [number, work.policy, work.batch_size, chunk_size, len(work.lengths)]
        cells.append(len(each.measured.iterations))
        for quantity, (_, value) in QUANTITIES.items():
            cells += [f"{value(trace):.4g}" for trace in (each.predicted, each.measured)]
            cells.append(f"{100 * each.error(quantity):+.1f} %")
        rows.append([*cells, f"{100 * (each.drift - 1):+.1f} %"])
    print_table(["", "policy", "B", "C", "requests", "iterations", *names, "drift"], rows)
    title = (
        f"Absolute error over {len(found)} workloads (the first of each three columns is predicted)"
    )
    rows = [[name, *error_summary([each.error(name) for each in found])] for name in QUANTITIES]
    print_table(["quantity", "median", "p90", "worst", "signed median"], rows, title)
    drift = statistics.median(each.drift for each in found) - 1
    print(f"\nmedian drift since the calibration: {100 * drift:+.1f} %")


def make_points(found: Sequence[Outcome], model: str, hardware: str) -> list[Point]:
    """Two rows per workload and quantity; x is the workload's number in the draw."""
    record = Record("validate", model, hardware)
    for number, each in enumerate(found, start=1):
        size = f"{each.work.policy} B={each.work.batch_size}"
        if each.work.policy not in WHOLE_PROMPTS:
            size += f" C={each.work.chunk_size}"
        for quantity, (unit, value) in QUANTITIES.items():
            series = f"{quantity}, {size}"
            record.add(series, value(each.predicted), unit, number, "workload")
            record.append(replace(record[-1], y=value(each.measured), source="measured"))
    return record


def draw(points: Sequence[Point]) -> plt.Figure:
    """A panel for each quantity."""
    figure, [grid] = panels(1, len(QUANTITIES), 6, 6.6)
    predicted, measured = values_at(points), values_at(points, "measured")
    for axes, (quantity, (unit, _)) in zip(grid, QUANTITIES.items(), strict=True):
        pairs: dict[str, list[tuple[float, float]]] = {policy: [] for policy in sorted(POLICIES)}
        for place, value in predicted.items():
            name, policy_and_sizes = place[0].split(", ")
            if name == quantity:
                pairs[policy_and_sizes.split()[0]].append((measured[place], value))
        pairs = {policy: both for policy, both in pairs.items() if both}
        draw_agreement(axes, pairs, f"({unit})", relative=0.1)
        errors = [guess / real - 1 for both in pairs.values() for real, guess in both]
        median, p90, *_ = error_summary(errors)
        axes.set_title(f"{quantity}: median error {median}, p90 {p90}")
    grid[0].legend(loc="upper left")
    where = f"{points[0].model} on {points[0].hardware}"
    figure.suptitle(f"{where}: predicted from a calibration of this machine", fontsize=18)
    return figure


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | WRITES).parse_args()
    calibration = Calibration.read(options.calibration)
    make_directory(options.out, "validate", force=options.force)
    llm, cost = load_llm(calibration), CalibratedModel(calibration)
    found = compare(llm, cost, draw_workloads(options.samples, options.seed), options.repeats)
    model, hardware = calibration.model.name, calibration.gpu.name
    print(f"{model} on {hardware}, calibrated {calibration.date}\n")
    print_outcomes(found)
    points = make_points(found, model, hardware)
    finish(options, "validate", points, lambda: draw(points))


if __name__ == "__main__":
    run_main(main)
