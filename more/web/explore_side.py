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
    """One schedule.

    iterations: {"t": start, "seconds"} and `Lanes.rows`, as in the events of the live page; a
    request's lane is its slot. waits: [slot, from, to], where a request holds a slot and is in no
    batch. stalls: [slot of the late token, from, to, request]. queue: [moment, requests that wait
    from then on].
    """
    iterations, waits, slots = in_slots(trace)
    stalls = trace.stalls(bound)
    return {
        "policy": policy,
        "slots": 1 + max(slot for slot, _ in slots.values()),
        "iterations": iterations,
        "waits": waits,
        "stalls": [
            [slots[request][0], start, start + seconds, request]
            for request, start, seconds in stalls
        ],
        "queue": queue(trace, slots),
        "numbers": numbers(trace, stalls),
        "says": says(state, trace, stalls, bound),
    }


def in_slots(trace: Trace) -> tuple[list, list, dict[int, tuple[int, float]]]:
    """Iterations and waits by slot, and the slot of each request: (slot, from when)."""
    iterations, waits, lanes = [], [], Lanes()
    slots: dict[int, tuple[int, float]] = {}
    until: dict[int, float] = {}  # request -> the end of its last bar
    leaving = deque(sorted(trace.finished, key=lambda leave: leave[1]))
    for iteration in trace.iterations:
        start, seconds = iteration.start, iteration.seconds
        while leaving and leaving[0][1] <= start:
            lanes.leave(leaving.popleft()[0])
        rows = lanes.rows(iteration.chunks, iteration.decodes)
        for request, slot, *_ in rows["chunks"] + rows["decodes"]:
            slots.setdefault(request, (slot, start))
            if until.setdefault(request, start) < start:
                waits.append([slot, until[request], start])
            until[request] = start + seconds
        iterations.append({"t": start, "seconds": seconds, **rows})
    return iterations, waits, slots


def queue(trace: Trace, slots: dict[int, tuple[int, float]]) -> list[list]:
    """How many requests wait for a slot: [moment, how many from then on]."""
    changes = [(life.arrival, 1) for life in trace.lives.values()]
    changes += [(since, -1) for _, since in slots.values()]
    found, waiting = {}, 0
    for moment, change in sorted(changes):
        waiting += change
        found[moment] = waiting
    return [[moment, waiting] for moment, waiting in found.items()]


def numbers(trace: Trace, stalls: Sequence[tuple[int, float, float]]) -> dict:
    """What stands beside a schedule, by the names of NUMBERS."""
    ttfts, tbts = trace.ttfts, trace.tbts
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
