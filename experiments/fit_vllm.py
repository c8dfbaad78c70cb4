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
from pathlib import Path

from cli import run_main
from configs import GPUS
from constants import ALL_REDUCES, EFFICIENCY, OWN_KERNEL, AllReduce, Efficiency
from experiments.lib.common import print_table, progress
from experiments.lib.fitting import check_constants, compass_search, print_constants, rounded
from experiments.lib.flags import bare_parser, parse
from experiments.lib.measured_kernels import (
    FOLDERS,
    SHAPES,
    Kernel,
    halves,
    predicted,
    predicted_reduces,
    read_kernels,
    read_tables,
)

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
NOTHING = 1e-9  # s: a shorter latency is none


def loss(efficiency: Efficiency, gpu: str, kernels: Sequence[Kernel]) -> float:
    """Mean absolute log ratio, predicted over measured."""
    times = predicted(kernels, gpu, efficiency)
    ratios = (time / each.seconds for time, each in zip(times, kernels, strict=True))
    return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)


def fit_gpu(gpu: str, half: dict[str, list[Kernel]]) -> Efficiency:
    """All constants of one GPU. half: by kind, the kernels to fit to."""
    found = replace(START, **CHOSEN.get(gpu, {}))
    for kernels, names in (
        (half["product"], FITTED["product"]),
        (half["prefill"] + half["decode"], FITTED["attention"]),
    ):
        if names == FITTED["attention"] and found.cache > 1:
            names = (*names, "cache")
        found = compass_search(
            lambda trial, kernels=kernels: loss(trial, gpu, kernels), found, names, LEAST_STEP
        )
    other = EFFICIENCY["a100-80gb", "sarathi_serve"]
    return rounded(replace(found, elementwise=other.elementwise, launch=other.launch))


def fit_reduce(kernels: Sequence[Kernel]) -> AllReduce:
    """Latency and bandwidth with the least sum of absolute log ratios, of one number of GPUs."""
    gpus = kernels[0].shape[0]
    best, step = AllReduce(min(each.seconds for each in kernels), 100e9), 0.5

    def misses(trial: AllReduce) -> float:
        return sum(
            abs(math.log(trial.seconds(each.shape[1], gpus) / each.seconds)) for each in kernels
        )

    while step > LEAST_STEP:
        trials = [
            replace(best, **{name: getattr(best, name) * factor})
            for name in ("latency", "bandwidth")
            for factor in (1 + step, 1 / (1 + step))
        ]
        least = min(trials, key=misses)
        if misses(least) < misses(best):
            best = least
        else:
            step /= 2
    latency = best.latency if best.latency > NOTHING else 0.0
    return AllReduce(float(f"{latency:.3g}"), float(f"{best.bandwidth:.3g}"))


def fit_reduces(kernels: Sequence[Kernel]) -> dict[int, tuple[AllReduce, AllReduce]]:
    """GPUs -> below and from OWN_KERNEL bytes."""
    found = {}
    for gpus in sorted({each.shape[0] for each in kernels}):
        own = [each for each in kernels if each.shape[0] == gpus]
        small = [each for each in own if each.shape[1] < OWN_KERNEL]
        large = [each for each in own if each.shape[1] >= OWN_KERNEL]
        found[gpus] = fit_reduce(small), fit_reduce(large)
    return found


def errors(times: Sequence[float], kernels: Sequence[Kernel]) -> list[float]:
    """By how much the prediction is too long, in %."""
    return [100 * (time / each.seconds - 1) for time, each in zip(times, kernels, strict=True)]


def summary(values: Sequence[float]) -> list[str]:
    """Median and 90th percentile of the absolute error, and the signed median."""
    absolute = sorted(map(abs, values))
    p90 = absolute[math.ceil(0.9 * len(absolute)) - 1]
    middle = (statistics.median(absolute), p90)
    return [*(f"{value:.1f} %" for value in middle), f"{statistics.median(values):+.1f} %"]


def times_of(
    kind: str, gpu: str, kernels: Sequence[Kernel], efficiency: Efficiency, ways: dict
) -> list[float]:
    if kind == "all-reduce":
        return predicted_reduces(kernels, ways)
    return predicted(kernels, gpu, efficiency)


def by_kind(kernels: Sequence[Kernel], gpu: str) -> dict[str, list[Kernel]]:
    own = [each for each in kernels if each.gpu == gpu]
    return {kind: [each for each in own if each.kind == kind] for kind in SHAPES}


def source(medians: dict[str, str]) -> str:
    """What constants.py says of the fit."""
    each = ", ".join(f"{kind} {median}" for kind, median in medians.items())
    return (
        f"experiments/fit_vllm.py: kernels; median error on other shapes: {each}. Norms: Vidur's"
        " A100"
    )


def print_reduces(link: str, ways: dict[int, tuple[AllReduce, AllReduce]]) -> None:
    """The row of constants.ALL_REDUCES."""
    print(f'    ("{link}", "{SOFTWARE}"): {{')
    for gpus, pair in ways.items():
        each = ", ".join(f"AllReduce({way.latency!r}, {way.bandwidth!r})" for way in pair)
        print(f"        {gpus}: ({each}),")
    print("    },\n")


def main() -> None:
    parser = bare_parser(__doc__)
    help = "folder of the full tables: GPU/gemm.csv and so on"
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?", help=help)
    options = parse(parser, {})
    tables = read_tables(options.directory) if options.directory else []
    kernels, rows, found = read_kernels(), [], {}
    for gpu in progress(list(FOLDERS.values()), "fitting"):
        pairs = {kind: halves(own) for kind, own in by_kind(kernels, gpu).items()}
        half = {kind: pair[0] for kind, pair in pairs.items()}
        efficiency, ways = fit_gpu(gpu, half), fit_reduces(half["all-reduce"])
        full, medians = by_kind(tables, gpu), {}
        for kind, (fitted, tested) in pairs.items():
            if kind != "all-reduce":
                tested = [each for each in tested if each.tokens >= LEAST_TOKENS]
            sets = [fitted, tested] + ([halves(full[kind])[1]] if tables else [])
            if tables and kind != "all-reduce":
                sets[2] = [each for each in sets[2] if each.tokens >= LEAST_TOKENS]
            cells = [
                summary(errors(times_of(kind, gpu, each, efficiency, ways), each)) for each in sets
            ]
            rows.append([gpu, kind, len(tested), *(cell for each in cells for cell in each[:3])])
            medians[kind] = cells[1][0]
        found[gpu] = replace(efficiency, source=source(medians)), ways
    header = ["GPU", "kernel", "tested", "fitted: median", "p90", "signed"]
    header += ["tested: median", "p90", "signed"]
    header += ["DIR: median", "p90", "signed"] if tables else []
    print_table(header, rows, f"Errors; tested: {LEAST_TOKENS} tokens and more")
    print("\nIn constants.py:\n")
    for gpu, (efficiency, ways) in found.items():
        print_constants(gpu, SOFTWARE, efficiency)
        print_reduces(LINK_OF[gpu], ways)
    for gpu, (efficiency, ways) in found.items():
        check_constants(gpu, SOFTWARE, efficiency)
        if ALL_REDUCES.get((LINK_OF[gpu], SOFTWARE)) != ways:
            raise SystemExit("constants.py holds other all-reduces: paste the lines above")


if __name__ == "__main__":
    run_main(main)
