"""The look of all pictures: colours that everybody can tell apart, sizes for the last row."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from cli import MARK
from experiments.lib.common import Point

matplotlib.use("Agg")  # pictures go to files: no window, no display needed

# Okabe and Ito's palette: told apart with any colour vision. Markers differ as well, for print in
# grey.
COLOURS = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "black": "#000000",
}
SERIES = [
    (COLOURS["orange"], "^"),
    (COLOURS["blue"], "o"),
    (COLOURS["green"], "s"),
    (COLOURS["vermilion"], "D"),
    (COLOURS["purple"], "v"),
    (COLOURS["sky"], "P"),
    (COLOURS["black"], "X"),
    ("#777777", "*"),
]


def use_style() -> None:
    """Sizes that can be read from the last row of a classroom."""
    plt.rcParams.update(
        {
            "font.size": 15,
            "axes.titlesize": 16,
            "axes.labelsize": 15,
            "legend.fontsize": 13,
            "lines.linewidth": 2.2,
            "lines.markersize": 6,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "savefig.dpi": 120,
        }
    )


def save_figure(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Software": MARK})
    plt.close(figure)


def plot_points(axes: plt.Axes, curve: Sequence[Point], **style: object) -> None:
    """The points of one series as a line; style: what matplotlib's `plot` takes."""
    axes.plot([point.x for point in curve], [point.y for point in curve], **style)


def shade_spread(
    axes: plt.Axes, found: Mapping[str, Sequence[Point]], series: str, colour: str
) -> None:
    """The range of a measured series, from its lowest to its highest repetition, where it has one.

    found: points by series.
    """
    if f"{series} lowest" in found:
        low, high = (
            [point.y for point in found[f"{series} {end}"]] for end in ("lowest", "highest")
        )
        axes.fill_between(
            [point.x for point in found[series]], low, high, color=colour, alpha=0.15, linewidth=0
        )


def star(
    axes: plt.Axes, x: float, y: float, colour: str = "white", label: str | None = None
) -> None:
    """A number that the paper states."""
    style = {"markeredgecolor": "black", "markersize": 19, "zorder": 5, "linestyle": "none"}
    axes.plot([x], [y], "*", color=colour, label=label, **style)


def log_ticks(axes: plt.Axes, places: Sequence[float]) -> None:
    """A logarithmic x axis with these places named, in plain numbers."""
    axes.set_xscale("log")
    axes.set_xticks(
        places, [f"{place:.0f}" if place >= 100 else f"{place:.3g}" for place in places]
    )
    axes.set_xticks([], minor=True)


def measured_title(points: Iterable[Point]) -> str:
    """The model and the machine of a measured panel, on two lines."""
    newest = [point for point in points if point.source == "measured"][-1]
    return f"measured: {newest.model}\n{newest.hardware}"
