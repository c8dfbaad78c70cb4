"""SARATHI, Fig 11: whole prompts (Orca) at their worst and at their best, against SARATHI.

    python experiments/fig11.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig11.py --measure    and the real engine on this machine: minutes

Orca's worst and best case are workloads, not policies (Sec 5.2). Worst: all requests start and end
together, so that no prefill ever meets a decode, and Orca is the baseline. Best: requests are
staggered, so that each whole prompt rides with the decodes of the others. (a) over lengths, where
P:D is balanced (see `balance` in lib/steady.py); (b) over P:D, at L = 1K. All gains are those of a
steady state over the baseline's (see fig9.py).
"""

from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from cli import run_main
from experiments.lib.common import SPREAD, Point, curves, progress, series_options
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import COLOURS, log_ticks, measured_title, plot_points, shade_spread, star
from experiments.lib.measuring import Run, gain_points, measured_gains, measured_on
from experiments.lib.steady import BATCH_SIZES, Workload, balance, predicted_gain, split

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU, CHUNK_SIZE, LENGTH = "llama-13b", "a6000", 256, 1024  # C of panel (a), L of panel (b)
STYLE = {  # by a series' first word, and C where there are several
    "orca worst": (COLOURS["orange"], "^", "//"),
    "orca best": (COLOURS["vermilion"], "D", "\\\\"),
    "sarathi C=128": (COLOURS["sky"], "P", ""),
    "sarathi C=256": (COLOURS["blue"], "o", ""),
    "sarathi C=512": (COLOURS["green"], "s", ""),
}
prediction = partial(Point, "fig11", source="predicted", model=MODEL, hardware=GPU)


def contenders(
    length: int, batch_size: int, ratio: float, chunk_sizes: tuple[int, ...]
) -> dict[str, Run]:
    """Who runs against the baseline on these lengths."""
    together = Workload(length, batch_size, ratio)
    staggered = Workload(length, batch_size, ratio, staggered=True)
    orca = {"orca worst": Run(together, "orca", 1), "orca best": Run(staggered, "orca", 1)}
    return orca | {f"sarathi C={size}": Run(together, "sarathi", size) for size in chunk_sizes}


def predict(quick: bool) -> list[Point]:
    points = []

    def add(series: str, x: float, x_unit: str, y: float) -> None:
        points.append(prediction(series, x, x_unit, y, "throughput over baseline"))

    for length, batch_size in BATCH_SIZES.items():
        for name, run in contenders(
            length, batch_size, balance(CHUNK_SIZE, batch_size), (CHUNK_SIZE,)
        ).items():
            add(
                f"{name} (a)",
                length,
                "L",
                predicted_gain(run.work, run.policy, run.chunk_size, MODEL, GPU),
            )
    count, batch_size = 5 if quick else 33, BATCH_SIZES[LENGTH]
    # where a curve peaks: the last one is best-case Orca's
    balances = [balance(size, batch_size) for size in (256, 512, LENGTH)]
    splits = {
        split(LENGTH, ratio)
        for ratio in [200 ** (i / (count - 1)) for i in range(count)] + balances
    }
    for prompt, decodes in progress(sorted(splits), "predicting"):
        for name, run in contenders(LENGTH, batch_size, prompt / decodes, (256, 512)).items():
            if name != "orca worst":  # the baseline by another name
                add(
                    f"{name} (b)",
                    prompt / decodes,
                    "P:D",
                    predicted_gain(run.work, run.policy, run.chunk_size, MODEL, GPU),
                )
    for name in ("orca best", "sarathi C=256", "sarathi C=512"):
        add(
            f"{name} (b) peak",
            0,
            "",
            max(point.y for point in points if point.series == f"{name} (b)"),
        )
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """Both panels in one sweep: P:D at the balance of each chunk size."""

    def point(series: str, x: float, y: float) -> Point:
        return Point("fig11", series, x, "P:D", y, "throughput over baseline", *measured_on(llm))

    (length,), (batch_size,) = scale.lengths, scale.batch_sizes
    balances = [balance(size, batch_size) for size in scale.chunk_sizes]
    splits = [split(length, ratio) for ratio in balances]
    runs = {
        (name, prompt / decodes): run
        for prompt, decodes in splits
        for name, run in contenders(length, batch_size, prompt / decodes, scale.chunk_sizes).items()
        if name != "orca worst" or (prompt, decodes) == splits[0]  # once: it is the baseline
    }
    gains = measured_gains(llm, list(runs.values()), scale.repeats)
    return [
        row
        for (name, ratio), run in runs.items()
        for row in gain_points(point, f"{name} L={length} B={batch_size}", ratio, gains[run])
    ]


def style(series: str) -> tuple[str, str, str]:
    looks = (look for name, look in STYLE.items() if series.startswith(name))
    return next(looks, (COLOURS["purple"], "v", ""))


def draw_ratios(
    axes: plt.Axes, found: dict[str, list[Point]], title: str, markevery: int = 1
) -> None:
    """Gain against P:D, one curve for each contender; measured ones with their spread."""
    for series, curve in found.items():
        if series.endswith(SPREAD):
            continue
        colour, marker, _ = style(series)
        plot_points(
            axes,
            curve,
            color=colour,
            marker=marker,
            markevery=markevery,
            label=" ".join(series.split()[:2]),
        )
        shade_spread(axes, found, series, colour)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="P:D (prompt tokens per decode)", title=title)


def draw(points: list[Point]) -> plt.Figure:
    predicted, paper, measured = (
        curves(points, source) for source in ("predicted", "paper", "measured")
    )
    count = 3 if measured else 2
    figure, panels = plt.subplots(1, count, figsize=(8 * count, 6.5), layout="constrained")
    names = [series for series in predicted if series.endswith("(a)")]
    for i, series in enumerate(names):
        colour, _, hatch = style(series)
        places = [j + 0.27 * (i - 1) for j in range(len(BATCH_SIZES))]
        heights = [point.y for point in predicted[series]]
        panels[0].bar(
            places,
            heights,
            0.25,
            color=colour,
            hatch=hatch,
            edgecolor="black",
            label=series.removesuffix(" (a)"),
        )
        for point in paper.get(series, []):
            panels[0].plot(
                places[list(BATCH_SIZES).index(int(point.x))],
                point.y,
                "*",
                color="white",
                markeredgecolor="black",
                markersize=19,
            )
    panels[0].set_xticks(
        range(len(BATCH_SIZES)),
        [f"L = {length // 1024}K\nB = {size}" for length, size in BATCH_SIZES.items()],
    )
    panels[0].set_ylim(0.8, 1.4)
    panels[0].axhline(1, color="black", linewidth=1)
    star(panels[0], float("nan"), float("nan"), label="paper")
    panels[0].set(
        ylabel="throughput / baseline's",
        title=f"(a) predicted, P:D balanced for C = 256\n{MODEL} on {GPU}",
    )
    panels[0].legend(ncols=2, loc="upper center")
    draw_ratios(
        panels[1],
        {s: c for s, c in predicted.items() if s.endswith("(b)")},
        f"(b) predicted, L = 1K, B = 18\n{MODEL} on {GPU}",
        4,
    )
    panels[1].set_ylim(0.8, 1.4)
    log_ticks(panels[1], [1, 2, 5, 10, 20, 50, 100, 200])
    for series, (point,) in ((s, curve) for s, curve in paper.items() if s.endswith("peak")):
        panels[1].axhline(
            point.y,
            color=style(series)[0],
            linestyle=":",
            label=f"paper's peak, {series.split(' (b)')[0]}",
        )
    panels[1].legend(fontsize=12, ncols=2, loc="upper center")
    if measured:
        shape = series_options(next(iter(measured)))
        draw_ratios(
            panels[2], measured, f"{measured_title(points)}\nL = {shape['L']}, B = {shape['B']}"
        )
        log_ticks(panels[2], sorted({point.x for curve in measured.values() for point in curve}))
        panels[2].legend()
    figure.suptitle("SARATHI Fig 11: Orca's worst and best case, and SARATHI", fontsize=18)
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
    shown=lambda point: point.source == "measured" or not point.series.endswith("(b)"),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
