"""Draw a run: lanes of labelled bars over time (a Gantt chart).

    draw_runs(traces, ...)       runs below each other, a lane for each request
    draw_lanes(axes, lanes)      any lanes of bars, such as those of more/pictures/lanes.py
    draw_stages(trace, axes)     the stages of a pipeline: micro-batches, and the bubbles between
                                 them with their causes

A bar shows its kind twice: by its colour, and by its height or hatch. So a reader who cannot tell
the colours apart can still read it.
"""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from more.pictures.lanes import Bar, request_lanes, stage_lanes
from more.pictures.looks import LOOKS, STAGE_LOOKS, Look
from more.pipeline import PipelineTrace
from timeline import Trace

BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
LABEL = {"ha": "center", "va": "center", "bbox": BOX, "zorder": 3, "clip_on": True}
MIDDLE = 0.55  # of a lane's bars: where labels stand
SEEN = 1.5  # points: who is narrower cannot be told from a line


def draw_runs(
    traces: Mapping[str, Trace], bound: float, names: Mapping[int, str], title: str
) -> plt.Figure:
    """Runs below each other on one time axis, by name. bound, names: see `request_lanes`."""
    lanes = {run: request_lanes(trace, bound, names) for run, trace in traces.items()}
    size = (12, 2.1 * len(traces) + 1)
    shape = {"figsize": size, "sharex": True, "squeeze": False, "layout": "constrained"}
    figure, panels = plt.subplots(len(traces), 1, **shape)
    end = max(bar.end for run in lanes.values() for lane in run.values() for bar in lane)
    for axes, (run, lane) in zip(panels[:, 0], lanes.items(), strict=True):
        draw_lanes(axes, lane, end=end)
        axes.set_title(run, loc="left", fontweight="bold")
    panels[-1, 0].set_xlabel("time (s)")
    figure.suptitle(title, fontsize=15)
    figure.legend(handles=legend_handles(lanes.values()), loc="outside lower center", ncols=6)
    return figure


def draw_stages(
    trace: PipelineTrace,
    axes: plt.Axes,
    *,
    names: Mapping[int, str] | None = None,
    start: float = 0.0,
    end: float | None = None,
) -> dict[str, list[Bar]]:
    """The stages of a pipeline over time, from `start` to `end` seconds. Returns what is seen.

    names: see `lanes.stage_lanes`.
    """
    axes.set(xlabel="time (s)")
    return draw_lanes(axes, stage_lanes(trace, names), STAGE_LOOKS, end, start)


def draw_lanes(
    axes: plt.Axes,
    lanes: Mapping[str, Sequence[Bar]],
    looks: Mapping[str, Look] = LOOKS,
    end: float | None = None,
    start: float = 0.0,
) -> dict[str, list[Bar]]:
    """Lanes from top to bottom, each a list of bars. Returns those that are seen, for the legend.

    The time axis goes from `start` to `end` (None: to the end of the last bar).
    """
    if end is None:
        end = max((bar.end for bars in lanes.values() for bar in bars), default=1.0)
    length = end - start
    lanes = {
        name: [bar for bar in bars if bar.end >= start and bar.start <= end]
        for name, bars in lanes.items()
    }
    axes.set(xlim=(start - 0.015 * length, start + 1.01 * length), ylim=(len(lanes), -0.1))
    axes.set_yticks([lane + 1 - MIDDLE for lane in range(len(lanes))], list(lanes))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    # scale: points of a pixel
    box = axes.get_window_extent()
    scale = 72 / axes.figure.dpi
    points = scale * box.width / (1.025 * length)  # of a second
    size = min(0.8 * plt.rcParams["font.size"], 0.5 * scale * box.height / (len(lanes) + 0.1))
    for lane, bars in enumerate(lanes.values()):
        for kind, look in looks.items():
            found = [bar for bar in bars if bar.kind == kind]
            if look.marker:
                places = [lane + 1 - look.high] * len(found)
                style = {"color": look.colour, "markersize": 7, "linestyle": "none", "zorder": 4}
                axes.plot([bar.start for bar in found], places, look.marker, **style)
                continue
            axes.broken_barh(
                [(bar.start, bar.end - bar.start) for bar in found],
                (lane + 1 - look.high, look.high - look.low),
                facecolor=look.colour,
                edgecolor=look.edge,
                hatch=look.hatch,
                linewidth=[0.8 if points * (bar.end - bar.start) > 3 else 0 for bar in found] or 0,
                zorder=2,
            )
            for bar in found:
                # what is seen of it
                left = max(bar.start, start)
                right = min(bar.end, end)
                if bar.label and points * (right - left) > 0.62 * size * len(bar.label) + 5:
                    place = ((left + right) / 2, lane + 1 - MIDDLE)
                    axes.text(*place, bar.label, fontsize=size, **LABEL)
    is_seen = lambda bar: looks[bar.kind].marker or SEEN < points * (bar.end - bar.start)
    return {name: list(filter(is_seen, bars)) for name, bars in lanes.items()}


def legend_handles(
    drawn: Iterable[Mapping[str, Sequence[Bar]]], looks: Mapping[str, Look] = LOOKS
) -> list[Artist]:
    """The kinds of bars in these lanes, for matplotlib's `legend(handles=...)`."""
    kinds = {bar.kind for lanes in drawn for bars in lanes.values() for bar in bars}
    handles: list[Artist] = []
    for kind, look in looks.items():
        if kind not in kinds:
            continue
        same = {"color": look.colour, "label": look.meaning}
        if look.marker:
            mark = {"linestyle": "none", "marker": look.marker, "markersize": 8}
            handles.append(Line2D([], [], **same, **mark))
        elif look.hatch:
            box = {"facecolor": look.colour, "edgecolor": look.edge, "hatch": look.hatch}
            handles.append(Patch(label=look.meaning, **box))
        else:
            width = 20 * (look.high - look.low)
            handles.append(Line2D([], [], linewidth=width, solid_capstyle="butt", **same))
    return handles
