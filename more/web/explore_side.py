"""One schedule of the explorer as plain data: bars by slot, stalls, the queue, numbers, sentences.

A run has given the `Trace`; this file only puts it into the form that the page draws. To understand
schedules, you may skip it. Times are in seconds, lengths in tokens. It needs the
standard library alone.
"""

import statistics
from collections import deque
from collections.abc import Sequence

from more.serving.search import percentile
from more.web.explore_state import State
from more.web.lanes import Lanes
from timeline import Trace


def side(state: State, policy: str, trace: Trace, bound: float) -> dict:
    """One schedule, in the words of the live page (more/web/static/schedule.js).

    iterations: {"t": start, "end", "seconds"} and `Lanes.rows`, as in the events of the live page;
    a request's lane is its slot. places: {"id", "lane", "from", "to"} of each request in its slot;
    `label`, too, for the long prompt. stalls: the same of each gap that is too long, in the lane of
    the late token. queue: [moment, requests that wait from then on].
    """
    iterations, places = in_slots(trace)
    stalls = trace.stalls(bound)
    if state.long:
        places[state.n]["label"] = "long prompt"
    return {
        "policy": policy,
        "iterations": iterations,
        "places": list(places.values()),
        "stalls": [
            {"id": request, "lane": places[request]["lane"], "from": start, "to": start + seconds}
            for request, start, seconds in stalls
        ],
        "queue": queue(trace),
        "numbers": numbers(trace, stalls),
        "says": says(state, trace, stalls, bound),
    }


def in_slots(trace: Trace) -> tuple[list[dict], dict[int, dict]]:
    """Iterations by slot, and the place of each request."""
    iterations = []
    places = {}
    lanes = Lanes()
    leaving = deque(sorted(trace.finished, key=lambda leave: leave[1]))
    for iteration in trace.iterations:
        start = iteration.start
        while leaving and leaving[0][1] <= start:
            lanes.leave(leaving.popleft()[0])
        rows = lanes.rows(iteration.chunks, iteration.decodes)
        for request, lane, *_ in rows["chunks"]:
            place = {"id": request, "lane": lane, "from": start}
            places.setdefault(request, place | {"to": trace.lives[request].finished})
        times = {"t": start, "end": iteration.end, "seconds": iteration.seconds}
        iterations.append(times | rows)
    return iterations, places


def queue(trace: Trace) -> list[list]:
    """How many requests wait for a slot: [moment, how many from then on]."""
    changes = [(life.arrival, 1) for life in trace.lives.values()]
    changes += [(life.scheduled, -1) for life in trace.lives.values()]
    found = {}
    waiting = 0
    for moment, change in sorted(changes):
        waiting += change
        found[moment] = waiting
    return [[moment, waiting] for moment, waiting in found.items()]


def numbers(trace: Trace, stalls: Sequence[tuple[int, float, float]]) -> dict:
    """What stands beside a schedule, by the names of NUMBERS."""
    ttfts = trace.ttfts
    tbts = trace.tbts
    return {
        "throughput": trace.throughput,
        "ttft_median": statistics.median(ttfts),
        "ttft_p99": percentile(ttfts, 99),
        "tbt_p99": percentile(tbts, 99),
        "longest_stall": max([seconds for _, _, seconds in stalls], default=None),
        "mean_batch": trace.mean_batch_size,
        "seconds": trace.seconds,
    }


def says(
    state: State, trace: Trace, stalls: Sequence[tuple[int, float, float]], bound: float
) -> list[str]:
    """What is seen, in two or three short sentences."""
    found = []
    if stalls:
        request, start, seconds = max(stalls, key=lambda stall: stall[2])
        tokens = prompt_tokens(trace, start, start + seconds)
        why = f"while {tokens:,} prompt tokens run" if tokens else "and no prompt runs"
        stalled = len({request for request, _, _ in stalls})
        found += [
            f"Longest stall {spoken(seconds)}: {called(state, request)} gets no token {why}.",
            f"{stalled} of {len(trace.lives)} requests stall.",
        ]
    else:
        longest = spoken(max(trace.tbts))
        found.append(f"No stall: the longest time between two tokens is {longest}.")
    last = max(trace.lives.values(), key=lambda life: life.ttft)
    found.append(
        f"The longest wait for a first token is {spoken(last.ttft)}:"
        f" {called(state, last.request_id)} ({last.prompt_tokens:,} prompt tokens)."
    )
    return found


def prompt_tokens(trace: Trace, start: float, end: float) -> int:
    """Prompt tokens that run between two moments."""
    inside = [each for each in trace.iterations if start < each.start + each.seconds / 2 < end]
    return sum(each.num_prefill_tokens for each in inside)


def called(state: State, request: int) -> str:
    return "the long prompt" if state.long and request == state.n else f"request {request}"


def spoken(seconds: float) -> str:
    """1.24 s, or 87 ms."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
