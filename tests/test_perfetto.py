"""Trace files are what ui.perfetto.dev reads: known phases, whole microseconds, names, slices that
nest; and they say what the run did.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from shared import ran

import generate
from batch import Request
from command.cli import is_ours
from experiments.lib.engines import Priced
from more.pictures import perfetto
from more.simulate import simulate

WITH_DIGITS = {"ffn_ln1", "ffn_ln2", "PB1", "PB2", "PB3"}  # names of one kind each
# beside ph, pid, tid, ts and name, by phase
NEEDED = {"X": {"dur"}, "M": {"args"}, "C": {"args"}, "i": {"s"}}


def five() -> list[Request]:
    return [Request(i, range(60 + 20 * i), 30 + i, arrival=0.03 * i) for i in range(5)]


def events_of(path: Path) -> list[dict]:
    """The events of a file, once its format is checked.

    Every slice is complete (X, with its duration): no begin (B) can lose its end (E). Numbers stand
    in arguments, not in names: slices of one kind can be added up.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] == "ms" and is_ours(path)
    events = document["traceEvents"]
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} | NEEDED[event["ph"]] <= set(event)
        numbers = [event[key] for key in ("pid", "tid", "ts")]
        assert event["name"] and all(isinstance(n, int) and n >= 0 for n in numbers)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    timed = [event for event in events if event["ph"] != "M"]
    assert events == [event for event in events if event["ph"] == "M"] + timed, "names come first"
    assert all(before["ts"] <= after["ts"] for before, after in pairwise(timed)), "sorted by time"
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    for pid, tid in map(lane_of, timed):
        assert ("process_name", pid, 0) in named
        assert tid == 0 or ("thread_name", pid, tid) in named
    check_nesting(timed)
    names = {event["name"] for event in timed}
    assert not [name for name in names - WITH_DIGITS if re.search(r"\d", name)]
    assert {event["ph"] for event in timed} <= {"X", "C", "i"}
    return events


def lane_of(event: dict) -> tuple[int, int]:
    return event["pid"], event["tid"]


def slices(events: list[dict], lane: tuple[int, int] | None = None) -> list[dict]:
    """Of a lane, or of all."""
    return [each for each in events if each["ph"] == "X" and lane in (None, lane_of(each))]


def check_nesting(events: list[dict]) -> None:
    """On each lane, a slice lies after the one before it or inside it: Perfetto drops those that
    cross.
    """
    open_until: dict[tuple[int, int], list[int]] = {}
    for event in slices(events):
        ends = open_until.setdefault(lane_of(event), [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert event["dur"] >= 0 and (not ends or end <= ends[-1]), event
        ends.append(end)


def named(events: list[dict], kind: str) -> dict[str, tuple[int, int]]:
    return {each["args"]["name"]: lane_of(each) for each in events if each["name"] == kind}


def groups_of(events: list[dict]) -> list[str]:
    """Names of the groups of lanes, without what their runs are."""
    return [name.split(" (")[0] for name in named(events, "process_name")]


@pytest.mark.parametrize("policy", ["sarathi_serve", "vllm_v0", "no_evict"])
def test_priced_run_with_preemptions(policy: str, tmp_path: Path) -> None:
    trace = simulate(five(), policy=policy, chunk_size=64, max_batch_size=4, cache_tokens=300)
    assert bool(trace.preempted) == (policy != "no_evict")
    about = {policy: perfetto.About("predicted", "llama-13b", "a6000", policy, 64)}
    perfetto.save(tmp_path / "run.json", {policy: trace}, about=about)
    events = events_of(tmp_path / "run.json")
    groups = named(events, "process_name")
    lanes = named(events, "thread_name")
    told = f"(predicted: llama-13b on a6000, {policy}, C = 64)"
    assert list(groups) == [f"{policy}: engine {told}", f"{policy}: requests {told}"]
    assert list(lanes) == ["iterations"] + [f"request {i}" for i in range(5)]

    iterations = slices(events, lanes["iterations"])
    assert [event["name"] for event in iterations] == [each.kind for each in trace.iterations]
    for event, iteration in zip(iterations, trace.iterations, strict=True):
        assert event["args"]["tokens"] == iteration.num_prefill_tokens + iteration.num_decodes
        microseconds = [1e6 * iteration.start, 1e6 * iteration.seconds]
        assert [event["ts"], event["dur"]] == pytest.approx(microseconds, abs=1)
    assert sum(event["name"] == "preemption" for event in events) == len(trace.preempted)
    requests = [event for event in events if event["pid"] == 2]
    assert sum(event["name"] == "decode" for event in requests) == trace.num_decodes
    chunks = [event["args"]["tokens"] for event in requests if event["name"] == "prefill"]
    assert sum(chunks) == trace.num_prefill_tokens, "slices of one kind can be added up"


def test_operators_nest_in_their_iteration(tmp_path: Path) -> None:
    engine = Priced("llama-13b", "a6000")
    trace = engine.trace(five(), "sarathi_serve", 64, 4, operators=True)
    perfetto.save(tmp_path / "run.json", {"priced": trace}, names={0: "A"})
    events = events_of(tmp_path / "run.json")
    lanes = named(events, "thread_name")
    assert "A" in lanes and "request 1" in lanes
    inside = slices(events, lanes["iterations"])
    assert len(inside) == 7 * len(trace.iterations)
    assert [event["name"] for event in inside[:2]] == ["prefill", "preproj"]
    assert inside[0]["args"]["chunks"] == "A: 0 to 59"


def test_generate_writes_a_trace(tmp_path: Path) -> None:
    words = ["The list", "def open(", "--max-tokens", "4", "--device", "cpu"]
    ran(generate, *words, "--policy", "vllm_v0", "--perfetto", tmp_path / "run.json")
    events = events_of(tmp_path / "run.json")
    assert any(event["name"] == "attn" for event in events)
    engine, requests = named(events, "process_name")
    about = r" \(measured: demo on .* cores.*, vllm_v0, C = 64\)"
    assert re.fullmatch(f"vllm_v0: engine{about}", engine)
    assert re.fullmatch(f"vllm_v0: requests{about}", requests)
