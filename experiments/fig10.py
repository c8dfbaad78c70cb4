"""SARATHI, Fig 10: time by operator, the baseline beside SARATHI where P:D is balanced.

    python experiments/fig10.py              predicted for LLaMA-13B on an A6000: seconds, no GPU
    python experiments/fig10.py --measure    and the real engine on this machine: minutes

SARATHI shortens the linear operators, because decodes share the weights that a chunk reads anyway.
Attention gains nothing by that. The cost model lets it fall a little, for the reason that fig13.py
gives. Times are of a steady state, per request: see `balance` and `steady_operators` in
lib/steady.py.
"""

import enter  # noqa: F401

import statistics

import matplotlib.pyplot as plt

from experiments.lib import look, measuring, steady
from experiments.lib.common import Point, Record, curves, progress, series_options, values
from experiments.lib.figure import Figure, Scale
from experiments.lib.steady import BATCH_SIZES, Workload, balanced
from timeline import Trace

MODEL, GPU, CHUNK_SIZES = "llama-13b", "a6000", (256, 512)
POLICIES = ("baseline", "sarathi")
LINEAR = ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
PARTS = {"linear operators": LINEAR, "ffn": LINEAR[2:], "preproj and postproj": LINEAR[:2]}


def per_request(trace: Trace, first: int, last: int) -> dict[str, float]:
    """ms of each operator per request, between the completions of requests `first` and `last`."""
    seconds = steady.steady_operators(trace, first, last)
    return {name: 1e3 * value / (last - first) for name, value in seconds.items()}


def add_times(
    record: Record, work: Workload, chunk_size: int, ms: dict[str, dict[str, float]]
) -> None:
    """Add these times, and how many times less SARATHI takes.

    ms: per request, by policy and operator.
    """
    place = f"L={work.length} C={chunk_size}"
    for policy, operators in ms.items():
        for name, y in operators.items():
            record.add(f"{policy} {name} {place}", y, "ms per request", work.batch_size, "B")
            if policy == "sarathi" and name in LINEAR:
                less = ms["baseline"][name] / y
                record.add(f"reduction of {name} {place}", less, "x", work.batch_size, "B")


def predict(quick: bool) -> list[Point]:
    """Three batch sizes for each length, up to the largest that fits."""
    record = Record("fig10", MODEL, GPU)
    places = [
        (length, size, chunk_size)
        for length, largest in BATCH_SIZES.items()
        for size in (largest // 3, 2 * largest // 3, largest)
        for chunk_size in CHUNK_SIZES
    ]
    for length, size, chunk_size in progress(places, "predicting"):
        work, ms = balanced(length, size, chunk_size), {}
        for policy in POLICIES:
            run = (work.requests(5 * size), policy, chunk_size, size, MODEL, GPU)
            ms[policy] = per_request(steady.simulate_operators(*run), 2 * size, 4 * size)
        add_times(record, work, chunk_size, ms)
    points = list(record)
    for part, names in PARTS.items():
        starts = tuple(f"reduction of {name} " for name in names)
        found = [point.y for point in points if point.series.startswith(starts)]
        record.add(f"min reduction, {part}", min(found), "x")
        record.add(f"max reduction, {part}", max(found), "x")
    return record


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    """Both policies in alternation; medians of `repeats` turns."""
    record, (length,) = Record("fig10", *measuring.measured_on(llm)), scale.lengths
    places = [(size, chunk) for size in scale.batch_sizes for chunk in scale.chunk_sizes]
    measuring.warm_up(llm)
    for size, chunk_size in progress(places, "measuring"):
        work = balanced(length, size, chunk_size)
        seen: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        for policy in scale.repeats * POLICIES:
            trace = measuring.measured_trace(llm, work, policy, chunk_size, operators=True)
            seen[policy].append(per_request(trace, *steady.first_period(work, policy)))
        medians = {
            policy: {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
            for policy, turns in seen.items()
        }
        add_times(record, work, chunk_size, medians)
    return record


def draw_panel(axes: plt.Axes, found: dict[str, list[Point]], place: str, title: str) -> None:
    """Two stacked bars for each batch size; place: the series' "L=... C=..."."""
    sizes = [point.x for point in found[f"baseline attn {place}"]]
    for shift, policy, style in ((-0.2, "baseline", {}), (0.2, "sarathi", {"label": None})):
        places = [i + shift for i in range(len(sizes))]
        parts = {
            name: [point.y for point in found[f"{policy} {name} {place}"]]
            for name in look.OPERATOR_LOOKS
        }
        tops = look.stacked_bars(
            axes, places, parts, look.OPERATOR_LOOKS, 0.36, linewidth=0.8, **style
        )
        above = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 12}
        for x, top in zip(places, tops, strict=True):
            axes.text(x, top, f" {policy}", **above)
    axes.set_xticks(range(len(sizes)), [f"B = {size:g}" for size in sizes])
    axes.set_ylim(0, 1.35 * axes.dataLim.ymax)
    axes.set(ylabel="ms per request", title=title)


def draw(points: list[Point]) -> plt.Figure:
    predicted, measured = curves(points, "predicted"), curves(points, "measured")
    figure, grid = look.panels(2, 4 if measured else 3, 6, 5.75)
    for row, chunk_size in zip(grid, CHUNK_SIZES, strict=True):
        for axes, length in zip(row, BATCH_SIZES, strict=False):
            title = f"predicted: L = {length // 1024}K, C = {chunk_size}"
            draw_panel(axes, predicted, f"L={length} C={chunk_size}", title)
    start = "baseline attn "
    places = [series.removeprefix(start) for series in measured if series.startswith(start)]
    for row, place in zip(grid, places, strict=False):
        shape = "L = {L}, C = {C}".format(**series_options(place))
        draw_panel(row[3], measured, place, f"{look.measured_title(points)}\n{shape}")
    if measured:
        for row in grid[len(places) :]:
            row[3].set_axis_off()
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    paper, found = values(points, "paper"), values(points)
    least, most = "min reduction, ffn", "max reduction, ffn"
    figure.suptitle(
        f"SARATHI Fig 10: time by operator at a balanced P:D, {MODEL} on {GPU}\nffn: sarathi takes"
        f" {found[least]:.2f} to {found[most]:.2f} times less, predicted; paper {paper[least]:g} to"
        f" {paper[most]:g}",
    )
    return figure


FIGURE = Figure(
    name="fig10",
    description=__doc__,
    paper={
        "f10_linear": ("max reduction, linear operators", 0),
        "f10_ffn_low": ("min reduction, ffn", 0),
        "f10_ffn_high": ("max reduction, ffn", 0),
        "f10_proj_low": ("min reduction, preproj and postproj", 0),
        "f10_proj_high": ("max reduction, preproj and postproj", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(4, 8), chunk_sizes=(128, 256), repeats=3),
    quick_scale=Scale(lengths=(64,), batch_sizes=(3,), chunk_sizes=(16,), repeats=1),
    shown=lambda point: "reduction" in point.series,
)

main = FIGURE.main

if __name__ == "__main__":
    main()
