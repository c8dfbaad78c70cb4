"""Panels of course/sketch.py with matplotlib: for `course picture`, and for slides."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course.sketch import INK, PAPER, Bar, Line, Panel, Words
from experiments.lib.look import panels, use_style


def paint(axes: plt.Axes, panel: Panel) -> None:
    for shape in panel.shapes:
        ink = colour(shape.colour)
        if isinstance(shape, Bar):
            axes.bar(
                shape.x,
                shape.height,
                shape.width,
                shape.y,
                align="edge",
                color=ink,
                edgecolor="white",
            )
        elif isinstance(shape, Line):
            axes.plot(*zip(*shape.points, strict=True), "--" if shape.dashed else "-", color=ink)
        elif isinstance(shape, Words):
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                color=ink,
                va="center",
                ha="center",
                fontsize=11,
                clip_on=True,
            )
        else:
            axes.plot(shape.x, shape.y, "X", color=ink, markersize=10)
    for axis, ticks in zip((axes.xaxis, axes.yaxis), panel.ticks, strict=True):
        axis.set_ticks([place for place, _ in ticks], [str(name) for _, name in ticks])
    if len("".join(str(name) for _, name in panel.ticks[0])) > 40:
        axes.tick_params("x", rotation=60, labelsize=11)
    axes.set(
        title=panel.title,
        xlabel=panel.x_label,
        ylabel=panel.y_label,
        xlim=panel.x,
        ylim=panel.y[::-1] if panel.down else panel.y,
    )
    axes.grid(visible=not panel.down)


def figure_of(title: str, shown: Sequence[Panel]) -> plt.Figure:
    """Panels side by side, with one legend."""
    use_style()
    figure, [row] = panels(1, len(shown), 8, 5.5)
    for axes, panel in zip(row, shown, strict=True):
        paint(axes, panel)
    key = {words: each for panel in shown for words, each in panel.key.items()}
    handles = [
        Patch(facecolor=colour(ink), edgecolor="grey", label=words)
        if dashed is None
        else Line2D([], [], color=colour(ink), linestyle="--" if dashed else "-", label=words)
        for words, (ink, dashed) in key.items()
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=12)
    figure.suptitle(title)
    return figure


def colour(name: str) -> str:
    return {INK: "black", PAPER: "white"}.get(name, name)
