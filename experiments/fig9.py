"""SARATHI, Fig 9: throughput gain over the baseline against P:D (prompt tokens per decode).

    python experiments/fig9.py              predicted for LLaMA-13B on an A6000, against the paper's
                                            points: seconds, no GPU needed
    python experiments/fig9.py --measure    and the real engine on this machine: some five minutes
                                            on two slow cores

--measure takes the chunk size that a short profile of single iterations finds best here, and one
beside it, unless --chunk-sizes says otherwise. Each runs at half, once and twice the balance of the
best.

The gain peaks where the chunks of a prompt carry all decodes and none is left over. A prompt makes
P / (C - (B - 1)) chunks, each with B - 1 decodes aboard: balance is at P:D = C/(B-1) - 1, which the
paper rounds to C/(B-1). Left of it, decodes run out of chunks to ride on; right of it, chunks run
out of decodes.

Throughput is that of a steady state. All requests are alike (P prompt tokens and D decodes, P + D =
L), and we count between the completion of request number k*B and that of number m*B, with another B
requests behind. So neither the start-up nor the drain counts, and the window holds whole periods of
both policies: the baseline completes B requests at a time, SARATHI one at a time.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from cli import Parser, run_main
from configs import GPUS, MODELS, UserError
from costmodel import requests_that_fit
from experiments.lib.common import (
    MEASURE_DEFAULTS,
    Point,
    curves,
    make_directory,
    make_figure_parser,
    paper_numbers,
    parse_options,
    positive,
    print_table,
    progress,
    series_options,
    with_kept,
    write_csv,
)
from experiments.lib.look import SERIES, measured_title, save_figure, star, use_style
from experiments.lib.measuring import (
    Run,
    best_and_neighbour,
    hardware_of,
    load_llm,
    measured_gains,
    profile_chunk_sizes,
)
from experiments.lib.steady import BATCH_SIZES, Workload, balance, predicted_throughput, split

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU = "llama-13b", "a6000"
CHUNK_SIZES = (128, 256, 512)
# (L, C, id of the gain, P:D): Fig 9a and Sec 5.1.3; Fig 11a has C=256 at the other lengths, at P:D
# = C/(B-1)
PAPER = [
    (1024, 256, "f9_c256", 14),
    (1024, 512, "f9_c512", 28),
    (2048, 256, "f11a_sarathi_2k", 256 / 8),
    (3072, 256, "f11a_sarathi_3k", 256 / 5),
]
STYLE = {chunk_size: SERIES[index] for index, chunk_size in enumerate(CHUNK_SIZES)}
DEFAULTS = MEASURE_DEFAULTS | {"length": 512, "batch_size": 6, "chunk_sizes": None, "repeats": 3}
QUICK_DEFAULTS = {"length": 128, "batch_size": 4, "repeats": 1}


@dataclass(frozen=True)
class Gain:
    """One point of one curve. low and high: the smallest and the largest of the measured pairs."""

    length: int  # L
    batch_size: int  # B
    chunk_size: int  # C
    ratio: float  # P:D, after rounding to whole tokens
    gain: float
    low: float
    high: float


def ratios(length: int, batch_size: int, chunk_sizes: list[int], count: int) -> list[float]:
    """`count` values of P:D from 1 to 200, even on a log axis, and each chunk size's balance.

    Each D occurs once.
    """
    spread = [200 ** (i / (count - 1)) for i in range(count)]
    balances = [balance(chunk_size, batch_size) for chunk_size in chunk_sizes]
    pairs = {split(length, ratio) for ratio in spread + [ratio for ratio in balances if ratio >= 1]}
    return sorted(prompt / decodes for prompt, decodes in pairs)


# ---------------------------------------------------------------------------------------- predicted


def predict(count: int) -> list[Gain]:
    """All three panels."""
    places = [
        (length, size, ratio)
        for length, size in BATCH_SIZES.items()
        for ratio in ratios(length, size, list(CHUNK_SIZES), count)
    ]
    gains = []
    for length, batch_size, ratio in progress(places, "predicting"):
        work = Workload(length, batch_size, ratio)
        baseline = predicted_throughput(work, "baseline")
        for chunk_size in CHUNK_SIZES:
            gain = predicted_throughput(work, "sarathi", chunk_size) / baseline
            gains.append(Gain(length, batch_size, chunk_size, ratio, gain, gain, gain))
    return gains


def peak(gains: list[Gain], length: int, chunk_size: int) -> Gain:
    """The best point of one curve."""
    return max(
        (gain for gain in gains if (gain.length, gain.chunk_size) == (length, chunk_size)),
        key=lambda gain: gain.gain,
    )


PUBLISHED = ("f9_c256", "f9_c512", "f9_broad")  # ids of the numbers in the paper's text


def predicted_numbers(gains: list[Gain]) -> dict[str, float]:
    """Our prediction of each number that the paper's text gives, by its id.

    "About 10 % over a large range of P:D, if SARATHI changes the chunk size" (Sec 5.1.3) is, for
    us, the gain of the best chunk size in %: the median over the P:D drawn (1 to 200, even on a log
    axis) and the three lengths.
    """
    best: dict[tuple, float] = {}
    for gain in gains:
        place = (gain.length, gain.ratio)
        best[place] = max(best.get(place, 0.0), gain.gain)
    peaks = {
        name: peak(gains, length, chunk_size).gain
        for length, chunk_size, name, _ in PAPER
        if name in PUBLISHED
    }
    return peaks | {"f9_broad": 100 * (statistics.median(best.values()) - 1)}


def print_prediction(gains: list[Gain]) -> None:
    numbers = paper_numbers()
    print(f"SARATHI Fig 9, {MODEL} on {GPU}:", end=" ")
    print("largest throughput gain over the baseline, predicted by the cost model\n")
    rows = []
    for length, batch_size in BATCH_SIZES.items():
        for chunk_size in CHUNK_SIZES:
            best = peak(gains, length, chunk_size)
            row = [length, batch_size, chunk_size, f"{best.gain:.2f}", f"{best.ratio:.1f}"]
            row.append(f"{chunk_size / (batch_size - 1):.1f}")
            cells = ["-"] * 3
            for paper_length, size, name, ratio in PAPER:
                if (paper_length, size) == (length, chunk_size):
                    error = f"{100 * (best.gain / numbers[name] - 1):+.1f} %"
                    cells = [f"{numbers[name]:.2f}", f"{ratio:.0f}", error]
            rows.append([*row, *cells])
    print_table(
        ["L", "B", "C", "peak gain", "at P:D", "C/(B-1)", "paper gain", "paper P:D", "error"], rows
    )
    fits = {length: requests_that_fit(MODELS[MODEL], GPUS[GPU], length) for length in BATCH_SIZES}
    print("\nPaper, L = 1K: Fig 9a. L = 2K and 3K: Fig 11a, measured at P:D = C/(B-1).")
    print(
        "B is the paper's. Its memory formula (M_G - M_S) / (L * m_kv) alone would allow", end=" "
    )
    print(f"{', '.join(map(str, fits.values()))}: it leaves nothing for activations.")


# ----------------------------------------------------------------------------------------- measured


def load(options: argparse.Namespace) -> "LLM":
    """The model to measure, or a UserError about the flags before anything runs."""
    if options.batch_size < 2:
        raise UserError(
            f"--batch-size is {options.batch_size}; it must be at least 2: a chunk needs decodes to"
            " carry"
        )
    if options.length < 2:
        raise UserError(
            f"--length is {options.length}; it must be at least 2: one prompt token and one decode"
        )
    for chunk_size in options.chunk_sizes or []:
        if chunk_size < options.batch_size:
            raise UserError(
                f"--chunk-sizes: {chunk_size} is smaller than --batch-size {options.batch_size}:"
                " decodes would fill the chunk"
            )
    return load_llm(options, options.batch_size, options.length)


def choose_chunk_sizes(llm: "LLM", length: int, batch_size: int) -> list[int]:
    """The chunk sizes to measure, the best first; prints why."""
    profiles = profile_chunk_sizes(llm, length, batch_size)
    print(
        "\nProfile of single iterations, ms, and the gain that they would make at P:D = C/(B-1) -"
        f" 1, L = {length}, B = {batch_size}\n"
    )
    rows = []
    for p in profiles:
        ms = [f"{1e3 * seconds:.3g}" for seconds in (p.prefill, p.decodes, p.hybrid)]
        rows.append([p.chunk_size, *ms, f"{p.gain:.3f}"])
    print_table(["C", "B prompts", "B decodes", "chunk and B-1 decodes", "gain"], rows)
    chosen = best_and_neighbour(profiles)
    beside = "".join(f", and C = {size} beside it" for size in chosen[1:])
    print(f"\nmeasured below: C = {chosen[0]}, which looks best{beside}")
    return chosen


def measure(llm: "LLM", options: argparse.Namespace) -> list[Gain]:
    """The real engine, baseline and SARATHI in alternation on one model instance."""
    length, batch_size = options.length, options.batch_size
    chunk_sizes = options.chunk_sizes or choose_chunk_sizes(llm, length, batch_size)
    factors = [1] if options.quick else [0.5, 1, 2]  # of the balance
    middle = balance(chunk_sizes[0], batch_size)
    places = sorted({split(length, factor * middle) for factor in factors})  # (P, D)
    works = [Workload(length, batch_size, prompt / decodes) for prompt, decodes in places]
    sizes = dict.fromkeys(chunk_sizes)
    runs = [Run(work, "sarathi", size) for work in works for size in sizes]
    gains = measured_gains(llm, runs, options.repeats)
    return [
        Gain(length, batch_size, entry.chunk_size, entry.work.ratio, *gain)
        for entry, gain in gains.items()
    ]


def print_measurement(gains: list[Gain], model: str, hardware: str, repeats: int) -> None:
    length, batch_size = gains[0].length, gains[0].batch_size
    print(
        f"\nMeasured: {model} on {hardware}, L = {length}, B = {batch_size}; median of {repeats}"
        " alternating pairs\n"
    )
    rows = []
    for gain in sorted(gains, key=lambda gain: (gain.chunk_size, gain.ratio)):
        balance = gain.chunk_size / (batch_size - 1)
        rows.append(
            [gain.chunk_size]
            + [f"{value:.3g}" for value in (gain.ratio, balance, gain.gain, gain.low, gain.high)]
        )
    print_table(["C", "P:D", "C/(B-1)", "gain", "lowest", "highest"], rows)


# --------------------------------------------------------------------------------- picture and file


def draw_panel(axes: plt.Axes, gains: list[Gain], title: str, markevery: int = 4) -> None:
    """Gain against P:D, a curve for each chunk size, and where C/(B-1) puts its peak."""
    spare = cycle(SERIES[len(STYLE) :])
    for chunk_size in sorted({gain.chunk_size for gain in gains}):
        colour, marker = STYLE.get(chunk_size) or next(spare)
        curve = sorted(
            (gain for gain in gains if gain.chunk_size == chunk_size), key=lambda gain: gain.ratio
        )
        x, y = [gain.ratio for gain in curve], [gain.gain for gain in curve]
        axes.plot(x, y, color=colour, marker=marker, markevery=markevery, label=f"C = {chunk_size}")
        style = {"color": colour, "alpha": 0.2, "linewidth": 0}
        axes.fill_between(x, [gain.low for gain in curve], [gain.high for gain in curve], **style)
        axes.axvline(
            chunk_size / (curve[0].batch_size - 1), color=colour, linestyle=":", linewidth=1.8
        )
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("P:D (prompt tokens per decode)")
    axes.set_title(title)


def draw(gains: list[Gain], measured: list[Gain], title: str) -> plt.Figure:
    """Three predicted panels with the paper's points; a fourth where something was measured."""
    use_style()
    numbers = paper_numbers()
    if measured:
        figure, grid = plt.subplots(2, 2, figsize=(13, 10.5), layout="constrained")
        panels = list(grid.flat)
    else:
        figure, grid = plt.subplots(1, 3, figsize=(17, 6), sharey=True, layout="constrained")
        panels = list(grid)
    for axes, (length, batch_size) in zip(panels, BATCH_SIZES.items(), strict=False):
        draw_panel(
            axes,
            [gain for gain in gains if gain.length == length],
            f"predicted: L = {length // 1024}K, B = {batch_size}",
        )
        axes.set_ylim(0.5, 1.4)
        axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200])
        for paper_length, chunk_size, name, ratio in PAPER:
            if paper_length == length:
                star(axes, ratio, numbers[name], STYLE[chunk_size][0])
    if measured:
        draw_panel(panels[3], measured, title, markevery=1)
        places = sorted({gain.ratio for gain in measured})
        panels[3].set_xlim(places[0] / 1.5, places[-1] * 1.5)
        low, high = places[0] / 1.5, places[-1] * 1.5
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if low <= tick <= high]
        panels[3].set_xticks(ticks)
        panels[3].margins(y=0.15)
        panels[3].legend(loc="best")
    for axes in panels if measured else panels[:1]:
        axes.set_ylabel("throughput / baseline's")
    panels[0].plot(
        [], [], "*", color="white", markeredgecolor="black", markersize=15, label="paper"
    )
    panels[0].plot([], [], ":", color="black", label="P:D = C/(B-1)")
    panels[0].legend(loc="lower left")
    figure.suptitle(
        f"SARATHI Fig 9: gain over the baseline, {MODEL} on {GPU} (cost model) and the paper's"
        " points",
        fontsize=18,
    )
    return figure


def points(gains: list[Gain], source: str, model: str, hardware: str) -> list[Point]:
    """Rows of fig9.csv."""

    def point(gain: Gain, name: str, value: float) -> Point:
        series = f"C={gain.chunk_size} L={gain.length} B={gain.batch_size}{name}"
        where = ("throughput over baseline", source, model, hardware)
        return Point("fig9", series, gain.ratio, "P:D", value, *where)

    parts: list[tuple[str, Callable[[Gain], float]]] = [("", lambda gain: gain.gain)]
    if source == "measured":
        parts += [(" lowest", lambda gain: gain.low), (" highest", lambda gain: gain.high)]
    return [point(gain, name, value(gain)) for gain in gains for name, value in parts]


def paper_points() -> list[Point]:
    numbers = paper_numbers()
    gains = [
        Gain(length, BATCH_SIZES[length], chunk, ratio, *[numbers[name]] * 3)
        for length, chunk, name, ratio in PAPER
    ]
    return points(gains, "paper", MODEL, GPU)


def newest_measured(rows: list[Point]) -> list[Gain]:
    """The measured rows of one model and machine as gains, new or kept from an earlier run."""
    found = curves(rows, "measured")
    gains = []
    for series, curve in found.items():
        if series.endswith(("lowest", "highest")):
            continue
        options = series_options(series)
        for middle, low, high in zip(
            curve, found[f"{series} lowest"], found[f"{series} highest"], strict=True
        ):
            gains.append(
                Gain(options["L"], options["B"], options["C"], middle.x, middle.y, low.y, high.y)
            )
    return gains


def make_fig9_parser() -> Parser:
    parser, group = make_figure_parser(__doc__)
    add = group.add_argument
    add(
        "--length",
        type=positive,
        metavar="L",
        help="tokens of a request, prompt and decodes (default: 512)",
    )
    add("--batch-size", type=positive, metavar="B", help="requests in a batch (default: 6)")
    add(
        "--chunk-sizes",
        type=positive,
        nargs="+",
        metavar="C",
        help="at P:D around the balance of the first (default: chosen by a profile)",
    )
    add(
        "--repeats",
        type=positive,
        metavar="N",
        help="baseline-SARATHI pairs for each point (default: 3)",
    )
    return parser


def main() -> None:
    options = parse_options(make_fig9_parser(), DEFAULTS, QUICK_DEFAULTS)
    llm = load(options) if options.measure else None
    make_directory(options.out, "fig9", force=options.force)

    gains = predict(8 if options.quick else 41)
    print_prediction(gains)
    rows = paper_points() + points(gains, "predicted", MODEL, GPU)
    if llm is not None:
        measured = measure(llm, options)
        print_measurement(measured, llm.config.name, hardware_of(llm), options.repeats)
        rows += points(measured, "measured", llm.config.name, hardware_of(llm))
    rows = with_kept(options.out / "fig9.csv", rows)
    write_csv(options.out / "fig9.csv", rows)
    measured = newest_measured(rows)
    title = (
        f"{measured_title(rows)}\nL = {measured[0].length}, B = {measured[0].batch_size}"
        if measured
        else ""
    )
    save_figure(draw(gains, measured, title), options.out / "fig9.png")
    print(f"\nwrote {options.out / 'fig9.png'} and {options.out / 'fig9.csv'}")


if __name__ == "__main__":
    run_main(main)
