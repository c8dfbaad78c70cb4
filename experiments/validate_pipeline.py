"""Does the simulated pipeline tell the truth?

Random workloads run on a real pipeline of two processes, and the same ones are predicted.

    OMP_NUM_THREADS=1 python experiments/calibrate.py --out results/calibration-stage.json
        one thread: what a stage gets of two cores; two of four
    python experiments/validate_pipeline.py --calibration results/calibration-stage.json
        some minutes
    python experiments/validate_pipeline.py --td-pipe --calibration results/calibration-stage.json
        the same workloads under TD-Pipe, sarathi, sarathi_serve and vllm_v0

The calibration is of the whole model in one process; a stage is predicted to take its share of the
layers, the last one the head as well (`pipeline.StageCosts`). The way between stages is measured in
a first run that counts for nothing. Predictions are made from these two alone. Workloads run in
turn, several times over; medians are compared.

The two stages share the memory, and whatever else a machine has but once. A calibration of one
process does not know what one costs the other. The `alone` column is the same prediction, made
slower or faster by how much the real stages' work took against the predicted work. It says how well
the clock and the schedules agree when costs are right. It is shown to tell the two apart, and is
not the result.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from configs import UserError
from experiments.lib.calibration import CalibratedModel, Calibration
from experiments.lib.common import (
    ROOT,
    Point,
    make_directory,
    make_parser,
    positive,
    print_table,
    write_csv,
)
from experiments.lib.look import SERIES, save_figure, use_style
from experiments.lib.measuring import this_machine
from pipeline import (
    Hop,
    PipelineTrace,
    StageCosts,
    even_layers,
    make_micro_batches,
    run_pipeline,
    seconds_of_rows,
)
from scheduler import POLICIES

STAGES, BATCH_SIZE, CHUNK_SIZE = 2, 3, 128
REQUESTS, PROMPTS, OUTPUTS = (5, 8), (32, 400), (4, 24)
# With --td-pipe: more requests than slots, so that TD-Pipe has several phases.
COMPARED, MANY_REQUESTS = ("td_pipe", "sarathi", "sarathi_serve", "vllm_v0"), (14, 20)
TARGET_TIME, TARGET_SHARE = 10.0, 5.0  # %, points: medians that we set out to reach


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


def draw_lengths(dice: random.Random, requests: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """(prompt, output) tokens of a random number of requests."""
    return tuple(
        (dice.randint(*PROMPTS), dice.randint(*OUTPUTS)) for _ in range(dice.randint(*requests))
    )


def draw_workloads(count: int, seed: int) -> list[Draw]:
    """Random workloads, taking turns over the policies."""
    dice, policies = random.Random(seed), sorted(POLICIES)
    return [Draw(policies[i % len(policies)], draw_lengths(dice, REQUESTS)) for i in range(count)]


def draw_compared(count: int, seed: int) -> list[Draw]:
    """Each of `count` random workloads under each policy of COMPARED."""
    dice = random.Random(seed)
    lengths = [draw_lengths(dice, MANY_REQUESTS) for _ in range(count)]
    return [Draw(policy, each) for each in lengths for policy in COMPARED]


def predict(calibration: Calibration, work: Draw, hop: float, slower: float = 1.0) -> PipelineTrace:
    """The same schedulers on the calibrated clock. slower: a factor on all costs."""
    model = CalibratedModel(calibration)
    costs = StageCosts(model, even_layers(calibration.model.n_layer, STAGES))
    filled = make_micro_batches(
        work.policy, STAGES, STAGES, BATCH_SIZE, CHUNK_SIZE, seconds_of=seconds_of_rows(model)
    )
    for i, (prompt, output) in enumerate(work.lengths):
        filled.add(Request(i, range(prompt), output))
    return run_pipeline(
        filled,
        lambda batch: [slower * seconds for seconds in costs(batch)],
        PipelineTrace(STAGES, filled.count),
        Hop(latency=hop),
    )


def run_for_real(
    calibration: Calibration, workloads: Sequence[Draw], repeats: int
) -> list[list[dict]]:
    """What distributed.py measured: for each workload, one dict for each repeat.

    The first workload is run once more before, to warm up.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.json"
        flags = [word for work in workloads for word in ("--workload", work.flag)]
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
        script = [sys.executable, str(ROOT / "distributed.py"), *flags]
        script += [str(word) for option in options.items() for word in option]
        done = subprocess.run(script, check=False, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"distributed.py failed: {last}")
        runs = json.loads(out.read_text(encoding="utf-8"))
    return [[run for run in runs if run["workload"] == index] for index in range(len(workloads))]


def compare(calibration: Calibration, workloads: Sequence[Draw], repeats: int) -> list[Row]:
    warm_up, *measured = run_for_real(calibration, [workloads[0], *workloads], repeats)
    hop = statistics.median(run["hop"] for run in warm_up)
    rows = []
    for work, runs in zip(workloads, measured, strict=True):
        trace = predict(calibration, work, hop)
        seconds, share, busy = (
            statistics.median(value(run) for run in runs)
            for value in (
                lambda run: run["seconds"],
                lambda run: run["bubble_share"],
                lambda run: sum(run["busy"]),
            )
        )
        slower = busy / sum(trace.busy)
        alone = predict(calibration, work, hop, slower)
        predicted, ridden = (trace.seconds, trace.bubble_share), (alone.seconds, alone.bubble_share)
        rows.append(Row(work, predicted, (seconds, share), ridden, slower))
    return rows


def show(rows: Sequence[Row]) -> None:
    cells = [
        [
            row.work.policy,
            len(row.work.lengths),
            f"{row.predicted[0]:.2f}",
            f"{row.measured[0]:.2f}",
            f"{row.time_error:+.1f} %",
            f"{100 * row.predicted[1]:.1f}",
            f"{100 * row.measured[1]:.1f}",
            f"{row.share_error:+.1f}",
            f"{row.busy:.3f}",
            f"{100 * (row.alone[0] / row.measured[0] - 1):+.1f} %",
        ]
        for row in rows
    ]
    names = ["policy", "requests", "total time, s", "measured", "error", "bubbles, %", "measured"]
    print_table([*names, "error", "work, measured/predicted", "alone"], cells)
    times, shares = (
        [abs(error(row)) for row in rows]
        for error in (lambda row: row.time_error, lambda row: row.share_error)
    )
    print(f"\nmedian error over {len(rows)} workloads")
    for name, values, target, unit in (
        ("total time", times, TARGET_TIME, "%"),
        ("bubble share", shares, TARGET_SHARE, "points"),
    ):
        middle = statistics.median(values)
        verdict = "met" if middle <= target else "missed"
        print(
            f"  {name}: {middle:.1f} {unit} (worst {max(values):.1f}); target {target:g} {unit}:"
            f" {verdict}"
        )


def show_compared(rows: Sequence[Row]) -> None:
    """Each policy beside TD-Pipe on the same workloads: medians."""
    own = {row.work.lengths: row for row in rows if row.work.policy == COMPARED[0]}
    cells = []
    for policy in COMPARED:
        these = [row for row in rows if row.work.policy == policy]
        cells.append([policy])
        for source in ("predicted", "measured"):
            shares = [100 * getattr(row, source)[1] for row in these]
            ratios = [
                getattr(row, source)[0] / getattr(own[row.work.lengths], source)[0] for row in these
            ]
            cells[-1] += [f"{statistics.median(shares):.1f}", f"{statistics.median(ratios):.3f}"]
    print(f"\nmedians over {len(own)} workloads: bubbles in %, and time over TD-Pipe's")
    names = ["predicted: bubbles", "time", "measured: bubbles", "time"]
    print_table(["policy", *names], cells)


def points(rows: Sequence[Row], calibration: Calibration, figure: str) -> list[Point]:
    found = []
    for number, row in enumerate(rows, start=1):
        for source, (seconds, share) in (("predicted", row.predicted), ("measured", row.measured)):
            for name, value, unit in (
                ("total time", seconds, "s"),
                ("bubble share", 100 * share, "%"),
            ):
                place = (f"{name}, {row.work.policy}", number, "workload", value, unit, source)
                found.append(Point(figure, *place, calibration.model.name, calibration.gpu.name))
    return found


def draw(rows: Sequence[Row], title: str) -> plt.Figure:
    """Predicted against measured: the nearer to the line, the better."""
    figure, panels = plt.subplots(1, 2, figsize=(14, 6.8), layout="constrained")
    policies = list(dict.fromkeys(row.work.policy for row in rows))
    for place, (axes, name, target) in enumerate(
        zip(panels, ("total time (s)", "bubble share (%)"), ("10 %", "5 points"), strict=True)
    ):
        scale = 100 if place else 1
        for number, row in enumerate(rows):
            colour, marker = SERIES[policies.index(row.work.policy) % len(SERIES)]
            filled = colour if policies.index(row.work.policy) < len(SERIES) else "white"
            label = (
                None
                if row.work.policy in [other.work.policy for other in rows[:number]]
                else row.work.policy
            )
            x, y = scale * row.measured[place], scale * row.predicted[place]
            style = {"markerfacecolor": filled, "markersize": 10, "markeredgewidth": 2}
            axes.plot(x, y, marker, color=colour, label=label, **style)
        high = 1.1 * scale * max(max(row.measured[place], row.predicted[place]) for row in rows)
        band = (
            [(0, 0), (0.9 * high, 1.1 * high)]
            if place == 0
            else [(-TARGET_SHARE, TARGET_SHARE), (high - TARGET_SHARE, high + TARGET_SHARE)]
        )
        axes.plot([0, high], [0, high], color="black", linewidth=1.2)
        axes.fill_between(
            [0, high],
            [low for low, _ in band],
            [top for _, top in band],
            color="grey",
            alpha=0.2,
            label=f"within {target}",
        )
        axes.set(
            xlim=(0, high), ylim=(0, high), xlabel=f"measured {name}", ylabel=f"predicted {name}"
        )
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(title, fontsize=15)
    return figure


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--calibration",
        type=Path,
        default=ROOT / "results" / "calibration-stage.json",
        metavar="FILE",
        help="(default: %(default)s)",
    )
    parser.add_argument("--workloads", type=positive, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument(
        "--td-pipe",
        action="store_true",
        help=f"each workload under {', '.join(COMPARED)} (writes validate_td_pipe)",
    )
    options = parser.parse_args()
    name = "validate_td_pipe" if options.td_pipe else "validate_pipeline"
    if not options.calibration.exists():
        threads = max(1, (os.cpu_count() or 1) // STAGES)  # as distributed.py shares the cores out
        raise UserError(
            f"no calibration {options.calibration}: make one, with the threads that a stage gets,"
            f" by OMP_NUM_THREADS={threads} python experiments/calibrate.py --out"
            f" {options.calibration}"
        )
    calibration = Calibration.read(options.calibration)
    here = f"{this_machine('cpu')}, {calibration.dtype}"
    if calibration.gpu.name != here:
        raise UserError(
            f"the calibration is of {calibration.gpu.name}; this is {here}: run"
            " experiments/calibrate.py here first"
        )
    make_directory(options.out, name, force=options.force)
    drawn = draw_compared if options.td_pipe else draw_workloads
    workloads = drawn(2 if options.quick else options.workloads, options.seed)
    rows = compare(calibration, workloads, 1 if options.quick else options.repeats)
    print(
        f"{__doc__.splitlines()[0]}\n\n{calibration.model.name} on {calibration.gpu.name}, {STAGES}"
        " stages of one process each\n"
    )
    show(rows)
    if options.td_pipe:
        show_compared(rows)
    write_csv(options.out / f"{name}.csv", points(rows, calibration, name))
    use_style()
    title = f"{calibration.model.name}, {STAGES} processes on {calibration.gpu.name}"
    save_figure(draw(rows, title), options.out / f"{name}.png")
    print(f"\nwrote {options.out / name}.png and .csv")


if __name__ == "__main__":
    run_main(main)
