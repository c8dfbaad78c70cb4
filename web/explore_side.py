"""One schedule of the explorer as plain data: bars by slot, stalls, the queue, numbers, sentences.

A run has given the `Trace`; this file only puts it into the form that the page draws. To understand
schedules, you may skip it. Times are in seconds, lengths in tokens. It needs the
standard library alone.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from apart.fleet import Fetch
from apart.simulate import FleetTrace
from serving.search import percentile
from timeline import Trace
from web.explore_state import LAYOUTS, State
from web.lanes import Lanes


@dataclass
class Several(Trace):
    """Several engines as one trace."""

    engines: list[Trace] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)

    @staticmethod
    def of(fleet: FleetTrace) -> "Several":
        engines, lives = fleet.engines, fleet.requests.lives
        iterations = [iteration for engine in engines for iteration in engine.iterations]
        preempted = [each for engine in engines for each in engine.preempted]
        return Several(iterations, lives, [], preempted, engines=engines, fetches=fleet.fetches)


def side(state: State, policy: str, trace: Trace, bound: float) -> dict:
    """One schedule.

    iterations: {"t": start, "seconds"} and `Lanes.rows`, as in the events of the live page; a
    request's lane is its slot. waits: [slot, from, to], where a request holds a slot and is in no
    batch. stalls: [slot of the late token, from, to, request]. queue: [moment, requests that wait
    from then on]. engines: [name, its first slot] of each. fetches: [slot, from, slot, to], of keys
    and values.
    """
    iterations, waits, slots, engines, after = [], [], {}, [], 0
    for name, engine in zip(LAYOUTS[state.engines], engines_of(trace), strict=True):
        engines.append([name, after])
        own = in_slots(engine, after)
        iterations, waits = iterations + own[0], waits + own[1]
        for request, places in own[2].items():
            slots[request] = sorted(slots.get(request, []) + places, key=lambda place: place[1])
        after = 1 + max([slot for each in own[2].values() for slot, _ in each], default=after)
    iterations.sort(key=lambda each: each["t"])
    stalls, fetches = trace.stalls(bound), getattr(trace, "fetches", [])
    return {
        "policy": policy,
        "slots": after,
        "engines": engines,
        "fetches": [
            [
                slot_at(slots[each.request_id], each.asked),
                each.start,
                next(slot for slot, since in slots[each.request_id] if since >= each.end),
                each.end,
            ]
            for each in fetches
        ],
        "iterations": iterations,
        "waits": waits,
        "stalls": [
            [slot_at(slots[request], start + seconds), start, start + seconds, request]
            for request, start, seconds in stalls
        ],
        "queue": queue(trace, slots, fetches),
        "numbers": numbers(trace, stalls),
        "says": says(state, trace, stalls, bound),
    }


def in_slots(trace: Trace, first: int = 0) -> tuple[list, list, dict[int, list[tuple[int, float]]]]:
    """Iterations and waits by slot, and the slots of each request: (slot, from when).

    See `Lanes`. A preempted request loses its slot. first: the engine's lowest slot.
    """
    iterations, waits = [], []
    slots: dict[int, list[tuple[int, float]]] = {}
    lanes = Lanes(first)
    until: dict[int, float] = {}  # request that holds a slot -> the end of its last bar
    leaving = deque(sorted([*trace.finished, *trace.preempted], key=lambda leave: leave[1]))
    for iteration in trace.iterations:
        start, seconds = iteration.start, iteration.seconds
        while leaving and leaving[0][1] <= start:
            request, _ = leaving.popleft()
            lanes.leave(request)
            until.pop(request, None)
        rows = lanes.rows(iteration.chunks, iteration.decodes)
        for request, slot, *_ in rows["chunks"] + rows["decodes"]:
            if request not in until:
                slots.setdefault(request, []).append((slot, start))
            elif until[request] < start:
                waits.append([slot, until[request], start])
            until[request] = start + seconds
        iterations.append({"t": start, "seconds": seconds, **rows})
    return iterations, waits, slots


def engines_of(trace: Trace) -> list[Trace]:
    return getattr(trace, "engines", [trace])


def slot_at(slots: Sequence[tuple[int, float]], moment: float) -> int:
    """The slot of a request whose batch ends at a moment."""
    return [slot for slot, since in slots if since < moment][-1]


def queue(
    trace: Trace, slots: dict[int, list[tuple[int, float]]], fetches: Sequence[Fetch] = ()
) -> list[list]:
    """How many requests wait for a slot: [moment, how many from then on]."""
    changes = [(life.arrival, 1) for life in trace.lives.values()]
    changes += [(moment, 1) for _, moment in trace.preempted]
    changes += [(fetch.asked, 1) for fetch in fetches]
    changes += [(since, -1) for each in slots.values() for _, since in each]
    found: dict[float, int] = {}
    waiting = 0
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
        tokens = prompt_tokens(trace, request, start, start + seconds)
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


def prompt_tokens(trace: Trace, request: int, start: float, end: float) -> int:
    """Prompt tokens that run between two moments on the engine where a request gets a token then.

    A second half's row, and an output that is computed again, are no tokens of a prompt.
    """
    for engine in engines_of(trace):
        inside = [i for i in engine.iterations if start < i.start + i.seconds / 2 < end]
        chunks = [chunk for iteration in inside for chunk in iteration.chunks]
        if request in {own for own, *_ in chunks}.union(*[i.decodes for i in inside]):
            whole = {own: life.prompt_tokens for own, life in trace.lives.items()}
            return sum([max(0, min(n, whole[own] - first)) for own, first, n, _ in chunks])
    return 0


def called(state: State, request: int) -> str:
    return "the long prompt" if state.long and request == state.n else f"request {request}"


def spoken(seconds: float) -> str:
    """1.24 s, or 87 ms."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
