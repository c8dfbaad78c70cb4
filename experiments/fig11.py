"""SARATHI, Fig 11: whole prompts (Orca) at their worst and at their best, against SARATHI.

    python experiments/fig11.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig11.py --measure    and the real engine on this machine: minutes
    python experiments/fig11.py --policy-file examples/priority.py    yours, too, at SARATHI's C

Orca's worst and best case are workloads, not policies (Sec 5.2). Worst: all requests start and end
together. No prefill ever meets a decode, and Orca is the baseline. Best: requests are staggered, so
that each whole prompt rides with the decodes of the others. (a) over lengths, where P:D is balanced
(see `balance` in lib/steady.py); (b) over P:D, at L = 1K. All gains are those of a steady state
over the baseline's (see fig9.py).
"""

import enter  # noqa: F401

from collections.abc import Iterable, Sequence
from itertools import cycle, product

import matplotlib.pyplot as plt

from experiments.lib import look, measuring
from experiments.lib.common import SPREAD, Point, Record, curves, progress, series_options
from experiments.lib.figure import Figure, Scale
from experiments.lib.flags import POLICIES
from experiments.lib.look import COLOURS
from experiments.lib.measuring import Run
from experiments.lib.papers import SPARE_LOOKS
from experiments.lib.steady import BATCH_SIZES, Workload, balance, predicted_gain, split

MODEL, GPU, CHUNK_SIZE, LENGTH = "llama-13b", "a6000", 256, 1024  # C of panel (a), L of panel (b)
UNIT = "throughput over baseline"
STYLE = {  # by a series' first two words: colour, marker, hatch
    "orca worst": (COLOURS["green"], "^", "//"),
    "orca best": (COLOURS["green"], "s", "\\\\"),
    "sarathi C=128": (COLOURS["purple"], "v", ""),
    "sarathi C=256": (COLOURS["sky"], "P", ""),
    "sarathi C=512": (COLOURS["blue"], "o", ""),
}


def styles_of(series: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """By a series' first two words: those of STYLE. Other policies have a colour of their own."""
    names = dict.fromkeys(" ".join(each.split()[:2]) for each in series)
    others = dict.fromkeys(name.split()[0] for name in names if name not in STYLE)
    colours = {policy: look[0] for policy, look in zip(others, cycle(SPARE_LOOKS), strict=False)}

    def other(name: str) -> tuple[str, str, str]:
        policy, size = name.split()
        return colours[policy], STYLE.get(f"sarathi {size}", ("", "X"))[1], ""

    return {name: STYLE.get(name) or other(name) for name in names}


def contenders(
    length: int,
    batch_size: int,
    ratio: float,
    chunk_sizes: tuple[int, ...],
    more: Sequence[str] | None = None,
) -> dict[str, Run]:
    """What runs against the baseline on these lengths. more: policies beside SARATHI."""
    together = Workload(length, batch_size, ratio)
    staggered = Workload(length, batch_size, ratio, staggered=True)
    orca = {"orca worst": Run(together, "orca", 1), "orca best": Run(staggered, "orca", 1)}
    chunked = product(("sarathi", *(more or ())), chunk_sizes)
    return orca | {f"{name} C={size}": Run(together, name, size) for name, size in chunked}


def predict(quick: bool, policy: Sequence[str] | None = None, **_: object) -> list[Point]:
    """policy: more of them, with the chunk sizes of SARATHI."""
    record = Record("fig11", MODEL, GPU)

    def add(series: str, run: Run, x: float, x_unit: str) -> None:
        gain = predicted_gain(run.work, run.policy, run.chunk_size, MODEL, GPU)
        record.add(series, gain, UNIT, x, x_unit)

    for length, batch_size in BATCH_SIZES.items():
        ratio = balance(CHUNK_SIZE, batch_size)
        for name, run in contenders(length, batch_size, ratio, (CHUNK_SIZE,), policy).items():
            add(f"{name} (a)", run, length, "L")
    count, batch_size = 5 if quick else 33, BATCH_SIZES[LENGTH]
    ratios = [200 ** (i / (count - 1)) for i in range(count)]
    # where a curve peaks: the last one is best-case Orca's
    ratios += [balance(size, batch_size) for size in (256, 512, LENGTH)]
    splits = sorted({split(LENGTH, ratio) for ratio in ratios})
    for prompt, decodes in progress(splits, "predicting"):
        runs = contenders(LENGTH, batch_size, prompt / decodes, (256, 512), policy)
        del runs["orca worst"]  # the baseline by another name
        for name, run in runs.items():
            add(f"{name} (b)", run, prompt / decodes, "P:D")
    for series, curve in curves(record, "predicted").items():
        if series.endswith("(b)"):
            record.add(f"{series} peak", max(point.y for point in curve), UNIT)
    return record


def measure(llm: "measuring.LLM", scale: Scale, policy: Sequence[str] | None = None) -> list[Point]:
    """Both panels in one sweep: P:D at the balance of each chunk size. policy: more of them."""
    record = Record("fig11", *measuring.measured_on(llm))
    (length,), (batch_size,) = scale.lengths, scale.batch_sizes
    splits = [split(length, balance(size, batch_size)) for size in scale.chunk_sizes]
    shape, sizes = (length, batch_size), (scale.chunk_sizes, policy)
    runs = {
        (name, prompt / decodes): run
        for prompt, decodes in splits
        for name, run in contenders(*shape, prompt / decodes, *sizes).items()
        if name != "orca worst" or (prompt, decodes) == splits[0]  # once: it is the baseline
    }
    gains = measuring.measured_gains(llm, list(runs.values()), scale.repeats)
    for (name, ratio), run in runs.items():
        series = f"{name} L={length} B={batch_size}"
        measuring.add_spread(record, series, gains[run], UNIT, ratio, "P:D")
    return record


def draw_lengths(axes: plt.Axes, found: dict[str, list[Point]], stars: list[Point]) -> None:
    """Panel (a): a bar for each contender at each length, and the paper's numbers."""
    names, lengths = [series for series in found if series.endswith("(a)")], list(BATCH_SIZES)
    step, styles = 0.81 / len(names), styles_of(names)
    for number, series in enumerate(names):
        name, shift = series.removesuffix(" (a)"), step * (number - (len(names) - 1) / 2)
        colour, _, hatch = styles[name]
        places = [i + shift for i in range(len(lengths))]
        style = {"color": colour, "hatch": hatch, "edgecolor": "black", "label": name}
        axes.bar(places, [point.y for point in found[series]], step - 0.02, **style)
        for point in stars:
            if point.series == series:
                look.star(axes, places[lengths.index(int(point.x))], point.y)
    look.star(axes, float("nan"), float("nan"), label="paper")
    labels = [f"L = {length // 1024}K\nB = {size}" for length, size in BATCH_SIZES.items()]
    axes.set_xticks(range(len(labels)), labels)
    axes.axhline(1, color="black", linewidth=1)
    title = f"(a) predicted, P:D balanced for C = 256\n{MODEL} on {GPU}"
    drawn = [point for series in names for point in found[series]]
    axes.set(ylabel="throughput / baseline's", title=title, ylim=look.limits(drawn, 0.8, 1.4))
    axes.legend(ncols=2, loc="upper center")


def draw_ratios(
    axes: plt.Axes, found: dict[str, list[Point]], title: str, markevery: int = 1
) -> None:
    """Gain against P:D, one curve for each contender; measured ones with their spread."""
    styles = styles_of(found)
    for series, curve in found.items():
        if series.endswith(SPREAD):
            continue
        name = " ".join(series.split()[:2])
        colour, marker, _ = styles[name]
        style = {"color": colour, "marker": marker, "markevery": markevery, "label": name}
        style["linestyle"] = "-" if name.split()[0] in ("orca", "sarathi") else "--"
        look.plot_points(axes, curve, **style)
        look.shade_spread(axes, found, series, colour)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="P:D (prompt tokens per decode)", title=title)


def draw(points: list[Point]) -> plt.Figure:
    predicted, measured = curves(points, "predicted"), curves(points, "measured")
    paper = [point for point in points if point.source == "paper"]
    figure, [grid] = look.panels(1, 3 if measured else 2, 8, 6.5)
    draw_lengths(grid[0], predicted, paper)
    over_ratio = {series: curve for series, curve in predicted.items() if series.endswith("(b)")}
    draw_ratios(grid[1], over_ratio, f"(b) predicted, L = 1K, B = 18\n{MODEL} on {GPU}", 4)
    drawn = [point for curve in over_ratio.values() for point in curve]
    grid[1].set_ylim(look.limits(drawn, 0.8, 1.4))
    look.log_ticks(grid[1], [1, 2, 5, 10, 20, 50, 100, 200])
    for point in paper:
        if point.series.endswith("peak"):
            name = point.series.removesuffix(" (b) peak")
            style = {"color": STYLE[name][0], "linestyle": ":", "label": f"paper's peak, {name}"}
            grid[1].axhline(point.y, **style)
    grid[1].legend(fontsize=12, ncols=2, loc="upper center")
    if measured:
        shape = "L = {L}, B = {B}".format(**series_options(next(iter(measured))))
        draw_ratios(grid[2], measured, f"{look.measured_title(points)}\n{shape}")
        ticks = {point.x for curve in measured.values() for point in curve}
        look.log_ticks(grid[2], sorted(ticks))
        grid[2].legend()
    figure.suptitle("SARATHI Fig 11: Orca's worst and best case, and SARATHI")
    return figure


FIGURE = Figure(
    name="fig11",
    description=__doc__,
    paper={
        "f11a_orca_best_1k": ("orca best (a)", 1024),
        "f11a_sarathi_1k": ("sarathi C=256 (a)", 1024),
        "f11a_sarathi_2k": ("sarathi C=256 (a)", 2048),
        "f11a_sarathi_3k": ("sarathi C=256 (a)", 3072),
        "f11b_orca": ("orca best (b) peak", 0),
        "f11b_c256": ("sarathi C=256 (b) peak", 0),
        "f11b_c512": ("sarathi C=512 (b) peak", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(6,), chunk_sizes=(128, 256), repeats=5),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(8, 16), repeats=1),
    flags=POLICIES,
    shown=lambda point: point.source == "measured" or not point.series.endswith("(b)"),
)

main = FIGURE.main

if __name__ == "__main__":
    main()
