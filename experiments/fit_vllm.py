"""Prints the constants of today's vLLM in constants.py: python experiments/fit_vllm.py [DIR].

They are fitted to measured kernels on an A100, an H100 and an L40S: vllm_kernels.csv, a thinned
copy of public tables. Its head names the source. Half of the shapes are fitted, and the other half
tested. They alternate as on a chessboard. DIR holds the full tables: then all their shapes of the
other half are tested, too.

Each kind of kernel is fitted on its own, to the least sum of absolute log ratios: a few odd kernels
do not draw the law away from the many. What the kernels do not show is taken from elsewhere. Norms,
activations and the like: Vidur's A100 (`sarathi_serve` in constants.py), for all three GPUs.
"""

import enter  # noqa: F401

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from unittest.mock import patch

import costmodel
from command.cli import run_main
from configs import GPUS
from configs.constants import ALL_REDUCES, EFFICIENCY, NCCL, TWO_STEPS, AllReduce, Efficiency
from experiments.lib.common import print_table, progress
from experiments.lib.fitting import check_constants, compass_search, print_constants, rounded
from experiments.lib.flags import ScriptParser
from experiments.lib.measured_kernels import (
    FOLDERS,
    SHAPES,
    Kernel,
    by_size,
    halves,
    predicted,
    predicted_reduces,
    read_kernels,
    read_tables,
)
from experiments.lib.validation import error_summary

SOFTWARE = "vllm"
# GPU -> its link, over which the all-reduces were measured
LINK_OF = {gpu: GPUS[gpu].link for gpu in FOLDERS.values()}
FITTED = {
    "product": ("compute", "memory", "p", "overhead", "waves", "idle"),
    "attention": (
        "attention", "prefill_memory", "prefill_start", "prefill_block", "decode_memory",
        "decode_start", "decode_block",
    ),
}  # fmt: skip
START = Efficiency(
    compute=0.85, memory=0.8, p=3.0, overhead=3e-6, waves=0.5, idle=0.3,
    skips_masks=True, attention=0.6, prefill_memory=0.4, prefill_start=1e-5, prefill_block=3e-6,
    decode_memory=0.8, decode_start=1e-5, decode_block=3e-6, cache=1.5,
)  # fmt: skip
# Hopper's tensor cores multiply 64 rows at a time. Where a search ends at no overhead, or at a
# cache that is no faster than the memory, we leave them out.
CHOSEN = {"a100-80gb": {"cache": 1.0}, "h100": {"tile": 64}, "l40s": {"overhead": 0.0}}
LEAST_TOKENS = 64  # fewer are shown apart
LEAST_STEP = 1e-3
CORNERS = (1.0, 1.25, 1.5, 2.0, 3.0)  # among which costmodel.ATTENTION_P is chosen


def loss(efficiency: Efficiency, gpu: str, kernels: Sequence[Kernel]) -> float:
    """Mean absolute log ratio, predicted over measured."""
    times = predicted(kernels, gpu, efficiency)
    ratios = (time / each.seconds for time, each in zip(times, kernels, strict=True))
    return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)


def fit_gpu(gpu: str, half: dict[str, list[Kernel]]) -> Efficiency:
    """All constants of one GPU. half: by kind, the kernels to fit to."""
    begin = replace(START, **CHOSEN.get(gpu, {}))
    found = compass_search(
        lambda trial: loss(trial, gpu, half["product"]), begin, FITTED["product"], LEAST_STEP
    )
    found = fit_attention(found, gpu, half["prefill"] + half["decode"])
    other = EFFICIENCY["a100-80gb", "sarathi_serve"]
    return rounded(replace(found, elementwise=other.elementwise, launch=other.launch))


def fit_attention(begin: Efficiency, gpu: str, kernels: Sequence[Kernel]) -> Efficiency:
    """The constants of attention. The cache's is left out where it is 1."""
    names = FITTED["attention"] + (("cache",) if begin.cache > 1 else ())
    return compass_search(lambda trial: loss(trial, gpu, kernels), begin, names, LEAST_STEP)


def fit_reduce(start: int, kernels: Sequence[Kernel]) -> AllReduce:
    """The line through two of these all-reduces with the least sum of absolute log ratios.

    All are of one number of GPUs, and of `start` bytes and more.
    """

    def through(one: Kernel, other: Kernel) -> AllReduce:
        gpus, small = one.shape
        rate = (other.seconds - one.seconds) / (other.shape[1] - small)  # s for each byte
        rate = min(rate, other.seconds / other.shape[1])  # no latency below 0
        latency = max(one.seconds - rate * small, 0.0)
        bandwidth = 2 * (gpus - 1) / gpus / rate
        return AllReduce(start, float(f"{latency:.3g}"), float(f"{bandwidth:.3g}"))

    def misses(way: AllReduce) -> float:
        times = [way.seconds(each.shape[1], each.shape[0]) for each in kernels]
        return sum(
            abs(math.log(time / each.seconds)) for time, each in zip(times, kernels, strict=True)
        )

    pairs = combinations(sorted(kernels, key=lambda each: each.shape), 2)
    ways = [through(one, other) for one, other in pairs if other.seconds > one.seconds]
    return min(ways, key=misses)


def fit_reduces(link: str, kernels: Sequence[Kernel]) -> dict[int, tuple[AllReduce, ...]]:
    """GPUs -> the ways to add up, the one for the smallest messages first."""
    found = {}
    for gpus in sorted({each.shape[0] for each in kernels}):
        own = [each for each in kernels if each.shape[0] == gpus]
        steps = [TWO_STEPS[gpus]] if gpus in TWO_STEPS and link.startswith("nvlink") else []
        starts = [0, *steps, NCCL]
        found[gpus] = tuple(
            fit_reduce(first, [each for each in own if first <= each.shape[1] < end])
            for first, end in pairwise([*starts, math.inf])
        )
    return found


def errors(times: Sequence[float], kernels: Sequence[Kernel]) -> list[float]:
    """By how much the prediction is too long, in %."""
    return [100 * (time / each.seconds - 1) for time, each in zip(times, kernels, strict=True)]


def summary(values: Sequence[float]) -> list[str]:
    """Median and 90th percentile of the absolute error, and the signed median."""
    median, p90, _, signed = error_summary([value / 100 for value in values])
    return [median, p90, signed]


def times_of(
    kind: str, gpu: str, kernels: Sequence[Kernel], efficiency: Efficiency, ways: dict
) -> list[float]:
    if kind == "all-reduce":
        return predicted_reduces(kernels, ways)
    return predicted(kernels, gpu, efficiency)


def by_kind(kernels: Sequence[Kernel], gpu: str) -> dict[str, list[Kernel]]:
    own = [each for each in kernels if each.gpu == gpu]
    return {kind: [each for each in own if each.kind == kind] for kind in SHAPES}


def print_by_size(found: Sequence[tuple[str, str, Sequence[Kernel], Sequence[float]]]) -> None:
    """Errors of the kernels of each size. found: GPU, kind, kernels and predicted seconds."""
    rows = []
    for gpu, kind, kernels, times in found:
        predictions = dict(zip(kernels, times, strict=True))
        for size, own in by_size(kind, kernels).items():
            values = errors([predictions[each] for each in own], own)
            rows.append([gpu, kind, size, len(own), *summary(values)])
    header = ["GPU", "kernel", "from", "tested", "median", "p90", "signed"]
    print_table(header, rows, "Errors of the tested half, by size")


def print_corners(halved: dict[str, list[Kernel]], found: dict[str, Efficiency]) -> float:
    """The loss of the fitted attention kernels for each sharpness of the roofline's corner.

    halved: GPU -> kernels. found: GPU -> where the search starts. Returns what fits best.
    """
    rows = []
    for corner in CORNERS:
        losses = []
        for gpu, kernels in halved.items():
            with patch.object(costmodel, "ATTENTION_P", corner):
                losses.append(loss(fit_attention(found[gpu], gpu, kernels), gpu, kernels))
        rows.append([f"{corner:g}", *(f"{each:.4f}" for each in losses)])
        rows[-1].append(f"{statistics.fmean(losses):.4f}")
    header = ["ATTENTION_P", *halved, "mean"]
    print_table(header, rows, "Mean |log ratio| of the fitted attention kernels")
    return float(min(rows, key=lambda row: float(row[-1]))[0])


def source(medians: dict[str, str]) -> str:
    """What configs/constants.py says of the fit."""
    each = ", ".join(f"{kind} {median}" for kind, median in medians.items())
    return (
        f"experiments/fit_vllm.py: kernels; median error on other shapes: {each}. Norms: Vidur's"
        " A100"
    )


def print_reduces(link: str, ways: dict[int, tuple[AllReduce, ...]]) -> None:
    """The row of constants.ALL_REDUCES."""
    print(f'    ("{link}", "{SOFTWARE}"): {{')
    for gpus, some in ways.items():
        print(f"        {gpus}: (")
        for way in some:
            rate = f"{way.bandwidth / 1e9:g}e9"
            print(f"            AllReduce({way.start}, {way.latency}, {rate}),")
        print("        ),")
    print("    },\n")


def main() -> None:
    parser = ScriptParser(__doc__)
    help = "folder of the full tables: GPU/gemm.csv and so on"
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", help=help)
    options = parser.parse_args()
    tables = read_tables(options.directory) if options.directory else []
    kernels, rows, found = read_kernels(), [], {}
    attention, tested_times = {}, []
    for gpu in progress(list(FOLDERS.values()), "fitting"):
        pairs = {kind: halves(own) for kind, own in by_kind(kernels, gpu).items()}
        half = {kind: pair[0] for kind, pair in pairs.items()}
        efficiency = fit_gpu(gpu, half)
        ways = fit_reduces(LINK_OF[gpu], half["all-reduce"])
        full, medians = by_kind(tables, gpu), {}
        for kind, (fitted, tested) in pairs.items():
            if kind != "all-reduce":
                tested = [each for each in tested if each.tokens >= LEAST_TOKENS]
            sets = [fitted, tested] + ([halves(full[kind])[1]] if tables else [])
            if tables and kind != "all-reduce":
                sets[2] = [each for each in sets[2] if each.tokens >= LEAST_TOKENS]
            last = sets[-1]
            times = times_of(kind, gpu, last, efficiency, ways)
            tested_times.append((gpu, kind, last, times))
            cells = [
                summary(errors(times_of(kind, gpu, each, efficiency, ways), each)) for each in sets
            ]
            rows.append([gpu, kind, len(tested), *(cell for each in cells for cell in each[:3])])
            medians[kind] = cells[1][0]
        found[gpu] = replace(efficiency, source=source(medians)), ways
        attention[gpu] = half["prefill"] + half["decode"]
    header = ["GPU", "kernel", "tested", "fitted: median", "p90", "signed"]
    header += ["tested: median", "p90", "signed"]
    header += ["DIR: median", "p90", "signed"] if tables else []
    print_table(header, rows, f"Errors; tested: {LEAST_TOKENS} tokens and more")
    print_by_size(tested_times)
    corner = print_corners(attention, {gpu: efficiency for gpu, (efficiency, _) in found.items()})
    print("\nIn configs/constants.py:\n")
    for gpu, (efficiency, ways) in found.items():
        print_constants(gpu, SOFTWARE, efficiency)
        print_reduces(LINK_OF[gpu], ways)
    for gpu, (efficiency, ways) in found.items():
        check_constants(gpu, SOFTWARE, efficiency)
        if ALL_REDUCES.get((LINK_OF[gpu], SOFTWARE)) != ways:
            raise SystemExit("configs/constants.py holds other all-reduces: paste the lines above")
    if corner != costmodel.ATTENTION_P:
        raise SystemExit(f"costmodel.py holds another ATTENTION_P: {corner:g} fits best")


if __name__ == "__main__":
    run_main(main)
