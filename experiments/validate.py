"""How far off are the predictions?

Random workloads run for real on this machine, and are predicted from its calibration.

    python experiments/calibrate.py && python experiments/validate.py
        20 workloads over all policies: some minutes

All requests of a workload are there from the start. They go through the same scheduler twice: for
real, and on `CalibratedModel`. Workloads run in turn, several times; medians are compared. The
prediction is made from the calibration file alone and never re-scaled.

A machine's speed drifts (frequency, neighbours). So two fixed batches are timed before each
workload: the `drift` column says how many times the calibrated seconds they took, and corrects
nothing.
"""

import enter  # noqa: F401

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from costmodel import CostModel, make_batch
from experiments.lib.common import error_summary, print_table
from experiments.lib.engines import Priced, Real, Sweep
from experiments.lib.flags import DRAWS, ScriptParser
from experiments.lib.look import panels
from experiments.lib.papers import looks_of
from experiments.lib.rows import SOURCES, WHERE, Row, Rows, make_directory, print_rows, with_kept
from experiments.lib.study import finish
from more.policies import compared
from more.serving.calibration import RESULTS, CalibratedModel, Calibration

NAME = "validate"
BATCH_SIZES = (2, 8)
CHUNK_SIZES = (64, 128, 256, 512)
# tokens
PROMPTS = (32, 1024)
OUTPUTS = (4, 128)
WHOLE_PROMPTS = ("request_level", "orca", "vllm_v0")  # policies that have no C
QUANTITIES = {"total time": "s", "mean iteration": "ms", "throughput": "tokens/s"}  # compared
AXES = {"x": "measured", "y": "predicted"}
UNITS = QUANTITIES | {"drift": "x"}
FLAGS = {
    "calibration": Flag("calibration of this machine", RESULTS / "calibration-llama-0.2b.json"),
    "samples": Flag("workloads that are drawn", 20, len(compared())),
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
    dice = random.Random(seed)
    policies = sorted(compared())
    workloads = []
    for i in range(count):
        size = dice.randint(*BATCH_SIZES)
        number = dice.randint(size, 2 * size)
        lengths = [(dice.randint(*PROMPTS), dice.randint(*OUTPUTS)) for _ in range(number)]
        policy = policies[i % len(policies)]
        workloads.append(Draw(policy, size, dice.choice(CHUNK_SIZES), tuple(lengths)))
    return workloads


def run(engine: Priced | Real, cost: CostModel, works: Sequence[Draw], **case: int) -> Row:
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


def compare(calibration: Calibration, works: Sequence[Draw], repeats: int) -> Rows:
    """A predicted and a measured row of each workload."""
    most = PROMPTS[1] + OUTPUTS[1]
    if calibration.model.max_length < most:
        raise UserError(
            f"{calibration.model.name} allows {calibration.model.max_length} tokens; the workloads"
            f" need up to {most}"
        )
    from nano_sarathi import LLM  # here, since predicting needs no torch

    sizes = {"max_batch_size": BATCH_SIZES[1], "max_length": most}
    # what was calibrated: operators are timed one by one, which no CUDA graph allows
    where = {"dtype": calibration.dtype, "device": calibration.device, "cuda_graphs": "off"}
    real = Real(LLM(calibration.load, **where, **sizes), repeats)
    cost = CalibratedModel(calibration)
    cases = []
    for number, work in enumerate(works, start=1):
        case = {"workload": number, "policy": work.policy, "B": work.batch_size}
        cases.append(case | ({} if work.policy in WHOLE_PROMPTS else {"C": work.chunk_size}))
    sweep = Sweep(partial(run, cost=cost, works=works), [Priced.of(cost)], cases, measured=cases)
    both = zip(sweep.predict(quick=False), sweep.measure(real, quick=False), strict=True)
    return Rows([row for each in both for row in each], UNITS)


def newest(rows: Rows) -> Rows:
    """Of the model and the machine that were predicted and measured last."""
    return rows.where(**{name: rows[-1][name] for name in WHERE[1:]})


def pairs(rows: Rows) -> list[tuple[Row, Row]]:
    """The predicted and the measured row of each workload."""
    rows = newest(rows)
    return list(zip(*(rows.where(source=source) for source in SOURCES[1:]), strict=True))


def errors(rows: Rows, quantity: str) -> list[float]:
    """Predicted over measured of each workload, in %."""
    return [100 * (ours[quantity] / real[quantity] - 1) for ours, real in pairs(rows)]


def print_outcomes(rows: Rows) -> None:
    """Each workload, then the errors of all."""
    lines = Rows(rows.case(real) for _, real in pairs(rows))
    for name, unit in QUANTITIES.items():
        for line, (ours, real), error in zip(lines, pairs(rows), errors(rows, name), strict=True):
            line |= {f"{name}, {unit}": ours[name], f"measured {name}": real[name]}
            line[f"error of {name}"] = f"{error:+.1f} %"
            line["drift"] = real["drift"]
    print_rows(lines, list(dict.fromkeys(name for line in lines for name in line)))
    print_errors(rows)


def print_errors(rows: Rows) -> None:
    drift = 100 * (median(newest(rows).column("drift")) - 1)
    title = f"Absolute error over {len(pairs(rows))} workloads; median drift {drift:+.1f} %"
    table = [[name, *error_summary(errors(rows, name))] for name in QUANTITIES]
    print_table(["quantity", "median", "p90", "worst", "signed median"], table, title)


def draw(rows: Rows) -> plt.Figure:
    """Predicted against measured: the nearer to the line, the better."""
    rows = newest(rows)
    figure, [grid] = panels(1, len(QUANTITIES), 6.5, 6.7)
    for axes, (quantity, unit) in zip(grid, QUANTITIES.items(), strict=True):
        for policy, (colour, marker) in looks_of(list(rows.by("policy"))).items():
            own = rows.where(policy=policy)
            both = [own.where(source=each).column(quantity) for each in AXES.values()]
            axes.plot(*both, marker, color=colour, markersize=9, label=policy)
        end = max(*axes.get_xlim(), *axes.get_ylim())
        axes.plot([0, end], [0, end], color="black", linewidth=1.2)
        axes.fill_between([0, end], [0, 0.9 * end], [0, 1.1 * end], color="grey", alpha=0.2)
        labels = {f"{at}label": f"{of} {quantity} ({unit})" for at, of in AXES.items()}
        axes.set(xlim=(0, end), ylim=(0, end), title="grey: within 10 %", **labels)
    grid[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    where = f"{rows[0]['model']} on {rows[0]['hardware']}"
    figure.suptitle(f"{where}: predicted from a calibration of this machine", fontsize=18)
    return figure


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | DRAWS).parse_args()
    calibration = Calibration.read(options.calibration)
    calibration.check()
    make_directory(options.out, NAME, force=options.force)
    works = draw_workloads(options.samples, options.seed)
    rows = compare(calibration, works, options.repeats)
    print(f"{calibration.model.name} on {calibration.gpu.name}, calibrated {calibration.date}\n")
    print_outcomes(rows)
    path = options.out / f"{NAME}.csv"
    finish(path, with_kept(path, rows, sources=SOURCES[1:]), draw)


if __name__ == "__main__":
    run_main(main)
