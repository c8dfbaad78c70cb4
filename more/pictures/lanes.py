"""A run as lanes of bars over time, one for each request, stage of a pipeline, or engine.

gantt.py draws lanes, and perfetto.py writes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from more.apart.simulate import FleetTrace, read_layout
from more.pipeline import PipelineTrace
from timeline import Iteration, Trace

MOST_NAMED = 8  # requests of a step


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in a lane, from `start` to `end` in seconds. If both are the same, it is a mark.

    label: a word on it, such as the tokens of a chunk.
    """

    start: float
    end: float
    # requests: arrival, waiting, prefill, decode, stall, preemption; stages: prefill, hybrid,
    # decode, or why it is idle
    kind: str
    label: str = ""


def request_lanes(
    trace: Trace, bound: float | None = None, names: Mapping[int, str] | None = None
) -> dict[str, list[Bar]]:
    """One lane per request, by its name, in order of arrival.

    The bars of a lane are in order of time. A stall comes before the bars inside it.

    bound: in seconds; longer gaps between two tokens are marked as stalls. names: request id ->
    name; a request without one is called "request 7".
    """
    lives = sorted(trace.lives.values(), key=lambda life: (life.arrival, life.request_id))
    bars: dict[int, list[Bar]] = {life.request_id: [] for life in lives}
    for iteration in trace.iterations:
        start = iteration.start
        end = iteration.end
        for request_id, _, tokens, _ in iteration.chunks:
            bars[request_id].append(Bar(start, end, "prefill", str(tokens)))
        for request_id in iteration.decodes:
            bars[request_id].append(Bar(start, end, "decode"))
    for request_id, moment in trace.preempted:
        again = min((bar.start for bar in bars[request_id] if bar.start >= moment), default=moment)
        bars[request_id] += [Bar(moment, again, "waiting"), Bar(moment, moment, "preemption")]
    for life in lives:
        bars[life.request_id] += [
            Bar(life.arrival, life.scheduled, "waiting"),
            Bar(life.arrival, life.arrival, "arrival"),
        ]
    for request_id, start, seconds in [] if bound is None else trace.stalls(bound):
        bars[request_id].append(Bar(start, start + seconds, "stall"))
    for lane in bars.values():
        lane.sort(key=lambda bar: (bar.start, -bar.end))
    return {
        (names or {}).get(life.request_id, f"request {life.request_id}"): bars[life.request_id]
        for life in lives
    }


def stage_lanes(
    trace: PipelineTrace, names: Mapping[int, str] | None = None
) -> dict[str, list[Bar]]:
    """One lane per stage: its steps, and between them its idle intervals with their cause.

    The trace must have kept its steps. A step's label names its requests, as the paper's Fig 5
    does: Ap is A's prefill (or a chunk of it), Ad a decode. Large batches say how many they have.
    names: see `request_lanes`.
    """
    lanes: dict[str, list[Bar]] = {f"stage {stage}": [] for stage in range(len(trace.busy))}
    for step, iteration in zip(trace.steps, trace.requests.iterations, strict=True):
        label = step_label(iteration, names or {})
        for stage, lane in enumerate(lanes.values()):
            start = step.starts[stage]
            wait = step.waits[stage]
            cause = step.causes[stage]
            if wait > 0:
                lane.append(Bar(start - wait, start, cause, cause))
            lane.append(Bar(start, start + step.seconds[stage], step.kind, label))
    for last, lane in zip(trace.last, lanes.values(), strict=True):
        if last < trace.end:
            lane.append(Bar(last, trace.end, "drain", "drain"))
    return lanes


def engine_lanes(
    trace: FleetTrace, layout: str, names: Mapping[int, str] | None = None
) -> dict[str, list[Bar]]:
    """One lane per engine, with its iterations; before the decode engines, one for the fetches.

    The trace must have kept them. layout: as in `simulate_fleet`. names: see `request_lanes`.
    """
    _, prefills, decodes = read_layout(layout)
    names = names or {}
    lanes = {}
    for number, engine in enumerate(trace.engines):
        kind = "engine"
        if decodes:
            kind = "prefill" if number < prefills else "decode"
        if decodes and number == prefills:
            lanes["link"] = [
                Bar(each.start, each.end, "fetch", names.get(each.request_id, ""))
                for each in trace.fetches
            ]
        lane = []
        for each in engine.iterations:
            bar = Bar(each.start, each.end, each.kind, step_label(each, names))
            # what begins on a decode engine is one row: a decode, to all but its scheduler
            if kind == "decode" and each.num_prefill_tokens <= each.num_chunks:
                bar = Bar(each.start, each.end, "decode")
            lane.append(bar)
        lanes[f"{kind} {number}"] = lane
    return lanes


def step_label(iteration: Iteration, names: Mapping[int, str]) -> str:
    """The names of its requests; if there are many, only how many there are."""
    if iteration.num_chunks + iteration.num_decodes > MOST_NAMED:
        counts = {"prefill": iteration.num_chunks, "decode": iteration.num_decodes}
        said = [f"1 {what}" if n == 1 else f"{n} {what}s" for what, n in counts.items() if n]
        return " + ".join(said)
    chunks = [f"{names.get(request, request)}p" for request, *_ in iteration.chunks]
    return " ".join(chunks + [f"{names.get(request, request)}d" for request in iteration.decodes])
