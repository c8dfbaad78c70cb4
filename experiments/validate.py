"""How far off are the predictions?

Random workloads run for real on this machine, and are predicted from its calibration.

    python experiments/calibrate.py && python experiments/validate.py
        20 workloads over all policies: some minutes
    python experiments/validate.py --profiles DIR
        the linear operators against measurements of real GPUs

A workload draws its batch size (2 to 8), chunk size, and for each request a prompt of 32 to 1024
and an output of 4 to 128 tokens. The same requests then go through the same scheduler twice: on the
real engine, and on `CalibratedModel`. The prediction is made from the calibration file alone and
never re-scaled. As a machine's speed drifts (frequency, neighbours), two fixed batches are timed
before each workload: the `drift` column says how much slower than calibrated they were, and mends
nothing. Every workload runs three times, in three rounds, and its median counts.

--profiles reads DIR/GPU/MODEL/mlp.csv in the format of Vidur's public profiles: per layer and
number of tokens, median ms of the four linear operators. The shape of the model comes from the
file, peak and bandwidth from the GPU's data sheet. The first table takes the efficiencies from
costmodel.py, those of "sarathi_serve", for every GPU. The second shows what the form of the law
can do: they are fitted on each model in turn and tested on all the others of that GPU. Its line
that is fitted on Llama-2-70b on an A100 is "sarathi_serve"; the others are shown and not used.
"""

import argparse
import csv
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from batch import Request
from cli import run_main
from configs import GPU, GPUS, ModelConfig, UserError
from costmodel import EFFICIENCY, CostModel, Efficiency, make_batch
from experiments.lib.calibration import CalibratedModel, Calibration
from experiments.lib.common import (
    ROOT,
    Point,
    make_directory,
    make_parser,
    positive,
    print_table,
    progress,
    write_csv,
)
from experiments.lib.look import SERIES, save_figure, use_style
from experiments.lib.measuring import generate, this_machine, time_batches, warm_up
from experiments.lib.steady import run_priced
from scheduler import POLICIES
from simulate import CostExecutor
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

BATCH_SIZES, PROMPTS, OUTPUTS, CHUNK_SIZES = (2, 8), (32, 1024), (4, 128), (64, 128, 256, 512)
QUANTITIES = {  # what is compared: the three
    "total time": ("s", lambda trace: trace.seconds),
    "mean iteration": ("ms", lambda trace: 1e3 * trace.seconds / len(trace.iterations)),
    "throughput": ("tokens/s", lambda trace: trace.throughput),
}


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


# --------------------------------------------------------------------------------- random workloads


WHOLE_PROMPTS = ("request_level", "orca", "vllm_v0")  # policies that have no C


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
        batch_size = dice.randint(*BATCH_SIZES)
        lengths = tuple(
            (dice.randint(*PROMPTS), dice.randint(*OUTPUTS))
            for _ in range(dice.randint(batch_size, 2 * batch_size))
        )
        workloads.append(
            Draw(policies[i % len(policies)], batch_size, dice.choice(CHUNK_SIZES), lengths)
        )
    return workloads


def predict(cost: CostModel, work: Draw) -> Trace:
    return run_priced(
        CostExecutor(cost), work.requests(), work.policy, work.chunk_size, work.batch_size
    )


def load_llm(calibration: Calibration) -> "LLM":
    """The model that was calibrated, on the machine that it was calibrated on."""
    here = f"{this_machine(calibration.device)}, {calibration.dtype}"
    if here != calibration.gpu.name:
        raise UserError(
            f"the calibration is of {calibration.gpu.name}; this is {here}: run"
            " experiments/calibrate.py here first"
        )
    most = PROMPTS[1] + OUTPUTS[1]
    if calibration.model.max_length < most:
        raise UserError(
            f"{calibration.model.name} allows {calibration.model.max_length} tokens; the workloads"
            f" need up to {most}"
        )
    from engine import LLM  # here, since predicting needs no torch

    return LLM(
        calibration.load,
        max_batch_size=BATCH_SIZES[1],
        max_length=most,
        dtype=calibration.dtype,
        device=calibration.device,
    )


def compare(
    llm: "LLM", cost: CostModel, workloads: Sequence[Draw], rounds: int
) -> list[tuple[Trace, Trace, float]]:
    """(predicted, measured, drift) of each workload.

    There is an odd number of rounds over all of them; the run of median length counts.
    """
    warm_up(llm)
    runs: list[list[tuple[Trace, float]]] = [[] for _ in workloads]
    for i in progress(rounds * list(range(len(workloads))), "validating"):
        work, drift = workloads[i], measured_drift(llm, cost)
        llm.max_batch_size = work.batch_size  # the cache has slots for the largest
        generate(llm, work.requests(), work.policy, work.chunk_size)
        runs[i].append((llm.trace, drift))
    middle = [sorted(run, key=lambda pair: pair[0].seconds)[rounds // 2] for run in runs]
    return [(predict(cost, work), *pair) for work, pair in zip(workloads, middle, strict=True)]


def measured_drift(llm: "LLM", cost: CostModel) -> float:
    """Measured over predicted seconds of a prompt and of a step of decodes.

    1 if the machine runs as it did when it was calibrated.
    """
    probes = [make_batch([(0, 256, 257)]), make_batch(decodes=BATCH_SIZES[1], context=512)]
    results = time_batches(llm, probes, repeats=3)
    return statistics.mean(
        result.seconds / cost.seconds(batch) for batch, result in zip(probes, results, strict=True)
    )


def errors(found: Sequence[tuple[Trace, Trace, float]], quantity: str) -> list[float]:
    """(predicted - measured) / measured of each workload."""
    value = QUANTITIES[quantity][1]
    return [value(predicted) / value(measured) - 1 for predicted, measured, _ in found]


def print_comparison(
    workloads: Sequence[Draw], found: Sequence[tuple[Trace, Trace, float]]
) -> None:
    rows = []
    all_errors = {quantity: errors(found, quantity) for quantity in QUANTITIES}
    for i, (work, (predicted, measured, drift)) in enumerate(zip(workloads, found, strict=True)):
        chunk_size = "-" if work.policy in WHOLE_PROMPTS else work.chunk_size
        cells = [i + 1, work.policy, work.batch_size, chunk_size, len(work.lengths)]
        cells.append(len(measured.iterations))
        for quantity, (_, value) in QUANTITIES.items():
            cells += [
                f"{value(predicted):.4g}",
                f"{value(measured):.4g}",
                f"{100 * all_errors[quantity][i]:+.1f} %",
            ]
        rows.append([*cells, f"{100 * (drift - 1):+.1f} %"])
    names = [
        name
        for quantity, (unit, _) in QUANTITIES.items()
        for name in (f"{quantity}, {unit}", "measured", "error")
    ]
    print_table(["", "policy", "B", "C", "requests", "iterations", *names, "drift"], rows)
    print(
        f"\nAbsolute error over {len(found)} workloads (the first of each three columns is"
        " predicted)\n"
    )
    rows = []
    for quantity, values in all_errors.items():
        sizes = [abs(value) for value in values]
        shown = [statistics.median(sizes), quantile(sizes, 0.9), max(sizes)]
        bias = f"{100 * statistics.median(values):+.1f} %"
        rows.append([quantity, *[f"{100 * value:.1f} %" for value in shown], bias])
    print_table(["quantity", "median", "p90", "worst", "signed median"], rows)
    drift = statistics.median(drift for *_, drift in found) - 1
    print(f"\nmedian drift since the calibration: {100 * drift:+.1f} %")


def points(
    workloads: Sequence[Draw],
    found: Sequence[tuple[Trace, Trace, float]],
    model: str,
    hardware: str,
) -> list[Point]:
    """Two rows per workload and quantity; x is the workload's number in the draw."""
    rows = []
    for i, (work, (predicted, measured, _)) in enumerate(zip(workloads, found, strict=True)):
        size = f"{work.policy} B={work.batch_size}" + (
            "" if work.policy in WHOLE_PROMPTS else f" C={work.chunk_size}"
        )
        for quantity, (unit, value) in QUANTITIES.items():
            for source, trace in (("predicted", predicted), ("measured", measured)):
                what = (f"{quantity}, {size}", i + 1, "workload", value(trace), unit)
                rows.append(Point("validate", *what, source, model, hardware))
    return rows


def draw(
    workloads: Sequence[Draw], found: Sequence[tuple[Trace, Trace, float]], title: str
) -> plt.Figure:
    """Predicted against measured, a panel for each quantity: near the line is good."""
    use_style()
    figure, panels = plt.subplots(1, len(QUANTITIES), figsize=(18, 6.6), layout="constrained")
    for axes, (quantity, (unit, value)) in zip(panels, QUANTITIES.items(), strict=True):
        for (colour, marker), policy in zip(SERIES, sorted(POLICIES), strict=True):
            pairs = [
                (value(real), value(guess))
                for work, (guess, real, _) in zip(workloads, found, strict=True)
                if work.policy == policy
            ]
            if pairs:
                x, y = zip(*pairs, strict=True)
                axes.plot(x, y, marker, color=colour, markersize=9, label=policy)
        sizes = [abs(error) for error in errors(found, quantity)]
        low = max(min(axes.get_xlim()[0], axes.get_ylim()[0]), 0.0)
        high = max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot([low, high], [low, high], color="black", linewidth=1.2)
        band = [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high]
        axes.fill_between([low, high], *band, color="grey", alpha=0.2, label="within 10 %")
        labels = {"xlabel": f"measured ({unit})", "ylabel": f"predicted ({unit})"}
        axes.set(xlim=(low, high), ylim=(low, high), **labels)
        axes.set_title(
            f"{quantity}: median error {100 * statistics.median(sizes):.1f} %, p90"
            f" {100 * quantile(sizes, 0.9):.1f} %"
        )
    panels[0].legend(loc="upper left")
    figure.suptitle(title, fontsize=18)
    return figure


# ---------------------------------------------------------------------------- profiles of real GPUs

OPERATORS = {
    "preproj": "attn_pre_proj",
    "postproj": "attn_post_proj",
    "ffn_ln1": "mlp_up_proj",
    "ffn_ln2": "mlp_down_proj",
}  # ours -> Vidur's


@dataclass(frozen=True)
class Row:
    """One line of a profile: the seconds of each linear operator in one layer.

    It is of this many tokens on one of `parallel` GPUs.
    """

    model: ModelConfig
    tokens: int
    parallel: int  # tensor-parallel workers
    seconds: dict[str, float]

    def predicted(self, cost: CostModel) -> dict[str, float]:
        own = CostModel(self.model, cost.gpu, cost.efficiency, tp=self.parallel)
        return own.linears(self.tokens)

    def error(self, cost: CostModel) -> float:
        """The error of all four linear operators together, relative to the measurement."""
        return sum(self.predicted(cost).values()) / sum(self.seconds.values()) - 1


def read_profile(path: Path) -> list[Row]:
    """An mlp.csv, or a UserError that names file, line and column."""

    def cell(line: int, row: dict[str, str], column: str, kind: type) -> float:
        try:
            value = kind(row[column])
        except (TypeError, ValueError):
            value = -1
        if not 0 < value < float("inf"):
            what = "a number above 0" if kind is float else "a whole number above 0"
            raise UserError(f"{path}, line {line}, column {column}: {row[column]!r} is not {what}")
        return value

    whole = ("num_tokens", "num_tensor_parallel_workers")
    whole += ("n_embd", "n_expanded_embd", "n_head", "n_kv_head")
    times = {name: f"time_stats.{operator}.median" for name, operator in OPERATORS.items()}
    rows = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for column in (*whole, "use_gated_mlp", *times.values()):
                if column not in (reader.fieldnames or []):
                    raise UserError(f"{path}: no column {column}")
            for line, row in enumerate(reader, start=2):
                tokens, parallel, hidden, intermediate, heads, kv_heads = (
                    cell(line, row, column, int) for column in whole
                )
                if row["use_gated_mlp"] not in ("True", "False"):
                    raise UserError(
                        f"{path}, line {line}, column use_gated_mlp: {row['use_gated_mlp']!r} is"
                        " not True or False"
                    )
                flavour = "llama" if row["use_gated_mlp"] == "True" else "gpt2"
                name = f"{path}, line {line}"  # what a complaint about the shape starts with
                shape = (name, 1, heads, hidden, intermediate, 1, tokens)
                model = ModelConfig(*shape, n_kv_head=kv_heads, flavour=flavour)
                seconds = {n: 1e-3 * cell(line, row, column, float) for n, column in times.items()}
                rows.append(Row(model, tokens, parallel, seconds))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: {error}") from None
    if not rows:
        raise UserError(f"{path}: no rows below the header")
    return rows


def gpu_of(folder: str, directory: Path) -> GPU:
    """The entry of gpus.GPUS for a folder's name: a100 stands for a100-80gb, not for its PCIe card.

    Raises UserError where no name begins so, or several that do not begin alike.
    """
    found = [name for name in GPUS if name.startswith(folder.lower())]
    shortest = min(found, key=len, default="")
    if not found or not all(name.startswith(shortest) for name in found):
        raise UserError(
            f"{directory / folder}: no GPU of that name, expected {directory}/GPU/MODEL/mlp.csv"
            f" with GPU from {', '.join(GPUS)}"
        )
    return GPUS[shortest]


def read_profiles(directory: Path) -> dict[str, dict[str, list[Row]]]:
    """GPU folder -> model folder -> rows, for all DIR/GPU/MODEL/mlp.csv.

    A model's folder may be nested: meta-llama/Llama-2-7b-hf.
    """
    profiles: dict[str, dict[str, list[Row]]] = {}
    for path in sorted(directory.rglob("mlp.csv")):
        gpu, *model = path.relative_to(directory).parent.parts or [""]
        gpu_of(gpu, directory)
        profiles.setdefault(gpu, {})["/".join(model)] = read_profile(path)
    if not profiles:
        raise UserError(f"--profiles {directory}: no GPU/MODEL/mlp.csv there")
    return profiles


# of Efficiency, and the unit to print them in (overhead: us)
LINEAR_CONSTANTS = {"compute": 1, "memory": 1, "p": 1, "overhead": 1e6}


def fit_linears(rows: Sequence[Row], gpu: GPU) -> Efficiency:
    """The constants of linear operators with the least squared log ratios, by compass search.

    Every fourth row is enough.
    """
    rows = sorted(rows, key=lambda row: (row.parallel, row.tokens))[::4]

    def loss(efficiency: Efficiency) -> float:
        cost = CostModel(rows[0].model, gpu, efficiency)
        return statistics.mean(math.log1p(row.error(cost)) ** 2 for row in rows)

    best = replace(EFFICIENCY["a6000", "sarathi"], overhead=1e-6)
    least, step = loss(best), 0.1
    while step > 1e-3:
        trials = [
            replace(best, **{name: getattr(best, name) * factor})
            for name in LINEAR_CONSTANTS
            for factor in (1 + step, 1 / (1 + step))
        ]
        # no GPU beats its data sheet
        trials = [trial for trial in trials if max(trial.compute, trial.memory) <= 1 <= trial.p]
        losses = [loss(trial) for trial in trials]
        if min(losses) < least:
            least, best = min(zip(losses, trials, strict=True), key=lambda pair: pair[0])
        else:
            step /= 2
    return best


def summary(values: Sequence[float]) -> list[str]:
    """Median and 90th percentile of the absolute error, and the signed median."""
    sizes = [abs(value) for value in values]
    return [
        f"{100 * statistics.median(sizes):.1f} %",
        f"{100 * quantile(sizes, 0.9):.1f} %",
        f"{100 * statistics.median(values):+.1f} %",
    ]


def hold_profiles(directory: Path) -> None:
    """Two tables: the constants of costmodel.py; those fitted on one model, tested on others."""
    profiles = read_profiles(directory)
    print(
        'Linear operators of one layer, constants of "sarathi_serve" against the profiles: error of'
        " the four together, over all token counts\n"
    )
    table, every = [], []
    for folder, models in profiles.items():
        gpu = gpu_of(folder, directory)
        for model, rows in models.items():
            cost = CostModel(rows[0].model, gpu, software="sarathi_serve")
            for parallel in sorted({row.parallel for row in rows}):
                values = [row.error(cost) for row in rows if row.parallel == parallel]
                table.append([gpu.name, model, f"{parallel}", len(values), *summary(values)])
            values = [row.error(cost) for row in rows]
            table.append([gpu.name, model, "all", len(values), *summary(values)])
            every += values
    print_table(["GPU", "model", "TP", "rows", "median", "p90", "signed"], table)
    print(f"\nall: median {summary(every)[0]}, p90 {summary(every)[1]}\n")
    print(
        "Fitted on one model, tested on the others of that GPU: what the form of the law can do"
        ' ("sarathi_serve" is Llama-2-70b on an A100)\n'
    )
    table, every = [], []
    plan = [(folder, model) for folder, models in profiles.items() for model in models]
    for folder, model in progress(plan, "fitting"):
        gpu, models = gpu_of(folder, directory), profiles[folder]
        efficiency = fit_linears(models[model], gpu)
        cost = CostModel(models[model][0].model, gpu, efficiency)
        others = [
            row.error(cost) for other, rows in models.items() if other != model for row in rows
        ]
        constants = [f"{getattr(efficiency, n) * unit:.4f}" for n, unit in LINEAR_CONSTANTS.items()]
        itself = summary([row.error(cost) for row in models[model]])
        table.append(
            [gpu.name, model, *constants, *itself[:2], *(summary(others) if others else "---")]
        )
        every += others
    header = ["GPU", "fitted on", "compute", "memory", "p", "overhead, us", "median", "p90"]
    print_table([*header, "others: median", "p90", "signed"], table)
    if every:
        print(f"\nall others: median {summary(every)[0]}, p90 {summary(every)[1]}")


# --------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = ROOT / "results" / "calibration-laptop.json"
    add(
        "--calibration",
        type=Path,
        default=default,
        metavar="FILE",
        help="(default: results/calibration-laptop.json)",
    )
    add(
        "--workloads",
        type=positive,
        metavar="N",
        help="how many (default: 20; none with --profiles)",
    )
    add("--seed", type=int, default=0, help="of the draw (default: 0)")
    add(
        "--rounds",
        type=positive,
        default=3,
        metavar="N",
        help="runs of each workload, of which the median counts (default: 3; 1 if --quick)",
    )
    add(
        "--profiles",
        type=Path,
        metavar="DIR",
        help="hold the linear operators against DIR/GPU/MODEL/mlp.csv",
    )
    options = parser.parse_args()
    if options.profiles is not None:
        hold_profiles(options.profiles)
        if options.workloads is None:
            return
        print()
    calibration = Calibration.read(options.calibration)
    make_directory(options.out, "validate", force=options.force)
    workloads = draw_workloads(
        options.workloads or (len(POLICIES) if options.quick else 20), options.seed
    )
    llm, cost = load_llm(calibration), CalibratedModel(calibration)
    found = compare(llm, cost, workloads, 1 if options.quick else options.rounds)
    model, hardware = calibration.model.name, calibration.gpu.name
    print(f"{model} on {hardware}, calibrated {calibration.date}\n")
    print_comparison(workloads, found)
    write_csv(options.out / "validate.csv", points(workloads, found, model, hardware))
    title = f"{model} on {hardware}: predicted from a calibration of this machine"
    save_figure(draw(workloads, found, title), options.out / "validate.png")
    print(f"\nwrote {options.out / 'validate.png'} and .csv")


if __name__ == "__main__":
    run_main(main)
