"""Predictions beside measurements: errors, and the picture."""

import math
import statistics
from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt

from experiments.lib.papers import looks_of
from experiments.lib.rows import SOURCES, WHERE, Row, Rows


def newest(rows: Rows) -> Rows:
    """Of the model and the machine that were predicted and measured last."""
    return rows.where(**{name: rows[-1][name] for name in WHERE[1:]})


def pairs(rows: Rows) -> list[tuple[Row, Row]]:
    """The predicted and the measured row of each workload."""
    rows = newest(rows)
    return list(zip(*(rows.where(source=source) for source in SOURCES[1:]), strict=True))


def errors(rows: Rows, quantity: str) -> list[float]:
    """Predicted over measured of each workload, in %."""
    return [100 * (ours[quantity] / real[quantity] - 1) for ours, real in pairs(rows)]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def error_summary(errors: Sequence[float]) -> list[str]:
    """Median, 90th percentile and maximum of the absolute errors in %, and the signed median."""
    sizes = [abs(error) for error in errors]
    shown = [statistics.median(sizes), quantile(sizes, 0.9), max(sizes)]
    return [*(f"{size:.1f} %" for size in shown), f"{statistics.median(errors):+.1f} %"]


def draw_agreement(axes: plt.Axes, rows: Rows, quantity: str, unit: str) -> None:
    """Predicted against measured: the nearer to the line, the better. Grey: within 10 %."""
    for policy, (colour, marker) in looks_of(list(rows.by("policy"))).items():
        own = rows.where(policy=policy)
        both = [own.where(source=source).column(quantity) for source in ("measured", "predicted")]
        axes.plot(*both, marker, color=colour, markersize=9, label=policy)
    end = max(*axes.get_xlim(), *axes.get_ylim())
    axes.plot([0, end], [0, end], color="black", linewidth=1.2)
    axes.fill_between([0, end], [0, 0.9 * end], [0, 1.1 * end], color="grey", alpha=0.2)
    axes.set_title("grey: within 10 %")
    label = f"{quantity} ({unit})"
    axes.set(xlim=(0, end), ylim=(0, end), xlabel=f"measured {label}", ylabel=f"predicted {label}")
