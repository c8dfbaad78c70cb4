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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from costmodel import CostModel, make_batch
from experiments.lib.common import ROOT, print_table, progress
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.look import panels
from experiments.lib.measuring import generate, time_batches, warm_up
from experiments.lib.rows import Rows, make_directory
from experiments.lib.steady import run_priced
from experiments.lib.study import finish
from experiments.lib.validation import draw_agreement, draw_lengths, error_summary, errors, pairs
from scheduler import POLICIES
from serving.calibration import CalibratedModel, Calibration
from simulate import CostExecutor
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

BATCH_SIZES, PROMPTS, OUTPUTS, CHUNK_SIZES = (2, 8), (32, 1024), (4, 128), (64, 128, 256, 512)
QUANTITIES = {"total time": "s", "mean iteration": "ms", "throughput": "tokens/s"}  # compared
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


def quantities(trace: Trace) -> dict[str, float]:
    """QUANTITIES of a run."""
    mean = 1e3 * trace.seconds / len(trace.iterations)
    found = (trace.seconds, mean, trace.throughput)
    return dict(zip(QUANTITIES, found, strict=True))


def compare(llm: "LLM", cost: CostModel, workloads: Sequence[Draw], rounds: int) -> Rows:
    """A predicted and a measured row of each workload.

    There is an odd number of rounds over all workloads; the run of median length counts.
    """
    warm_up(llm)
    runs: list[list[tuple[Trace, float]]] = [[] for _ in workloads]
    for i in progress(rounds * list(range(len(workloads))), "validating"):
        work, drift = workloads[i], measured_drift(llm, cost)
        llm.max_batch_size = work.batch_size  # the cache has slots for the largest
        generate(llm, work.requests(), work.policy, work.chunk_size)
        runs[i].append((llm.trace, drift))
    middle = [sorted(run, key=lambda pair: pair[0].seconds)[rounds // 2] for run in runs]
    rows = Rows((), QUANTITIES | {"drift": "x"})
    for number, (work, (trace, drift)) in enumerate(zip(workloads, middle, strict=True), start=1):
        case = {"model": cost.model.name, "hardware": cost.gpu.name, "workload": number}
        case |= {"policy": work.policy, "B": work.batch_size}
        case |= {} if work.policy in WHOLE_PROMPTS else {"C": work.chunk_size}
        rows.append({"source": "predicted"} | case | quantities(predict(cost, work)))
        rows.append({"source": "measured"} | case | quantities(trace) | {"drift": drift})
    return rows


def measured_drift(llm: "LLM", cost: CostModel) -> float:
    """Measured over predicted seconds of a prompt and of a step of decodes.

    1 if the machine runs as it did when it was calibrated.
    """
    probes = [make_batch([(0, 256, 257)]), make_batch(decodes=BATCH_SIZES[1], context=512)]
    results = zip(probes, time_batches(llm, probes, repeats=3), strict=True)
    return statistics.mean(result.seconds / cost.seconds(batch) for batch, result in results)


def print_outcomes(workloads: Sequence[Draw], rows: Rows) -> None:
    table, names = [], []
    for quantity, unit in QUANTITIES.items():
        names += [f"{quantity}, {unit}", "measured", "error"]
    for work, (ours, real) in zip(workloads, pairs(rows), strict=True):
        cells = [real["workload"], work.policy, work.batch_size, real.get("C", "-")]
        cells += [len(work.lengths), round(1e3 * real["total time"] / real["mean iteration"])]
        for quantity in QUANTITIES:
            cells += [f"{row[quantity]:.4g}" for row in (ours, real)]
            cells.append(f"{100 * (ours[quantity] / real[quantity] - 1):+.1f} %")
        table.append([*cells, f"{100 * (real['drift'] - 1):+.1f} %"])
    title = "The first of each three columns is predicted"
    print_table(["", "policy", "B", "C", "requests", "iterations", *names, "drift"], table, title)
    print_errors(rows)
    drift = statistics.median(rows.column("drift")) - 1
    print(f"\nmedian drift since the calibration: {100 * drift:+.1f} %")


def print_errors(rows: Rows) -> None:
    title = f"Absolute error over {len(pairs(rows))} workloads"
    table = [[name, *error_summary(errors(rows, name))] for name in QUANTITIES]
    print_table(["quantity", "median", "p90", "worst", "signed median"], table, title)


def draw(rows: Rows) -> plt.Figure:
    """A panel for each quantity."""
    figure, [grid] = panels(1, len(QUANTITIES), 6, 6.6)
    for axes, (quantity, unit) in zip(grid, QUANTITIES.items(), strict=True):
        draw_agreement(axes, rows, quantity, f"({unit})", relative=0.1)
        median, p90, *_ = error_summary(errors(rows, quantity))
        axes.set_title(f"{quantity}: median error {median}, p90 {p90}")
    grid[0].legend(loc="upper left")
    where = f"{rows[0]['model']} on {rows[0]['hardware']}"
    figure.suptitle(f"{where}: predicted from a calibration of this machine", fontsize=18)
    return figure


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | WRITES).parse_args()
    calibration = Calibration.read(options.calibration)
    make_directory(options.out, "validate", force=options.force)
    llm, cost = load_llm(calibration), CalibratedModel(calibration)
    workloads = draw_workloads(options.samples, options.seed)
    rows = compare(llm, cost, workloads, options.repeats)
    print(f"{cost.model.name} on {cost.gpu.name}, calibrated {calibration.date}\n")
    print_outcomes(workloads, rows)
    finish(options.out / "validate.csv", rows, draw)


if __name__ == "__main__":
    run_main(main)
