"""The Gantt picture shows what a trace says: a bar for each chunk and decode, at its time, in its
request's lane.
"""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from batch import Request
from more.apart.simulate import simulate_fleet
from more.pictures.gantt import LOOKS, Bar, draw_lanes, legend_handles
from more.pictures.lanes import MOST_NAMED, engine_lanes, request_lanes, step_label
from more.simulate import simulate

MANY = MOST_NAMED + 1  # requests


@pytest.fixture(autouse=True)
def no_window() -> None:
    plt.switch_backend("Agg")
    yield
    plt.close("all")


def boxes(axes: plt.Axes, kind: str) -> list[tuple[int, float, float]]:
    """(lane, start, end) of the bars of a kind, told by their colour."""
    found = []
    for collection in axes.collections:
        colours = [to_hex(colour).upper() for colour in collection.get_facecolor()[:1]]
        if colours == [LOOKS[kind].colour.upper()]:
            corners = [path.get_extents() for path in collection.get_paths()]
            found += [(int(corner.y0 + 0.01), corner.x0, corner.x1) for corner in corners]
    return sorted(found)


def test_priced_run() -> None:
    work = [Request(i, range(300), 12, arrival=0.1 * i) for i in range(4)]
    trace = simulate(work, policy="vllm_v0", max_batch_size=4, cache_tokens=930)
    axes = plt.subplots()[1]
    lanes = request_lanes(trace, 0.15, dict(enumerate("ABCD")))
    draw_lanes(axes, lanes)
    ran = [(each, each.start, each.start + each.seconds) for each in trace.iterations]
    chunks = [(chunk[0], *time) for each, *time in ran for chunk in each.chunks]
    decodes = [(request, *time) for each, *time in ran for request in each.decodes]
    for kind, expected in ("prefill", chunks), ("decode", decodes):
        assert boxes(axes, kind) == [pytest.approx(bar) for bar in sorted(expected)]
    assert [label.get_text() for label in axes.get_yticklabels()] == list("ABCD")
    assert len(boxes(axes, "stall")) == len(trace.stalls(0.15)) > 0
    crosses = [line for line in axes.lines if line.get_marker() == "X"]
    assert sum(len(line.get_xdata()) for line in crosses) == len(trace.preempted) > 0
    meanings = [look.meaning for look in LOOKS.values()]
    assert [handle.get_label() for handle in legend_handles([lanes])] == meanings


@pytest.mark.parametrize(("count", "label"), [(2, "0d 1d"), (MANY, f"{MANY} decodes")])
def test_a_step_names_few_requests_and_counts_many(count: int, label: str) -> None:
    work = [Request(i, range(9), 3) for i in range(count)]
    trace = simulate(work, policy="orca", max_batch_size=count)
    assert step_label(trace.iterations[-1], {}) == label


def test_labels_only_where_there_is_room() -> None:
    """And bars that cross the edge of a window are there. A sliver is not in the legend."""
    _, axes = plt.subplots(figsize=(8, 2))
    bars = [Bar(0, 5, "prefill", "512"), Bar(5, 5.01, "prefill", "7"), Bar(6, 6.01, "decode")]
    (legend,) = legend_handles([draw_lanes(axes, {"a": bars, "b": []}, start=1, end=10)])
    assert legend.get_label() == LOOKS["prefill"].meaning
    assert [text.get_text() for text in axes.texts] == ["512"]
    assert boxes(axes, "prefill") == [(0, 0, 5), (0, 5, pytest.approx(5.01))]


def test_a_lane_for_each_engine_and_one_for_the_link() -> None:
    requests = [Request(i, range(900), 4, arrival=0.01 * i) for i in range(3)]
    options = {"chunk_size": 512, "software": "vllm", "keep": True}
    for layout, names in (("2", 2), ("1p1d", 3)):
        trace = simulate_fleet([*requests], layout=layout, **options)
        lanes = engine_lanes(trace, layout, dict(enumerate("ABC")))
        assert len(lanes) == names and list(lanes)[-1].endswith(" 1")
        bars = [bar for name, lane in lanes.items() if name != "link" for bar in lane]
        ran = [(each.start, each.seconds) for own in trace.engines for each in own.iterations]
        assert [(bar.start, bar.end) for bar in bars] == [(t, t + s) for t, s in ran]
        requests = [Request(i, range(900), 4, arrival=0.01 * i) for i in range(3)]
    assert [bar.label for bar in lanes["link"]] == ["A", "B", "C"]
    assert {bar.kind for bar in lanes["prefill 0"]} == {"prefill"}
    assert {bar.kind for bar in lanes["decode 1"]} == {"decode"}
