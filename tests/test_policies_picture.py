"""experiments/policies.py: the picture's story holds, predicted and for real, and its files are
what they should be.
"""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from conftest import ran

from experiments import policies
from experiments.lib.rows import read_rows
from scheduler import POLICIES


@pytest.fixture(scope="module")
def predicted() -> policies.Comparison:
    return policies.predict()


def test_who_waits_and_who_stalls(predicted: policies.Comparison) -> None:
    found = {policy: policies.figures_of(trace) for policy, trace in predicted.traces.items()}
    assert list(found) == list(POLICIES)
    for policy, trace in predicted.traces.items():
        end = max(trace.lives[i].tokens[-1] for i in range(2))  # of A and B
        beside = [each for each in trace.iterations if each.start < end]
        longest = max(each.num_prefill_tokens + each.num_decodes for each in beside)
        if policy == "prefill_first":  # the counterexample: no iteration is long, and they stall
            assert longest <= policies.CHUNK_SIZE and trace.stalls(predicted.bound)
            continue
        assert bool(trace.stalls(predicted.bound)) == (longest > policies.CHUNK_SIZE), (
            f"{policy}: A and B stall where an iteration beside them exceeds the budget, and only"
            f" there; the longest has {longest} tokens of {policies.CHUNK_SIZE}"
        )
    longest = {policy: numbers["longest gap of A and B"] for policy, numbers in found.items()}
    assert (
        min(longest["orca"], longest["vllm_v0"], longest["prefill_first"])
        > longest["hybrid_only"]
        > longest["chunked_only"]
        > longest["sarathi_serve"]
    )
    assert found["request_level"]["TTFT of C"] == max(
        numbers["TTFT of C"] for numbers in found.values()
    )
    # D's first chunk rides with C's last one
    assert found["sarathi_serve"]["TTFT of D"] < found["sarathi"]["TTFT of D"]


def test_c_and_d_arrive_while_a_and_b_decode(predicted: policies.Comparison) -> None:
    for trace in predicted.traces.values():
        lives = [trace.lives[i] for i in range(4)]
        assert [life.arrival for life in lives] == [0, 0, predicted.arrival, predicted.arrival]
        assert all(
            4 <= sum(token < predicted.arrival for token in life.tokens) < len(life.tokens)
            for life in lives[:2]
        )
    work = sum(
        len(request.prompt) + request.max_tokens
        for request in policies.workload(policies.CHUNK_SIZE)
    )
    assert {
        trace.num_prefill_tokens + trace.num_decodes + 4 for trace in predicted.traces.values()
    } == {work}


@pytest.mark.parametrize("number", [1, 9])
def test_each_column_has_a_time_axis(predicted: policies.Comparison, number: int) -> None:
    """However many policies there are: a user's own ones stand in the right column."""
    every = list(predicted.traces.items())
    traces = {f"{name} {i // 8}" if i > 7 else name: trace for i in range(number)
              for name, trace in [every[i % 8]]}  # fmt: skip
    figure = policies.draw(replace(predicted, traces=traces))
    figure.canvas.draw()
    panels = [axes for axes in figure.axes if axes.axison]
    assert {axes.get_title("left") for axes in panels} == traces.keys()
    for left in {axes.get_position().x0 for axes in panels}:
        column = [axes for axes in panels if axes.get_position().x0 == left]
        named = [axes for axes in column if axes.get_xlabel()]
        assert named == [min(column, key=lambda axes: axes.get_position().y0)]
        assert any(tick.label1.get_visible() for tick in named[0].xaxis.get_major_ticks())
    plt.close(figure)


@pytest.mark.slow
def test_files_and_measured_rows(small: str, tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    measure = ["--measure", "--device", "cpu", "--dtype", "float32", "--model", small]
    measure += ["--chunk-size", "16", "--perfetto", str(trace)]
    ran(policies, "--quick", "--out", tmp_path, *measure)
    for name in ("policies.png", "policies_measured.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    told = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert "orca: engine (predicted: llama-13b on a6000, orca, C = 512)" in told
    groups = {name.split(" (")[0] for name in told}
    assert groups == {
        f"{what}{policy}: {part}"
        for what in ("", "measured ")
        for policy in POLICIES
        for part in ("engine", "requests")
    }
    rows = read_rows(tmp_path / "policies.csv")
    for source in ("predicted", "measured"):
        own = rows.where(source=source)
        assert own.where("stalls", "total").column("policy") == list(POLICIES)
        assert len(own) == len(POLICIES) + 1 and own[-1].keys() >= {"C and D arrive", "stall bound"}
    ran(policies, "--quick", "--out", tmp_path)
    assert read_rows(tmp_path / "policies.csv") == rows, "measured rows stay"
