"""Draw a run: lanes of labelled bars over time (a Gantt chart), one lane for each request.

    draw(trace)                  requests: prefill chunks with their tokens, decodes, waiting,
                                 preemptions, generation stalls
    draw_stages(trace)           the stages of a pipeline: micro-batches, and the bubbles between
                                 them with their causes
    draw_lanes(axes, lanes)      any lanes of bars

A bar shows its kind twice: by its colour, and by its height or hatch. So a reader who cannot tell
the colours apart can still read it.
"""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pictures.lanes import Bar, request_lanes, stage_lanes
from pictures.looks import LOOKS, STAGE_LOOKS, Look
from pipeline import PipelineTrace
from timeline import Trace

LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
MIDDLE = 0.55  # of a lane's bars: where labels stand


def draw(
    trace: Trace,
    axes: plt.Axes | None = None,
    *,
    bound: float | None = None,
    names: Mapping[int, str] | None = None,
    title: str = "",
    legend: bool = True,
) -> plt.Axes:
    """The requests of a trace over time.

    axes: where to draw, else a new figure; bound and names: see `lanes.request_lanes`.
    """
    lanes = request_lanes(trace, bound, names)
    if axes is None:
        _, axes = plt.subplots(figsize=(12, 1.6 + 0.5 * len(lanes)), layout="constrained")
    draw_lanes(axes, lanes)
    axes.set(title=title, xlabel="time (s)")
    if legend:
        axes.legend(handles=legend_handles([lanes]), loc="upper left", bbox_to_anchor=(1, 1))
    return axes


def draw_runs(
    traces: Mapping[str, Trace], bound: float, names: Mapping[int, str], title: str
) -> plt.Figure:
    """Runs below each other on one time axis. traces: by name. bound, names: see `draw`."""
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
    axes: plt.Axes | None = None,
    *,
    names: Mapping[int, str] | None = None,
    start: float = 0.0,
    end: float | None = None,
    title: str = "",
    legend: bool = True,
) -> plt.Axes:
    """The stages of a pipeline over time, from `start` to `end` seconds.

    axes: where to draw, else a new figure; names: see `lanes.stage_lanes`.
    """
    lanes = stage_lanes(trace, names)
    if axes is None:
        _, axes = plt.subplots(figsize=(14, 2 + 0.7 * len(lanes)), layout="constrained")
    draw_lanes(axes, lanes, STAGE_LOOKS, end, start)
    axes.set(title=title, xlabel="time (s)")
    if legend:
        axes.legend(
            handles=legend_handles([lanes], STAGE_LOOKS), loc="upper left", bbox_to_anchor=(1, 1)
        )
    return axes


def draw_lanes(
    axes: plt.Axes,
    lanes: Mapping[str, Sequence[Bar]],
    looks: Mapping[str, Look] = LOOKS,
    end: float | None = None,
    start: float = 0.0,
) -> None:
    """Lanes from top to bottom, each a list of bars.

    The time axis goes from `start` to `end` (None: to the end of the last bar).
    """
    end = (
        max((bar.end for bars in lanes.values() for bar in bars), default=1.0)
        if end is None
        else end
    )
    length = end - start
    lanes = {
        name: [bar for bar in bars if bar.end >= start and bar.start <= end]
        for name, bars in lanes.items()
    }
    axes.set(xlim=(start - 0.015 * length, start + 1.01 * length), ylim=(len(lanes), -0.1))
    axes.set_yticks([lane + 1 - MIDDLE for lane in range(len(lanes))], list(lanes))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    points = axes.get_window_extent().width * 72 / axes.figure.dpi / (1.025 * length)  # per second
    size = min(
        0.8 * plt.rcParams["font.size"],
        0.5 * axes.get_window_extent().height * 72 / axes.figure.dpi / (len(lanes) + 0.1),
    )
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
                left, right = max(bar.start, start), min(bar.end, end)  # what is seen of it
                if bar.label and points * (right - left) > 0.62 * size * len(bar.label) + 5:
                    place = ((left + right) / 2, lane + 1 - MIDDLE)
                    axes.text(
                        *place,
                        bar.label,
                        ha="center",
                        va="center",
                        fontsize=size,
                        zorder=3,
                        bbox=LABEL,
                        clip_on=True,
                    )


def legend_handles(
    drawn: Iterable[Mapping[str, Sequence[Bar]]], looks: Mapping[str, Look] = LOOKS
) -> list[Artist]:
    """The kinds of bars in these lanes, for matplotlib's `legend(handles=...)`."""
    kinds = {bar.kind for lanes in drawn for bars in lanes.values() for bar in bars}
    handles: list[Artist] = []
    for kind, look in looks.items():
        if kind not in kinds:
            continue
        if look.marker:
            handles.append(
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker=look.marker,
                    markersize=8,
                    color=look.colour,
                    label=look.meaning,
                )
            )
        elif look.hatch:
            handles.append(
                Patch(
                    facecolor=look.colour, edgecolor=look.edge, hatch=look.hatch, label=look.meaning
                )
            )
        else:
            width = 20 * (look.high - look.low)
            handles.append(
                Line2D(
                    [],
                    [],
                    linewidth=width,
                    color=look.colour,
                    solid_capstyle="butt",
                    label=look.meaning,
                )
            )
    return handles
