"""The look of all pictures: colours that everybody can tell apart, sizes for the last row."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from command.cli import MARK, write_file
from experiments.lib.colours import CHUNKS, COLOURS, GREY, HATCHES, OPERATOR_LOOKS, SERIES  # noqa: F401
from experiments.lib.rows import spread

matplotlib.use("Agg")  # pictures go to files: no window, no display needed


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
            "pdf.fonttype": 42,  # what printers of papers take
        }
    )


def save_figure(
    figure: plt.Figure, path: Path, dpi: float | None = None, bbox: str | None = "tight"
) -> None:
    """Write a PNG or a PDF, and close the figure. dpi, bbox: see matplotlib's `savefig`."""
    data = BytesIO()
    kind = path.suffix[1:]
    about = {"Software": MARK} if kind == "png" else {"Creator": MARK}
    figure.savefig(data, format=kind, dpi=dpi, bbox_inches=bbox, metadata=about)
    write_file(path, data.getvalue() + (f"%{MARK}\n".encode() if kind == "pdf" else b""))
    plt.close(figure)


def panels(
    rows: int, columns: int, width: float, height: float, **options: object
) -> tuple[plt.Figure, list[list[plt.Axes]]]:
    """A picture of rows x columns panels, each `width` x `height` inches.

    options: what matplotlib's `subplots` takes.
    """
    size = (columns * width, rows * height)
    options = {"figsize": size, "layout": "constrained", "squeeze": False} | options
    figure, grid = plt.subplots(rows, columns, **options)
    return figure, [list(row) for row in grid]


def shade_rows(axes: plt.Axes, rows: Sequence[Mapping], x: str, y: str, colour: str) -> None:
    """The range of a measured quantity of some rows, where it has one."""
    low, high = zip(*(spread(row, y) for row in rows), strict=True)
    axes.fill_between([row[x] for row in rows], low, high, color=colour, alpha=0.15, linewidth=0)


def one_legend(figure: plt.Figure, words: Mapping[str, str]) -> None:
    """One legend below the panels in place of theirs. words: what it says for their labels."""
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(words.get(label, label), handle)
        axes.get_legend().remove()
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2)


# A number that the paper states, as a style of `plot`.
STAR = {
    "marker": "*",
    "linestyle": "none",
    "color": "white",
    "markeredgecolor": "black",
    "markersize": 19,
    "zorder": 5,
}


def star(
    axes: plt.Axes, x: float, y: float, colour: str = "white", label: str | None = None
) -> None:
    """A number that the paper states."""
    axes.plot([x], [y], **STAR | {"color": colour, "label": label})


def log_axis(axes: plt.Axes, name: str, places: Sequence[float] = ()) -> None:
    """A logarithmic axis, "x" or "y", with plain numbers: at these places, if they are few."""
    axis = getattr(axes, f"{name}axis")
    places = sorted(set(places))
    axes.set(**{f"{name}scale": "log"})
    low, high = axis.get_view_interval()
    ticks = LogLocator(10, (1, 2, 5) if high < 1000 * low else (1,))
    if 0 < len(places) <= 16:
        few = places[:1]
        for place in places:
            if place >= 0.99 * few[-1] * (places[-1] / places[0]) ** (1 / 6):
                few.append(place)
        # two ticks would not tell that the axis is logarithmic
        ticks = FixedLocator(few) if len(few) > 2 else MaxNLocator(6)
    axis.set_major_locator(ticks)
    axis.set_major_formatter(lambda x, _: f"{x:.0f}" if x >= 100 else f"{x:.3g}")
    axis.set_minor_locator(NullLocator())
