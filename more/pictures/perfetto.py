"""Write a run as Chrome trace JSON, which https://ui.perfetto.dev opens.

Zoom into single iterations there, and click for their arguments. Slices of one kind share a name,
such as "decode": the numbers stand in their arguments. So select an area there, and read how many
slices of each kind it has and how long they take. In its SQL:

    select name, count(*), sum(dur) / 1e6 as ms from slice group by name

`Tracks` knows only the format: lanes of slices, marks and counters, in seconds. It writes times in
whole microseconds, start and end both rounded down. So slices that touch never overlap.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from command.cli import MARK, write_file
from more.pictures.lanes import Bar, request_lanes, stage_lanes
from more.pipeline import PipelineTrace
from timeline import Iteration, Trace

Lane = tuple[int, int]  # process id, thread id: what the format calls a group of lanes, and a lane
Names = Mapping[int, str]
BATCH = "batch size (requests)"


class About(NamedTuple):
    """What a run was: it stands beside the names of its groups of lanes."""

    source: str  # predicted or measured
    model: str
    hardware: str  # GPU and how many, or the machine
    policy: str
    chunk_size: int | None = None  # C, tokens; None: there is none, as for td_pipe

    def __str__(self) -> str:
        size = "" if self.chunk_size is None else f", C = {self.chunk_size}"
        return f"{self.source}: {self.model} on {self.hardware}, {self.policy}{size}"


class Tracks:
    """Events of the Chrome trace format, by lane.

    On one lane, a slice inside another one is drawn below it. So the inner one must not be longer.
    """

    def __init__(self) -> None:
        self.names: list[dict] = []
        self.events: list[dict] = []
        self.lanes: dict[int, int] = {}  # lanes of each group

    def group(self, name: str, about: About | None = None) -> int:
        """A group of lanes. Groups and lanes are shown in the order in which they are made."""
        group = len(self.lanes) + 1
        self.lanes[group] = 0
        self._name("process", (group, 0), f"{name} ({about})" if about else name, group)
        return group

    def lane(self, group: int, name: str) -> Lane:
        self.lanes[group] += 1
        lane = (group, self.lanes[group])
        self._name("thread", lane, name, lane[1])
        return lane

    def slice(self, lane: Lane, name: str, start: float, end: float, **args: object) -> None:
        """Something that lasts from `start` to `end`, in seconds. A click shows `args`."""
        begin = microseconds(start)
        self._add("X", lane, name, begin, args, dur=microseconds(end) - begin)

    def mark(self, lane: Lane, name: str, moment: float) -> None:
        """Something that happens at one moment."""
        self._add("i", lane, name, microseconds(moment), {}, s="t")

    def counter(self, group: int, name: str, moment: float, value: float) -> None:
        """A number that holds from `moment` on."""
        self._add("C", (group, 0), name, microseconds(moment), {name: value})

    def _name(self, kind: str, lane: Lane, name: str, place: int) -> None:
        head = {"ph": "M", "pid": lane[0], "tid": lane[1], "ts": 0}
        self.names += [
            head | {"name": f"{kind}_name", "args": {"name": name}},
            head | {"name": f"{kind}_sort_index", "args": {"sort_index": place}},
        ]

    def _add(
        self, phase: str, lane: Lane, name: str, moment: int, args: dict, **more: object
    ) -> None:
        event = {"ph": phase, "pid": lane[0], "tid": lane[1], "ts": moment, "name": name, **more}
        self.events.append(event | {"args": args} if args else event)

    def save(self, path: Path | str) -> None:
        """Write the names first, then the events in order of time.

        If two begin at the same time, the longer one comes first: it contains the other.
        """
        events = sorted(self.events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        lines = [json.dumps(event, separators=(",", ":")) for event in self.names + events]
        head = f'{{"otherData":{{"mark":"{MARK}"}},"displayTimeUnit":"ms","traceEvents":[\n'
        write_file(path, head + ",\n".join(lines) + "\n]}\n")


def microseconds(seconds: float) -> int:
    return int(seconds * 1e6)


def save(
    path: Path | str,
    runs: Mapping[str, Trace],
    names: Names | None = None,
    about: Mapping[str, About] | None = None,
) -> None:
    """Write runs, real or priced, to one file: the iterations and requests of each.

    runs, about: traces, and what they are, by the name of the run; names: see
    `lanes.request_lanes`.
    """
    tracks = Tracks()
    names = names or {}
    for run, trace in runs.items():
        known = (about or {}).get(run)
        add_iterations(tracks, tracks.group(f"{run}: engine", known), trace, names)
        add_requests(tracks, tracks.group(f"{run}: requests", known), trace, names)
    tracks.save(path)


def save_stages(
    path: Path | str,
    runs: Mapping[str, PipelineTrace],
    names: Names | None = None,
    about: Mapping[str, About] | None = None,
) -> None:
    """Write pipelines to one file. The parameters are those of `save`.

    It holds the stages of each, with steps and idle intervals, and its requests, from the first
    stage to the last.
    """
    tracks = Tracks()
    names = names or {}
    for run, trace in runs.items():
        known = (about or {}).get(run)
        group = tracks.group(f"{run}: stages", known)
        for stage, bars in stage_lanes(trace, names).items():
            lane = tracks.lane(group, stage)
            for bar in bars:
                work = bar.kind in ("prefill", "hybrid", "decode")
                add_bar(tracks, lane, bar, {"requests": bar.label} if work else {})
        add_requests(tracks, tracks.group(f"{run}: requests", known), trace.requests, names)
    tracks.save(path)


def add_iterations(tracks: Tracks, group: int, trace: Trace, names: Names) -> None:
    """The engine's lane: a slice per iteration, and the batch size.

    If operators were timed, an iteration contains a slice for each operator.
    """
    lane = tracks.lane(group, "iterations")
    end = 0.0
    for number, each in enumerate(trace.iterations):
        start = each.start
        end = each.end
        tracks.slice(lane, each.kind, start, end, iteration=number, **details(each, names))
        tracks.counter(group, BATCH, start, each.num_chunks + each.num_decodes)
        # An operator's seconds are summed over the layers: they say how long it took, not when.
        for operator, seconds in (each.operators or {}).items():
            until = min(start + seconds, end)
            tracks.slice(lane, operator, start, until, seconds_over_all_layers=seconds)
            start += seconds
    tracks.counter(group, BATCH, end, 0)


def details(iteration: Iteration, names: Names) -> dict[str, object]:
    """What a click on an iteration shows."""
    chunks = [
        f"{names.get(request, f'request {request}')}: {first} to {first + tokens - 1}"
        for request, first, tokens, _ in iteration.chunks
    ]
    return {
        "tokens": iteration.num_prefill_tokens + iteration.num_decodes,
        "prefill_tokens": iteration.num_prefill_tokens,
        "decodes": iteration.num_decodes,
        "chunks": ", ".join(chunks) or "none",
    }


def add_requests(tracks: Tracks, group: int, trace: Trace, names: Names) -> None:
    """A lane for each request: its waiting, its chunks, its decodes, its preemptions."""
    for request, bars in request_lanes(trace, None, names).items():
        lane = tracks.lane(group, request)
        for bar in bars:
            add_bar(tracks, lane, bar, {"tokens": int(bar.label)} if bar.label else {})


def add_bar(tracks: Tracks, lane: Lane, bar: Bar, args: dict[str, object]) -> None:
    if bar.start == bar.end:
        tracks.mark(lane, bar.kind, bar.start)
    else:
        tracks.slice(lane, bar.kind, bar.start, bar.end, **args)
