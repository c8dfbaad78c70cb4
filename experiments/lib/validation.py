"""What the validations of predictions share: random lengths, errors, and the picture."""

import math
import random
import statistics
from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt

from experiments.lib.papers import look_of
from experiments.lib.rows import SOURCES, Row, Rows

Lengths = tuple[tuple[int, int], ...]  # prompt and output tokens of each request
Range = tuple[int, int]  # the smallest and the largest value


def draw_lengths(dice: random.Random, requests: Range, prompts: Range, outputs: Range) -> Lengths:
    """(prompt, output) tokens of a random number of requests."""
    count = dice.randint(*requests)
    return tuple((dice.randint(*prompts), dice.randint(*outputs)) for _ in range(count))


def pairs(rows: Rows) -> list[tuple[Row, Row]]:
    """The predicted and the measured row of each workload."""
    return list(zip(*(rows.where(source=source) for source in SOURCES[1:]), strict=True))


def errors(rows: Rows, quantity: str, relative: bool = True) -> list[float]:
    """Predicted over measured, less 1, of each workload; or the difference, in its unit."""
    both = [(ours[quantity], real[quantity]) for ours, real in pairs(rows)]
    return [ours / real - 1 if relative else ours - real for ours, real in both]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def error_summary(errors: Sequence[float]) -> list[str]:
    """Median, 90th percentile and maximum of the absolute errors, and the signed median, in %."""
    sizes = [abs(error) for error in errors]
    shown = [statistics.median(sizes), quantile(sizes, 0.9), max(sizes)]
    return [
        *[f"{100 * size:.1f} %" for size in shown],
        f"{100 * statistics.median(errors):+.1f} %",
    ]


def draw_agreement(
    axes: plt.Axes,
    rows: Rows,
    quantity: str,
    label: str,
    relative: float = 0.0,
    absolute: float = 0.0,
) -> None:
    """Predicted against measured: the nearer to the line, the better.

    label: what the axes are called, as in "time (s)".
    relative, absolute: half the width of the grey band, as a share of the value and in its unit.
    """
    for policy, group in rows.by("policy").items():
        colour, marker = look_of(policy)
        both = [group.where(source=source).column(quantity) for source in ("measured", "predicted")]
        axes.plot(*both, marker, color=colour, markersize=9, label=policy)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    ends = [max(min(left, bottom), 0.0), max(right, top)]
    axes.plot(ends, ends, color="black", linewidth=1.2)
    low = [(1 - relative) * end - absolute for end in ends]
    high = [(1 + relative) * end + absolute for end in ends]
    within = f"{100 * relative:g} %" if relative else f"{absolute:g} points"
    axes.fill_between(ends, low, high, color="grey", alpha=0.2)
    corner = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
    axes.text(0.98, 0.02, f"grey: within {within}", **corner)
    axes.set(xlim=ends, ylim=ends, xlabel=f"measured {label}", ylabel=f"predicted {label}")
