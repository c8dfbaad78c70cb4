"""Measured kernels, the cost model's law, and where they part: a picture for each GPU.

    python experiments/law_kernels.py                all that have constants of their own: seconds
    python experiments/law_kernels.py --gpu h100     one of them

A100, H100 and L40S: kernels under today's vLLM (lib/measured_kernels.py names the source). Each
kernel stands at the time that the data sheet alone would give: its FLOPs at the peak, or its bytes
at the bandwidth, whichever takes longer. Above: how many times as long it takes, measured and by
the law. Below: the law over the measured time. Filled dots were held out of the fit. Bytes that lie
in a large cache (the L40S's has 96 MB) may come faster than the data sheet's memory.

A6000: SARATHI's Table 2 and Fig 7, all of which were fitted. L20: fitted, too; whole iterations of
LLaMA-13B, which come with TD-Pipe's artefact. results/law_kernels_GPU.png has the pictures;
law_kernels.png, the errors of the three GPUs under vLLM.
"""

import enter  # noqa: F401

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt

from command.cli import run_main
from command.flags import Flag
from configs import GPUS, LINKS, MODELS
from configs.constants import ALL_REDUCES, EFFICIENCY
from configs.experts import touched
from costmodel import CostModel, make_batch
from experiments import fig7
from experiments.fit import A6000, L20
from experiments.lib.flags import start
from experiments.lib.look import COLOURS, panels, save_figure, use_style
from experiments.lib.measured_kernels import (
    VALUE_BYTES,
    Kernel,
    halves,
    kinds_of,
    of_kind,
    predicted,
    predicted_reduces,
    read_kernels,
)
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, draw_panels, finish
from experiments.lib.validation import quantile

NAME = "law_kernels"
TODAY = ("a100-80gb", "h100", "l40s")
OWNERS = (*TODAY, "a6000", "l20")
ENOUGH = 64  # tokens: kernels of fewer take little of any iteration
TITLES = {
    "product": "products", "prefill": "attention of prompts", "decode": "attention of decodes",
    "all-reduce": "all-reduces", "fp8 product": "products in fp8", "experts": "experts",
    "fp8 experts": "experts in fp8",
}  # fmt: skip
PERCENTILES = {"10th percentile": 0.1, "50th percentile": 0.5, "90th percentile": 0.9}
UNITS = dict.fromkeys(("median error", *PERCENTILES), "%") | {"held out": "kernels"}
LAW, MEASURED = COLOURS["vermilion"], COLOURS["blue"]


@dataclass(frozen=True)
class Priced:
    """A measured kernel beside the law."""

    kernel: Kernel
    sheet: float  # s: by the data sheet alone
    law: float  # s
    held_out: bool

    @property
    def error(self) -> float:
        """Law over measured, in %."""
        return 100 * (self.law / self.kernel.seconds - 1)

    @property
    def counts(self) -> bool:
        return self.kernel.kind == "all-reduce" or self.kernel.tokens >= ENOUGH


def sheet_seconds(kernel: Kernel) -> float:
    """The longer of FLOPs at the peak and bytes at the bandwidth. Heads have 128 channels."""
    gpu, shape, weights = GPUS[kernel.gpu], kernel.shape, 0
    if kernel.kind == "all-reduce":
        gpus, size = shape
        return size * 2 * (gpus - 1) / gpus / LINKS[gpu.link].bandwidth
    if kernel.kind.endswith("product"):
        rows, outputs, inputs = shape
        weights, values = outputs * inputs, rows * (outputs + inputs)
        flops = 2 * rows * weights
    elif kernel.kind.endswith("experts"):
        rows, hidden, width, experts, chosen = shape
        flops, values = 6 * rows * chosen * hidden * width, 2 * rows * hidden
        weights = 3 * hidden * width * touched(rows, experts, chosen)
    else:
        count, tokens, heads, kv_heads = shape
        new = tokens if kernel.kind == "prefill" else 1
        pairs = new * (tokens + 1) / 2 if new > 1 else tokens
        flops = 4 * 128 * count * heads * pairs
        values = 2 * 128 * count * (new * heads + tokens * kv_heads)
    less = 2 if kernel.kind.startswith("fp8") else 1  # bytes of a weight, and time to compute
    size = VALUE_BYTES * (values + weights / less)
    return max(flops / (less * gpu.peak), size / gpu.bandwidth)


def priced(gpu: str) -> dict[str, list[Priced]]:
    """The measured kernels of a GPU, by kind."""
    found = {}
    for kind in kinds_of(gpu):
        halved = halves([each for each in read_kernels() if (each.gpu, each.kind) == (gpu, kind)])
        rows = []
        for held_out, half in enumerate(halved):
            if kind == "all-reduce":
                law = predicted_reduces(half, ALL_REDUCES[GPUS[gpu].link, "vllm"])
            else:
                law = predicted(half, gpu, of_kind(gpu, kind))
            for kernel, seconds in zip(half, law, strict=True):
                rows.append(Priced(kernel, sheet_seconds(kernel), seconds, bool(held_out)))
        found[kind] = sorted(rows, key=lambda row: row.sheet)
    return found


def median_error(rows: Sequence[Priced]) -> float:
    """Median of |error| of what was held out, in %."""
    return statistics.median(abs(row.error) for row in rows if row.held_out and row.counts)


def errors_of(gpu: str, kinds: dict[str, list[Priced]]) -> list[Row]:
    """Medians and percentiles of each kind, in %."""
    found, where = [], {"source": "predicted", "model": "single kernels", "hardware": gpu}
    for kind, rows in kinds.items():
        held_out = [row.error for row in rows if row.held_out and row.counts]
        row = {**where, "kernels": kind, "median error": median_error(rows)}
        for name, share in PERCENTILES.items():
            row[name] = quantile(held_out, share)
        found.append(row | {"held out": len(held_out)})
    return found


# ----------------------------------------------------------------------------------------- pictures


def draw_times(axes: plt.Axes, rows: Sequence[Priced]) -> None:
    """How many times the data sheet's time each kernel takes."""
    places = [1e6 * row.sheet for row in rows]
    for seconds, colour, marker, label in (
        ([row.kernel.seconds for row in rows], MEASURED, "o", "measured"),
        ([row.law for row in rows], LAW, "x", "the law"),
    ):
        times = [each / row.sheet for each, row in zip(seconds, rows, strict=True)]
        style = {"marker": marker, "markersize": 4, "alpha": 0.6, "label": label}
        axes.plot(places, times, linestyle="none", color=colour, **style)
    axes.axhline(1, color="black", linewidth=1.2)
    axes.set(xscale="log", yscale="log", title=TITLES[rows[0].kernel.kind])
    most = axes.get_ylim()[1]
    ticks = [tick for tick in (1, 2, 5, 10, 100, 1000) if tick < most and (tick > 5 or most < 20)]
    axes.set_yticks([1, *ticks], [f"{tick:g}x" for tick in [1, *ticks]])
    axes.set_yticks([], minor=True)


def draw_errors(axes: plt.Axes, rows: Sequence[Priced]) -> None:
    """The law over the measured time, by the data sheet's time."""
    for held_out, face, label in ((False, "none", "fitted"), (True, MEASURED, "held out")):
        half = [row for row in rows if row.held_out == held_out]
        style = {"markersize": 5, "markerfacecolor": face, "alpha": 0.7, "label": label}
        ratios = [row.law / row.kernel.seconds for row in half]
        places = [1e6 * row.sheet for row in half]
        axes.plot(places, ratios, "o", color=MEASURED, linestyle="none", **style)
    axes.axhspan(1 / 1.1, 1.1, color="grey", alpha=0.25, linewidth=0, label="within 10 %")
    axes.axhline(1, color="black", linewidth=1.2)
    ticks = (0.25, 0.5, 0.75, 1, 1.5, 2, 4)
    axes.set(xscale="log", yscale="log", ylim=(0.2, 5))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    text = f"held out: median {median_error(rows):.1f} %"
    axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=13)


def draw_gpu(gpu: str, kinds: dict[str, list[Priced]]) -> plt.Figure:
    """The kinds that all models need."""
    figure, grid = panels(2, 4, 5, 4.4, sharex="col")
    for (above, below), rows in zip(zip(*grid, strict=True), kinds.values(), strict=False):
        draw_times(above, rows)
        draw_errors(below, rows)
        below.set_xlabel("us by the data sheet alone")
    grid[0][0].set_ylabel("time over the data sheet's")
    grid[1][0].set_ylabel("law over measured")
    grid[0][0].legend(markerscale=2)
    grid[1][0].legend(loc="lower right")
    figure.suptitle(f"Kernels of today's vLLM on {gpu}: measured, and the law of the cost model")
    return figure


def fitted(gpu: str) -> Rows:
    """ms of iterations of LLaMA-13B and the law's error in %: of an L20, and of SARATHI's A6000."""
    fit, own = (
        (A6000, EFFICIENCY[gpu, "sarathi"]) if gpu == "a6000" else (L20, EFFICIENCY[gpu, "td_pipe"])
    )
    numbers, law = fit.measured(), fit.modelled(own)
    where = {"source": "predicted", "model": "llama-13b", "hardware": gpu}
    rows = Rows((), {"time": "ms", "error": "%"})
    for name, time in numbers.items():
        error = {"error": 100 * (law[name] / time - 1)}
        if gpu == "l20":
            rows.append(where | {"tokens": name, "of": "measured", "time": time} | error)
            rows.append(where | {"tokens": name, "of": "the law", "time": law[name]})
        else:
            rows.append(where | {"number": name.replace("_", " ")} | error)
    if gpu == "a6000":
        cost = CostModel(MODELS["llama-13b"], GPUS[gpu], own)
        for tokens in fig7.sizes(640, 8):
            seconds = cost.seconds(make_batch([(0, tokens, tokens)]))
            rows.append(where | {"tokens": tokens, "of": "the law", "time": 1e3 * seconds})
        for tokens in (128, 256, 257):
            stated = {"tokens": tokens, "of": "paper", "time": numbers[f"f7_{tokens}"]}
            rows.append(where | {"source": "paper"} | stated)
    return rows


def draw_fitted(gpu: str) -> plt.Figure:
    """The law beside all that it was fitted to."""
    log, error = (
        ("xy", Panel("tokens", "error", rule=0, log="x"))
        if gpu == "l20"
        else ("", Panel("number", "error", kind="bars", show={"xlabel": ""}))
    )
    colours = {"the law": LAW, "measured": MEASURED}
    times = Panel(
        "tokens", "time", "of", log=log, colours=colours, show={"xlabel": "prompt tokens"}
    )
    title = f"{gpu}: the law, and what it was fitted to"
    return draw_panels(fitted(gpu), [times, error], title, predicted="fitted")


def file_name(gpu: str) -> str:
    return f"{NAME}_{gpu.split('-')[0]}.png"


def save(path: Path, figure: plt.Figure) -> None:
    save_figure(figure, path)
    print(f"wrote {path}")


def main() -> None:
    files = [f"{NAME}.png", f"{NAME}.csv", *map(file_name, OWNERS)]
    flag = Flag("GPU whose picture is drawn", shown="all", choices=OWNERS)
    options = start(NAME, __doc__, files, gpu=flag)
    use_style()
    chosen = [options.gpu] if options.gpu else OWNERS
    found = {gpu: priced(gpu) for gpu in chosen if gpu in TODAY}
    rows = [row for gpu, kinds in found.items() for row in errors_of(gpu, kinds)]
    if rows:
        title = f"law over measured, of {ENOUGH} tokens and more"
        print_rows(Rows(rows, UNITS), ("hardware", "kernels", *UNITS), title)
    print()
    for gpu in chosen:
        figure = draw_gpu(gpu, found[gpu]) if gpu in found else draw_fitted(gpu)
        save(options.out / file_name(gpu), figure)
    if len(found) == len(TODAY):
        panel = Panel("kernels", "median error", "hardware", "bars")
        title = "The law beside measured kernels of today's vLLM, held out of the fit"
        found = Rows(rows, UNITS)
        finish(
            options.out / f"{NAME}.csv", found, partial(draw_panels, panels=[panel], title=title)
        )


if __name__ == "__main__":
    run_main(main)
