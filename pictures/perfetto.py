"""Write a run as Chrome trace JSON, which https://ui.perfetto.dev opens.

Zoom into single iterations there, and click for their arguments. Slices of one kind share a name,
such as "decode": the numbers stand in their arguments. So select an area there, and read how many
slices of each kind it has and how long they take. In its SQL:

    select name, count(*), sum(dur) / 1e6 as ms from slice group by name

    save(path, {"sarathi": trace})      runs as one file: the iterations and requests of each, its
                                        batch size and cached tokens over time
    save(..., about={"sarathi": ...})   the same, and what each run was (`About`)

`Tracks` knows only the format: lanes of slices, marks and counters, in seconds. It knows nothing of
serving. It writes times in whole microseconds, start and end both rounded down. So slices that
touch never overlap.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from command.cli import MARK, write_file
from pictures.lanes import request_lanes, stage_lanes
from pipeline import PipelineTrace
from timeline import Iteration, Trace

Lane = tuple[int, int]  # process id, thread id: what the format calls a group of lanes, and a lane


@dataclass(frozen=True, slots=True)
class About:
    """What a run was: beside the names of its groups of lanes, and in "otherData" of the file."""

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
        self.groups = 0
        self.lanes: dict[int, int] = {}  # lanes of each group
        self.runs: dict[str, dict] = {}  # what the runs were, by name

    def group(self, run: str, part: str, about: About | None = None) -> int:
        """A group of lanes, for a part of a run.

        Groups and lanes are shown in the order in which they are made.
        """
        self.groups += 1
        self.lanes[self.groups] = 0
        name = f"{run}: {part}"
        if about:
            name += f" ({about})"
            self.runs[run] = asdict(about)
        for event, args in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": self.groups}),
            ("process_labels", {"labels": str(about or "")}),
        ):
            self.names.append(
                {"ph": "M", "pid": self.groups, "tid": 0, "ts": 0, "name": event, "args": args}
            )
        return self.groups

    def lane(self, group: int, name: str) -> Lane:
        self.lanes[group] += 1
        lane = (group, self.lanes[group])
        for event, args in (
            ("thread_name", {"name": name}),
            ("thread_sort_index", {"sort_index": lane[1]}),
        ):
            self.names.append(
                {"ph": "M", "pid": group, "tid": lane[1], "ts": 0, "name": event, "args": args}
            )
        return lane

    def slice(self, lane: Lane, name: str, start: float, end: float, **args: object) -> None:
        """Something that lasts from `start` to `end`, in seconds. A click shows `args`."""
        begin = microseconds(start)
        self._add("X", lane, name, begin, args, dur=microseconds(end) - begin)

    def mark(self, lane: Lane, name: str, moment: float, **args: object) -> None:
        """Something that happens at one moment."""
        self._add("i", lane, name, microseconds(moment), args, s="t")

    def counter(self, group: int, name: str, moment: float, value: float) -> None:
        """A number that holds from `moment` on."""
        self._add("C", (group, 0), name, microseconds(moment), {name: value})

    def _add(
        self,
        phase: str,
        lane: Lane,
        name: str,
        moment: int,
        args: Mapping[str, object],
        **more: object,
    ) -> None:
        event = {"ph": phase, "pid": lane[0], "tid": lane[1], "ts": moment, "name": name, **more}
        self.events.append(event | {"args": dict(args)} if args else event)

    def save(self, path: Path | str) -> None:
        """Write the names first, then the events in order of time.

        If two begin at the same time, the longer one comes first: it contains the other.
        """
        events = sorted(self.events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        lines = ",\n".join(
            json.dumps(event, separators=(",", ":")) for event in self.names + events
        )
        other = json.dumps({"mark": MARK, "runs": self.runs}, separators=(",", ":"))
        head = f'{{"otherData":{other},"displayTimeUnit":"ms"'
        text = f'{head},"traceEvents":[\n{lines}\n]}}\n'
        write_file(path, text)


def microseconds(seconds: float) -> int:
    return int(seconds * 1e6)


def save(
    path: Path | str,
    runs: Mapping[str, Trace],
    names: Mapping[int, str] | None = None,
    bound: float | None = None,
    about: Mapping[str, About] | None = None,
) -> None:
    """Write runs, real or priced, to one file.

    runs, about: traces, and what they are, by the name of the run; names and bound: see
    `lanes.request_lanes`.
    """
    tracks = Tracks()
    for run, trace in runs.items():
        known = (about or {}).get(run)
        add_iterations(tracks, tracks.group(run, "engine", known), trace, names or {})
        add_requests(tracks, tracks.group(run, "requests", known), trace, names or {}, bound)
    tracks.save(path)


def add_iterations(tracks: Tracks, group: int, trace: Trace, names: Mapping[int, str]) -> None:
    """The engine's lane: a slice per iteration, and counters.

    If operators were timed, an iteration contains a slice for each operator.
    """
    lane = tracks.lane(group, "iterations")
    cached = cached_tokens(trace)
    for number, (iteration, tokens) in enumerate(zip(trace.iterations, cached, strict=True)):
        start, end = iteration.start, iteration.end
        tracks.slice(
            lane, iteration.kind, start, end, iteration=number, **details(iteration, names)
        )
        # An operator's seconds are summed over the layers: they say how long it took, not when.
        for operator, seconds in (iteration.operators or {}).items():
            tracks.slice(
                lane, operator, start, min(start + seconds, end), seconds_over_all_layers=seconds
            )
            start += seconds
        tracks.counter(
            group,
            "batch size (requests)",
            iteration.start,
            iteration.num_chunks + iteration.num_decodes,
        )
        tracks.counter(group, "cached tokens", end, tokens)
    if trace.iterations:
        tracks.counter(group, "batch size (requests)", end, 0)


def details(iteration: Iteration, names: Mapping[int, str]) -> dict[str, object]:
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


def cached_tokens(trace: Trace) -> list[int]:
    """Tokens in the KV cache after each iteration, of all requests together.

    What is cancelled after the last one counts as gone.
    """
    cached: dict[int, int] = {}
    ends = sorted((moment, own) for own, moment in trace.finished)
    gone = sorted((moment, own) for own, moment in [*trace.preempted, *trace.cancelled])
    ended, left, after = deque(ends), deque(gone), []
    last = trace.iterations[-1] if trace.iterations else None
    for iteration in trace.iterations:
        while left and left[0][0] <= iteration.start:
            cached.pop(left.popleft()[1], None)  # None: it was cancelled before it ran
        for request, first, tokens, _ in iteration.chunks:
            cached[request] = first + tokens
        for request in iteration.decodes:
            cached[request] += 1
        while ended and ended[0][0] <= iteration.end:
            cached.pop(ended.popleft()[1])
        while left and iteration is last:
            cached.pop(left.popleft()[1], None)
        after.append(sum(cached.values()))
    return after


def add_requests(
    tracks: Tracks, group: int, trace: Trace, names: Mapping[int, str], bound: float | None
) -> None:
    """A lane for each request: its waiting, its chunks, its decodes, its preemptions.

    A stall's slice contains the slices inside it.
    """
    for request, bars in request_lanes(trace, bound, names).items():
        lane = tracks.lane(group, request)
        for bar in bars:
            if bar.start == bar.end:
                tracks.mark(lane, bar.kind, bar.start)
            else:
                more = {"tokens": int(bar.label)} if bar.label else {}
                tracks.slice(lane, bar.kind, bar.start, bar.end, **more)


def add_phases(tracks: Tracks, group: int, trace: PipelineTrace) -> None:
    """TD-Pipe's phases, and the tokens in memory at each batch."""
    if not trace.history:
        return
    lane = tracks.lane(group, "phases")
    begins = [(now, phase) for now, _, phase in trace.history]
    switches = begins[:1] + [now for before, now in pairwise(begins) if now[1] != before[1]]
    for (start, phase), (end, _) in pairwise([*switches, (trace.end, "")]):
        tracks.slice(lane, f"{phase} phase", start, end)
    for moment, taken, _ in trace.history:
        tracks.counter(group, "tokens in memory", moment, taken)


def save_stages(
    path: Path | str,
    runs: Mapping[str, PipelineTrace],
    names: Mapping[int, str] | None = None,
    about: Mapping[str, About] | None = None,
) -> None:
    """Write pipelines to one file. The parameters are those of `save`.

    It holds the stages of each, with steps and idle intervals, and its requests, from the first
    stage to the last.
    """
    tracks = Tracks()
    for run, trace in runs.items():
        known = (about or {}).get(run)
        group = tracks.group(run, "stages", known)
        add_phases(tracks, group, trace)
        for stage, bars in stage_lanes(trace, names).items():
            lane = tracks.lane(group, stage)
            for bar in bars:
                work = bar.kind in ("prefill", "hybrid", "decode")
                more = {"requests": bar.label} if work else {}
                tracks.slice(lane, bar.kind, bar.start, bar.end, **more)
        add_requests(
            tracks, tracks.group(run, "requests", known), trace.requests, names or {}, None
        )
    tracks.save(path)
