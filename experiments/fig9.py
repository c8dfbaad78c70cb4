"""SARATHI, Fig 9: throughput gain over the baseline against P:D (prompt tokens per decode).

    python experiments/fig9.py              predicted for LLaMA-13B on an A6000, beside the paper's
                                            points: seconds, no GPU needed
    python experiments/fig9.py --measure    and the real engine on this machine: some five minutes
                                            on two slow cores
    python experiments/fig9.py --policy-file examples/priority.py    yours, too, at SARATHI's C

--measure first profiles single iterations. It then runs the chunk size that looks best, and one
beside it (or --chunk-size). Each runs at half, once and twice the balance of the best.

At the balance, the chunks of a prompt carry all decodes and none is left over. A prompt makes P /
(C - (B-1)) chunks with B - 1 decodes each: balance is at P:D = C/(B-1) - 1, and the paper rounds it
to C/(B-1). There the gain peaks. Left of it, decodes run out of chunks to ride on. Right of it,
chunks run out of decodes.

Throughput is that of a steady state. All requests are alike: P prompt tokens and D decodes, P + D =
L. We count between the completion of request number k*B and that of number m*B, with another B
requests behind. So start-up and drain do not count, and the window holds whole periods of both
policies: the baseline completes B requests at a time, SARATHI one at a time.
"""

import enter  # noqa: F401

import statistics
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from configs import GPUS, MODELS
from costmodel import requests_that_fit
from experiments.lib import common, look, measuring
from experiments.lib.common import Point, Record, print_table
from experiments.lib.figure import finish
from experiments.lib.flags import MEASURE, POLICIES, WRITES, ScriptParser, file_name
from experiments.lib.papers import SPARE_LOOKS
from experiments.lib.rows import make_directory
from experiments.lib.steady import BATCH_SIZES, Workload, balance, predicted_throughput, split

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU = "llama-13b", "a6000"
CHUNK_SIZES = (128, 256, 512)
STYLE = dict(zip(CHUNK_SIZES, look.SERIES, strict=False))
UNIT = "throughput over baseline"
# (L, C) -> id of the published gain, and its P:D. At 1K from Fig 9a and Sec 5.1.3; at the other
# lengths from Fig 11a, which has C = 256 at P:D = C/(B-1).
PAPER = {
    (1024, 256): ("f9_c256", 14),
    (1024, 512): ("f9_c512", 28),
    (2048, 256): ("f11a_sarathi_2k", 256 / 8),
    (3072, 256): ("f11a_sarathi_3k", 256 / 5),
}
PUBLISHED = ("f9_c256", "f9_c512", "f9_broad")  # ids of the numbers in the paper's text
FLAGS = MEASURE | {
    "max_length": Flag("tokens of a request, prompt and decodes", 512, 128, measure=True),
    "max_batch_size": Flag("requests in a batch", 6, 4, measure=True),
    "chunk_size": Flag(
        "token budgets, each at P:D around the balance of the first",
        measure=True,
        shown="profiled",
        several=True,
    ),
    "repeats": Flag("baseline-SARATHI pairs for each point", 3, 1, measure=True),
    **POLICIES,
}
SARATHI = "sarathi"


def series(length: int, batch_size: int, chunk_size: int, policy: str = SARATHI) -> str:
    """The name of a curve. `series_options` and `policy_of` read it."""
    name = f"C={chunk_size} L={length} B={batch_size}"
    return name if policy == SARATHI else f"{policy} {name}"


def policy_of(name: str) -> str:
    """Of a curve."""
    first = name.partition(" ")[0]
    return SARATHI if first.startswith("C=") else first


def more_policies(options: Namespace) -> list[str]:
    return [name for name in dict.fromkeys(options.policy or ()) if name != SARATHI]


# ---------------------------------------------------------------------------------------- predicted


def ratios(length: int, batch_size: int, count: int) -> list[float]:
    """`count` values of P:D from 1 to 200, even on a log axis, and each chunk size's balance.

    Each D occurs once.
    """
    spread = [200 ** (i / (count - 1)) for i in range(count)]
    balances = [balance(chunk_size, batch_size) for chunk_size in CHUNK_SIZES]
    pairs = {split(length, ratio) for ratio in spread + [ratio for ratio in balances if ratio >= 1]}
    return sorted(prompt / decodes for prompt, decodes in pairs)


def predict(count: int, more: Sequence[str] = ()) -> list[Point]:
    """The curves of all three lengths, at about `count` values of P:D. more: policies."""
    record = Record("fig9", MODEL, GPU)
    works = [
        Workload(length, batch_size, ratio)
        for length, batch_size in BATCH_SIZES.items()
        for ratio in ratios(length, batch_size, count)
    ]
    for work in common.progress(works, "predicting"):
        baseline = predicted_throughput(work, "baseline")
        for policy, chunk_size in product((SARATHI, *more), CHUNK_SIZES):
            gain = predicted_throughput(work, policy, chunk_size) / baseline
            name = series(work.length, work.batch_size, chunk_size, policy)
            record.add(name, gain, UNIT, work.ratio, "P:D")
    return record


def paper_points() -> list[Point]:
    record, numbers = Record("fig9", MODEL, GPU, "paper"), common.paper_numbers()
    for (length, chunk_size), (name, ratio) in PAPER.items():
        curve = series(length, BATCH_SIZES[length], chunk_size)
        record.add(curve, numbers[name], UNIT, ratio, "P:D")
    return record


def peak(points: list[Point], length: int, chunk_size: int, policy: str = SARATHI) -> Point:
    """The best point of one predicted curve."""
    name = series(length, BATCH_SIZES[length], chunk_size, policy)
    return max(common.curves(points, "predicted")[name], key=lambda point: point.y)


def predicted_numbers(points: list[Point]) -> dict[str, float]:
    """Our prediction of each number that the paper's text gives, by its id.

    "About 10 % over a large range of P:D, if SARATHI changes the chunk size" (Sec 5.1.3) is, for
    us, the gain of the best chunk size in %: the median over the P:D drawn (1 to 200, even on a log
    axis) and the three lengths.
    """
    best: dict[tuple[int, float], float] = {}
    for point in points:
        place = (common.series_options(point.series)["L"], point.x)
        best[place] = max(best.get(place, 0.0), point.y)
    peaks = {name: peak(points, *curve).y for curve, (name, _) in PAPER.items()}
    peaks["f9_broad"] = 100 * (statistics.median(best.values()) - 1)
    return {name: peaks[name] for name in PUBLISHED}


def print_prediction(points: list[Point], more: Sequence[str]) -> None:
    numbers, rows = common.paper_numbers(), []
    for length, batch_size in BATCH_SIZES.items():
        for chunk_size in CHUNK_SIZES:
            best, paper = peak(points, length, chunk_size), ["-"] * 3
            if (length, chunk_size) in PAPER:
                name, ratio = PAPER[length, chunk_size]
                error = 100 * (best.y / numbers[name] - 1)
                paper = [f"{numbers[name]:.2f}", f"{ratio:.0f}", f"{error:+.1f} %"]
            ours = [f"{best.y:.2f}", f"{best.x:.1f}", f"{chunk_size / (batch_size - 1):.1f}"]
            rows.append([length, batch_size, chunk_size, *ours, *paper])
    header = ["L", "B", "C", "peak gain", "at P:D", "C/(B-1)", "paper gain", "paper P:D", "error"]
    title = f"Largest gain of each chunk size, {MODEL} on {GPU}, predicted by the cost model"
    print_table(header, rows, title)
    fits = [requests_that_fit(MODELS[MODEL], GPUS[GPU], length) for length in BATCH_SIZES]
    print(
        "\nPaper, L = 1K: Fig 9a. L = 2K and 3K: Fig 11a, measured at P:D = C/(B-1).\n"
        "B is the paper's. Its memory formula (M_G - M_S) / (L * m_kv) alone would allow"
        f" {', '.join(map(str, fits))}:\nit leaves nothing for activations."
    )
    rows = []
    for policy, (length, batch_size), chunk_size in product(more, BATCH_SIZES.items(), CHUNK_SIZES):
        best, sarathi = (peak(points, length, chunk_size, name) for name in (policy, SARATHI))
        numbers = [f"{best.y:.2f}", f"{best.x:.1f}", f"{sarathi.y:.2f}"]
        rows.append([policy, length, batch_size, chunk_size, *numbers])
    if rows:
        header = ["policy", "L", "B", "C", "peak gain", "at P:D", "SARATHI's peak"]
        print_table(header, rows, "Other policies, at the same chunk sizes")


# ----------------------------------------------------------------------------------------- measured


def load(options: Namespace) -> "LLM":
    """The model to measure. Raises UserError about the flags before anything runs."""
    for name, why in (
        ("max_batch_size", "a chunk needs decodes to carry"),
        ("max_length", "one prompt token and one decode"),
    ):
        value = getattr(options, name)
        if value < 2:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {value}; it must be at least 2: {why}")
    smallest = min(options.chunk_size or [options.max_batch_size])
    if smallest < options.max_batch_size:
        raise UserError(
            f"--chunk-size: {smallest} is smaller than --max-batch-size {options.max_batch_size}:"
            " decodes would fill the chunk"
        )
    return measuring.load_llm(options, options.max_batch_size, options.max_length)


def choose_chunk_sizes(llm: "LLM", length: int, batch_size: int) -> list[int]:
    """The chunk sizes to measure, the best first; prints why."""
    profiles, rows = measuring.profile_chunk_sizes(llm, length, batch_size), []
    for profile in profiles:
        seconds = (profile.prefill, profile.decodes, profile.hybrid)
        times = [f"{1e3 * value:.3g}" for value in seconds]
        rows.append([profile.chunk_size, *times, f"{profile.gain:.3f}"])
    title = (
        "Profile of single iterations, ms, and the gain that they would make at P:D = C/(B-1) - 1,"
        f" L = {length}, B = {batch_size}"
    )
    header = ["C", "B prompts", "B decodes", "chunk and B-1 decodes", "gain"]
    print_table(header, rows, title)
    chosen = measuring.best_and_neighbour(profiles)
    beside = "".join(f", and C = {size} beside it" for size in chosen[1:])
    print(f"\nmeasured below: C = {chosen[0]}, which looks best{beside}")
    return chosen


def measure(llm: "LLM", options: Namespace) -> list[Point]:
    """The real engine, baseline and the others in alternation on one model instance."""
    length, batch_size = options.max_length, options.max_batch_size
    chunk_sizes = options.chunk_size or choose_chunk_sizes(llm, length, batch_size)
    factors = [1] if options.quick else [0.5, 1, 2]  # of the balance
    middle = balance(chunk_sizes[0], batch_size)
    places = sorted({split(length, factor * middle) for factor in factors})  # (P, D)
    runs = [
        measuring.Run(Workload(length, batch_size, prompt / decodes), policy, chunk_size)
        for prompt, decodes in places
        for policy in (SARATHI, *more_policies(options))
        for chunk_size in dict.fromkeys(chunk_sizes)
    ]
    record = Record("fig9", *measuring.measured_on(llm))
    for run, gain in measuring.measured_gains(llm, runs, options.repeats).items():
        name = series(length, batch_size, run.chunk_size, run.policy)
        measuring.add_spread(record, name, gain, UNIT, run.work.ratio, "P:D")
    return record


def print_measurement(points: list[Point], repeats: int) -> None:
    found, rows = common.curves(points, "measured"), []
    for name in by_chunk_size(found):
        sizes = common.series_options(name)
        spread = [found[name + end] for end in common.SPREAD]
        for middle, low, high in zip(found[name], *spread, strict=True):
            values = (middle.x, sizes["C"] / (sizes["B"] - 1), middle.y, low.y, high.y)
            rows.append([policy_of(name), sizes["C"], *[f"{value:.3g}" for value in values]])
    where = f"{points[0].model} on {points[0].hardware}, L = {sizes['L']}, B = {sizes['B']}"
    title = f"Measured: {where}; median of {repeats} alternating pairs"
    print_table(["policy", "C", "P:D", "C/(B-1)", "gain", "lowest", "highest"], rows, title)


# ------------------------------------------------------------------------------------------ picture


def by_chunk_size(found: dict[str, list[Point]]) -> list[str]:
    """The series of the curves, without those of their spread, the smallest C first."""
    names = [name for name in found if not name.endswith(common.SPREAD)]
    return sorted(names, key=lambda name: common.series_options(name)["C"])


def policies_in(found: Iterable[str]) -> list[str]:
    """The policies of these curves, but for SARATHI."""
    return [name for name in dict.fromkeys(map(policy_of, found)) if name != SARATHI]


def draw_panel(axes: plt.Axes, found: dict[str, list[Point]], markevery: int) -> None:
    """Gain against P:D, a curve for each chunk size, and where C/(B-1) puts its peak."""
    spare, styles = cycle(look.SERIES[len(STYLE) :]), dict(STYLE)
    own = dict(zip(policies_in(found), cycle(SPARE_LOOKS), strict=False))
    named = {policy: policy for policy in own}  # once, in the legend
    for name in by_chunk_size(found):
        sizes, policy = common.series_options(name), policy_of(name)
        if sizes["C"] not in styles:
            styles[sizes["C"]] = next(spare)
        colour, marker = styles[sizes["C"]]
        style, label = {"marker": marker, "markevery": markevery}, f"C = {sizes['C']}"
        if policy in own:  # the colour says whose curve it is, the marker its C
            colour, style["linestyle"], label = own[policy][0], "--", named.pop(policy, None)
        look.plot_points(axes, found[name], label=label, color=colour, **style)
        look.shade_spread(axes, found, name, colour, alpha=0.2)
        if policy == SARATHI:
            at = sizes["C"] / (sizes["B"] - 1)
            axes.axvline(at, color=colour, linestyle=":", linewidth=1.8)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("P:D (prompt tokens per decode)")


def draw(points: list[Point]) -> plt.Figure:
    """Three predicted panels with the paper's points; a fourth where something was measured."""
    numbers, ticks = common.paper_numbers(), [1, 2, 5, 10, 20, 50, 100, 200]
    found, measured = common.curves(points, "predicted"), common.curves(points, "measured")
    if measured:
        figure, grid = look.panels(2, 2, 6.5, 5.25)
    else:
        figure, grid = look.panels(1, 3, 17 / 3, 6, sharey=True)
    panels = [axes for row in grid for axes in row]
    drawn = [point for curve in found.values() for point in curve]
    for axes, (length, batch_size) in zip(panels, BATCH_SIZES.items(), strict=False):
        shapes = product((SARATHI, *policies_in(found)), CHUNK_SIZES)
        names = [series(length, batch_size, size, policy) for policy, size in shapes]
        draw_panel(axes, {name: found[name] for name in names}, markevery=4)
        axes.set_title(f"predicted: L = {length // 1024}K, B = {batch_size}")
        axes.set_ylim(look.limits(drawn, 0.5, 1.4))
        axes.set_xticks(ticks)
        for (paper_length, chunk_size), (name, ratio) in PAPER.items():
            if paper_length == length:
                look.star(axes, ratio, numbers[name], STYLE[chunk_size][0])
    if measured:
        draw_panel(panels[3], measured, markevery=1)
        sizes = common.series_options(next(iter(measured)))
        title = f"{look.measured_title(points)}\nL = {sizes['L']}, B = {sizes['B']}"
        places = [point.x for curve in measured.values() for point in curve]
        low, high = min(places) / 1.5, max(places) * 1.5
        panels[3].set(title=title, xlim=(low, high))
        panels[3].set_xticks([tick for tick in ticks if low <= tick <= high])
        panels[3].margins(y=0.15)
        panels[3].legend(loc="best")
    for axes in panels if measured else panels[:1]:
        axes.set_ylabel("throughput / baseline's")
    star = {"color": "white", "markeredgecolor": "black", "markersize": 15, "label": "paper"}
    panels[0].plot([], [], "*", **star)
    panels[0].plot([], [], ":", color="black", label="P:D = C/(B-1)")
    panels[0].legend(loc="best" if policies_in(found) else "lower left")
    where = f"{MODEL} on {GPU} (cost model) and the paper's points"
    figure.suptitle(f"SARATHI Fig 9: gain over the baseline, {where}", fontsize=18)
    return figure


def main() -> None:
    options = ScriptParser(__doc__, FLAGS | WRITES).parse_args()
    llm = load(options) if options.measure else None
    name, more = file_name("fig9", options), more_policies(options)
    make_directory(options.out, name, force=options.force)
    print(__doc__.splitlines()[0])
    points = paper_points() + predict(8 if options.quick else 41, more)
    print_prediction(points, more)
    if llm is not None:
        measured = measure(llm, options)
        print_measurement(measured, options.repeats)
        points += measured
    points = common.with_kept(options.out / f"{name}.csv", points)
    finish(options, name, points, lambda: draw(points))


if __name__ == "__main__":
    run_main(main)
