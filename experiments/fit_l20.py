"""Prints the L20's constants of configs/constants.py: python experiments/fit_l20.py.

They are fitted to whole iterations of LLaMA-13B on an L20, each the prefill of so many rows through
all layers and the head. The rows are a thinned copy of a measurement that comes with TD-Pipe's
public artefact (github.com/MLSysU/TD-Pipe, licence Apache 2.0): l20_iterations.csv. They lie dense
below 300 rows, on both sides of each tile's edge, and sparse above, so that small iterations weigh
more. The loss is as in fit_a6000.py.

Four constants are fitted. The rows know little of attention: its constants are those that today's
vLLM has on the L40S, the same generation, without its cache. The overhead of products stands for
norms and activations, too: these rows cannot tell them apart. The second table shows what changes
if more or fewer constants move. The last table predicts a model that nothing was fitted on.

It misses most where the L20 steps otherwise than our law of tiles: up to 16 rows, which take less
than 17, and just above 128, where its step is milder. We keep the law, and state the misses.
"""

import enter  # noqa: F401

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from batch import Batch
from command.cli import run_main
from configs import GPUS, MODELS
from configs.constants import BORROWED, EFFICIENCY, VIDUR, Efficiency, constants
from costmodel import CostModel, make_batch
from experiments.lib.common import ROOT, print_table
from experiments.lib.fitting import (
    check_constants,
    compass_search,
    log_loss,
    print_constants,
    rounded,
)
from experiments.lib.flags import ScriptParser

A6000, L20 = EFFICIENCY["a6000", "sarathi"], EFFICIENCY["l20", "td_pipe"]
FITTED = ("compute", "memory", "p", "overhead")
# The valley between overhead and bandwidth is flat: a start near its lowest point saves time.
# The search goes by factors, and would never leave an overhead of 0.
START = replace(
    EFFICIENCY["l40s", "vllm"], compute=0.9, memory=0.75, p=3.5, overhead=1e-5, waves=0.0, idle=1.0,
    cache=1.0, elementwise=0.0, launch=0.0, source="",
)  # fmt: skip
LEAST_STEP = 1e-4
RANGES = (
    (1, 16), (17, 64), (65, 128), (129, 192), (193, 256), (257, 512), (513, 1024), (1025, 2048),
)  # fmt: skip
HELD_BACK = "qwen2.5-32b"
HELD_BACK_ROWS = (1, 32, 128, 256, 512, 1024, 2048)


def measured() -> dict[int, float]:
    """Rows -> ms of a whole iteration."""
    with open(ROOT / "experiments" / "l20_iterations.csv", newline="", encoding="utf-8") as file:
        return {int(row["rows"]): float(row["ms"]) for row in csv.DictReader(file)}


@cache
def prefill(rows: int) -> Batch:
    """A whole prompt of `rows` tokens in one iteration."""
    return make_batch([(0, rows, rows)])


def modelled(
    efficiency: Efficiency, sizes: Sequence[int], model: str = "llama-13b"
) -> dict[int, float]:
    """Rows -> ms of one prompt's prefill on one L20, as the cost model sees it."""
    cost = CostModel(MODELS[model], GPUS["l20"], efficiency)
    return {rows: 1e3 * cost.seconds(prefill(rows)) for rows in sizes}


def loss(efficiency: Efficiency, times: Mapping[int, float]) -> float:
    """Sum of squared log ratios, modelled over measured."""
    return log_loss(modelled(efficiency, list(times)), times)


def fit(
    times: Mapping[int, float], names: Sequence[str] = FITTED, start: Efficiency = START
) -> Efficiency:
    """The `names` with the least loss; others as in `start`."""
    found = compass_search(lambda trial: loss(trial, times), start, names, LEAST_STEP)
    middle, _ = summary(list(errors(rounded(found), times).values()))
    source = "experiments/fit_l20.py: TD-Pipe's iterations of LLaMA-13B; median error there"
    return replace(rounded(found), source=f"{source} {middle}. Attention: the L40S's, vllm")


def errors(efficiency: Efficiency, times: Mapping[int, float]) -> dict[int, float]:
    """Rows -> by how many percent the cost model is too slow."""
    found = modelled(efficiency, list(times))
    return {rows: 100 * (found[rows] / times[rows] - 1) for rows in times}


def summary(values: Sequence[float]) -> list[str]:
    """Median of the absolute errors, and the largest with its sign."""
    middle = statistics.median(abs(value) for value in values)
    return [f"{middle:.1f} %", f"{max(values, key=abs):+.1f} %"]


def print_errors(fitted: Efficiency, times: Mapping[int, float]) -> None:
    """By range of rows: these constants, and the A6000's on the same rows."""
    own, borrowed = errors(fitted, times), errors(A6000, times)
    table = []
    for first, last in (*RANGES, (RANGES[0][0], RANGES[-1][1])):
        inside = [rows for rows in times if first <= rows <= last]
        ours, theirs = (summary([found[rows] for rows in inside]) for found in (own, borrowed))
        table.append([f"{first}-{last}", len(inside), *ours, *theirs])
    print_table(["rows", "measured", "median", "largest", "A6000's: median", "largest"], table)


def print_other_constants(fitted: Efficiency, times: Mapping[int, float]) -> None:
    """What is fitted if more or fewer constants may move, and how little it changes."""
    table = []
    for what, found in (
        ("as above", fitted),
        ("no overhead", fit(times, FITTED[:-1], replace(START, overhead=0.0))),
        ("norms priced", fit(times, FITTED, replace(START, **VIDUR))),
    ):
        shares = [f"{y:.3f}" for y in (found.compute, found.memory, found.attention, found.p)]
        error, _ = summary(list(errors(found, times).values()))
        table.append([what, *shares, f"{1e6 * found.overhead:.1f}", error])
    header = ["", "compute", "memory", "attention", "p", "overhead, us", "median"]
    print_table(header, table, "If more or fewer constants were fitted:")


def borrowed_errors(times: Mapping[int, float]) -> dict[str, dict[int, float]]:
    """Errors with the constants that the L20 borrows, by the software that they belong to."""
    return {software: errors(constants("l20", software)[0], times) for software in BORROWED}


def print_borrowed(times: Mapping[int, float]) -> dict[str, float]:
    """What a guess would have said of the L20. Returns the signed medians in %, by software."""
    found = borrowed_errors(times)
    found["vllm, own compute share"] = errors(
        replace(constants("l20", "vllm")[0], compute=L20.compute), times
    )
    table = []
    for what, own in found.items():
        table.append(
            [what, *summary(list(own.values())), f"{statistics.median(own.values()):+.1f} %"]
        )
    title = "If the L20 borrowed its constants; its own compute share was fitted to these rows:"
    print_table(["software", "median", "largest", "signed"], table, title)
    return {
        software: round(statistics.median(found[software].values()), 1) for software in BORROWED
    }


def main() -> None:
    ScriptParser(__doc__).parse_args()
    times = measured()
    print("Fitted on iterations of LLaMA-13B on an L20; in configs/constants.py:\n")
    fitted = fit(times)
    print_constants("l20", "td_pipe", fitted)
    print_errors(fitted, times)
    print_other_constants(fitted, times)
    found = modelled(fitted, HELD_BACK_ROWS, HELD_BACK)
    title = f"Predicted, {HELD_BACK} on one L20 as if it had the memory:"
    print_table(["rows", "ms"], [[rows, f"{time:.1f}"] for rows, time in found.items()], title)
    borrowed = print_borrowed(times)
    check_constants("l20", "td_pipe", fitted)
    if borrowed != BORROWED:
        raise SystemExit(f"configs/constants.py holds other errors: BORROWED = {borrowed}")


if __name__ == "__main__":
    run_main(main)
