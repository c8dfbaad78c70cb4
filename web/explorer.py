"""What the explorer's page shows, as plain data: two schedules of the same requests, their gain.

The page runs this file, and the files that it imports, in the browser. They need the standard
library alone. `python -m web.explorer` answers the same questions, one line of JSON for each.

A state is what a link of the page holds: a dict of the fields below, such as {"C": 512}. A field
that is missing, or has a bad value, gets its default. Times are in seconds, lengths in tokens.
"""

import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from batch import Request
from checks import UserError, check_number, did_you_mean, lookup, shown
from cli import run_main
from configs import GPUS, MODELS
from constants import SOFTWARE
from costmodel import CostModel, make_batch, tokens_that_fit
from loop import Loop
from policyfile import LOADED, load_policies
from scheduler import POLICIES, make_scheduler
from serving.steady import Workload, balance, split, tokens_per_second
from simulate import CostExecutor, check_requests, make_cost_model
from timeline import Trace

STALL = 5  # decode-only iterations: a longer gap is a stall (Sarathi-Serve, Table 3, strict)
MOST_WORK = 300_000  # iterations, chunks and decodes of one schedule
MOST_GAIN_WORK = 1_000_000  # the same, of one point of the gain curve
POINTS = 24  # of the gain curve


@dataclass(frozen=True)
class State:
    """What is shown. The page's controls and its links have these names."""

    model: str = "llama-13b"
    gpu: str = "a6000"
    tp: int = 1  # GPUs that share the model
    software: str = "sarathi"
    left: str = "vllm_v0"
    right: str = "sarathi_serve"
    C: int = 256
    C_right: int = 0  # 0: C
    B: int = 6
    P: int = 160
    D: int = 48
    spread: int = 0
    n: int = 5
    rate: float = 0.0
    long: int = 3500
    seed: int = 0


@dataclass(frozen=True)
class Range:
    """A number from `least` to `most`. label, unit: words beside its slider."""

    label: str
    unit: str
    least: float
    most: float
    whole: bool = True

    def read(self, value: object) -> int | float:
        """The number that a link or the page gives, or a ValueError."""
        known = isinstance(value, str | int | float) and not isinstance(value, bool)
        number = float(value) if known else math.nan
        if not self.least <= number <= self.most or (self.whole and number != int(number)):
            raise ValueError
        return int(number) if self.whole else number

    def __str__(self) -> str:
        kind = "whole number" if self.whole else "number"
        return f"a {kind} from {self.least:g} to {self.most:g}"

    def stops(self) -> list[float]:
        """Where the slider stops: four values to each doubling."""
        steps = [2**power * quarters / 4 for power in range(-6, 15) for quarters in (4, 5, 6, 7)]
        values = {round(step) if self.whole else step for step in steps}
        values |= {self.least, self.most} | ({0} if self.least == 0 else set())
        return sorted(value for value in values if self.least <= value <= self.most)


RANGES = {
    "C": Range("chunk size C", "tokens of a batch", 1, 8192),
    "C_right": Range("another C, right", "tokens; 0: the same", 0, 8192),
    "B": Range("batch size B", "requests at once", 1, 256),
    "P": Range("prompt P", "tokens", 1, 16384),
    "D": Range("decodes D", "of each request", 1, 2048),
    "spread": Range("spread of lengths", "± %", 0, 90),
    "n": Range("requests", "besides the long one", 1, 500),
    "rate": Range("arrival rate", "per second; 0: all at once", 0, 64, whole=False),
    "long": Range("one long prompt", "tokens; 0: none", 0, 131072),
    "seed": Range("seed", "of lengths and arrivals", 0, 99),
}
RATIOS = Range("P:D", "prompt tokens per decode", 0.25, 512, whole=False)  # keeps P + D
CHOICES: dict[str, Callable[[], Iterable]] = {
    "model": lambda: MODELS,
    "gpu": lambda: GPUS,
    "tp": lambda: (1, 2, 4, 8),
    "software": lambda: SOFTWARE,
    "left": lambda: POLICIES,
    "right": lambda: POLICIES,
}
LABELS = {
    "model": "model",
    "gpu": "GPU",
    "tp": "GPUs that share it (TP)",
    "software": "software",
    "left": "policy, left",
    "right": "policy, right",
}
# What stands beside a schedule: name, unit, and a factor from our unit.
NUMBERS = {
    "throughput": ("throughput", "tokens/s", 1),
    "ttft_median": ("TTFT, median", "s", 1),
    "ttft_p99": ("TTFT, P99", "s", 1),
    "tbt_p99": ("TBT, P99", "ms", 1000),
    "longest_stall": ("longest stall", "s", 1),
    "mean_batch": ("mean batch", "requests", 1),
    "seconds": ("all done after", "s", 1),
}
EXAMPLES: dict[str, dict] = {
    "One long prompt": {},
    "SARATHI, Fig 9": {
        "left": "request_level", "right": "sarathi", "B": 18, "P": 956, "D": 68, "n": 36, "long": 0,
    },
    "Requests over time": {
        "C": 512, "B": 16, "P": 700, "D": 40, "spread": 60, "n": 24, "rate": 2, "long": 0,
    },
    "A batch that ends together": {
        "left": "request_level", "right": "orca", "B": 4, "spread": 80, "n": 12, "long": 0,
    },
    "Hybrid batches, or chunks": {"left": "hybrid_only", "right": "chunked_only", "C": 512},
    "Two chunk sizes": {"left": "sarathi_serve", "C": 128, "C_right": 1024},
}  # fmt: skip


# ------------------------------------------------------------------------------------------- states


def read_state(given: object) -> tuple[State, list[str]]:
    """The state that a link or the page gives, and a sentence for each value that was not used."""
    state, notes = State(), []
    if not isinstance(given, dict):
        return state, [f"The state is {shown(given)}; it must be an object of fields."]
    for name, value in given.items():
        names = [field.name for field in fields(State)]
        if name not in names:
            near = did_you_mean(name, names)
            notes.append(f"The link has {shown(name)}: there is no such field{near}.")
            continue
        try:
            state = replace(state, **{name: read_value(name, value)})
        except UserError as error:
            notes.append(f"{error} ({getattr(state, name)} is used)")
    return state, notes


def read_value(name: str, value: object) -> str | int | float:
    """One value of a state, or a UserError."""
    if name in RANGES:
        try:
            return RANGES[name].read(value)
        except (ValueError, OverflowError):
            message = f"{name} is {shown(value)}; it must be {RANGES[name]}"
            raise UserError(message) from None
    allowed = {str(choice): choice for choice in CHOICES[name]()}
    text = str(value) if type(value) is int else value
    if name in ("left", "right") and isinstance(text, str) and text not in allowed:
        make_scheduler(text, 1, 1)  # a policy with an option, such as dynamic:512,256
        return text
    return lookup(allowed, text, LABELS[name])


def link_of(state: State) -> str:
    """The part of the link after #: what is not the default."""
    default = asdict(State())
    given = {name: value for name, value in asdict(state).items() if value != default[name]}
    return "&".join(f"{name}={value:g}" if type(value) is float else f"{name}={value}"
                    for name, value in given.items())  # fmt: skip


def page() -> dict:
    """All that the page's controls need: names, labels, ranges, defaults."""
    controls = [
        {"name": name, "label": LABELS[name], "choices": [str(choice) for choice in choices()]}
        for name, choices in CHOICES.items()
    ]
    for name, range_ in RANGES.items():
        controls.append(control(name, range_))
    return {
        "controls": controls,
        "ratio": control("ratio", RATIOS),
        "numbers": NUMBERS,
        "defaults": asdict(State()),
        "examples": [
            {"title": title, "link": link_of(replace(State(), **state))}
            for title, state in EXAMPLES.items()
        ],
    }


def control(name: str, range_: Range) -> dict:
    return {
        "name": name, "label": range_.label, "unit": range_.unit, "least": range_.least,
        "most": range_.most, "whole": range_.whole, "stops": range_.stops(),
    }  # fmt: skip


# ------------------------------------------------------------------------------------- the requests


def draw_requests(state: State) -> list[Request]:
    """n requests, without the long one. Lengths are even between mean - spread and mean + spread.

    Arrivals are Poisson. `random()` gives the same numbers in every version of Python.
    """
    lengths, gaps = random.Random(2 * state.seed), random.Random(2 * state.seed + 1)
    requests, arrival = [], 0.0
    for i in range(state.n):
        prompt, decodes = [
            max(1, round(mean * (1 + state.spread / 100 * (2 * lengths.random() - 1))))
            for mean in (state.P, state.D)
        ]
        requests.append(Request(i, range(prompt), decodes + 1, arrival=arrival))
        if state.rate:
            arrival -= math.log(1 - gaps.random()) / state.rate
    return requests


def both(state: State) -> list[tuple[State, str]]:
    """The left side and the right one: its state, with its own C, and its policy."""
    return [(state, state.left), (replace(state, C=state.C_right or state.C), state.right)]


def make_requests(state: State) -> list[Request]:
    """The requests of a state. The long prompt is the last one, and has D decodes."""
    requests = draw_requests(state)
    if state.long:
        usual = {name: getattr(State, name) for name in ("left", "right", "C", "C_right")}
        alone = replace(state, long=0, **usual)
        arrival = halfway(alone)  # the same for all policies and chunk sizes
        requests.append(Request(state.n, range(state.long), state.D + 1, arrival=arrival))
    return requests


@lru_cache(maxsize=8)
def halfway(state: State) -> float:
    """When the long prompt arrives: halfway through the others, alone under orca."""
    return run(state, "orca", draw_requests(state)).seconds / 2


@lru_cache(maxsize=8)
def cost_model(model: str, gpu: str, tp: int, software: str) -> CostModel:
    """One for many runs: it remembers what batches cost."""
    return make_cost_model(model, gpu, tp, None, software)


def cost_of(state: State) -> CostModel:
    return cost_model(state.model, state.gpu, state.tp, state.software)


def run(state: State, policy: str, requests: Sequence[Request], most: int = MOST_WORK) -> Trace:
    """`simulate`, one step at a time: a UserError ends a run of too much work."""
    loop = Loop(make_scheduler(policy, state.B, state.C), CostExecutor(cost_of(state)))
    for request in requests:
        loop.add(request)
    work = 0
    while iteration := loop.step():
        work += 1 + iteration.num_chunks + iteration.num_decodes
        if work > most:
            raise UserError(
                f"policy {policy!r} has run {len(loop.trace.iterations)} iterations, and is not"
                " done: choose fewer or shorter requests, or a larger C"
            )
    return loop.trace


# ------------------------------------------------------------------------------------- the schedule


def schedule(given: object, ratio: object = None) -> dict:
    """Both schedules of a state, ready to be drawn. ratio: another P:D, with the same P + D.

    error: why there is nothing to draw; then all below is missing. bound: a longer gap between two
    tokens is a stall. long: when the long prompt arrives, or None. balance: C/(B-1) of the right
    side, or None.
    sides: the left and the right one, each {"policy", "error"} or what `side` says.
    """
    state, notes = read_state(given)
    if ratio is not None:
        check_number("P:D", ratio, RATIOS.least, RATIOS.most)
        prompt, decodes = split(state.P + state.D, ratio)
        state = replace(state, P=prompt, D=decodes)
    found = {"state": asdict(state), "link": link_of(state), "notes": notes}
    try:
        requests, bound = make_requests(state), stall_bound(state)
        check_requests(requests, cost_of(state).model.max_length, state.model)
    except UserError as error:
        return found | {"error": plain(error)}
    return found | {
        "notes": notes + doubts(state, requests),
        "bound": bound,
        "long": requests[-1].arrival if state.long else None,
        "balance": best_ratio(state) + 1 if state.B > 1 else None,
        "sides": [one_side(own, policy, bound) for own, policy in both(state)],
    }


def one_side(state: State, policy: str, bound: float) -> dict:
    try:
        return side(state, policy, run(state, policy, make_requests(state)), bound)
    except UserError as error:
        return {"policy": policy, "error": plain(error)}


def stall_bound(state: State) -> float:
    """Seconds of five decode-only iterations of B requests, each in the middle of its decodes."""
    batch = make_batch(decodes=min(state.B, state.n), context=state.P + -(-state.D // 2))
    return STALL * cost_of(state).seconds(batch)


def doubts(state: State, requests: Sequence[Request]) -> list[str]:
    """What a reader should know of the prediction: borrowed constants, too little memory."""
    cost, notes = cost_of(state), []
    if cost.guess:
        notes.append(f"A guess: {cost.guess}.")
    room = tokens_that_fit(cost.model, cost.gpu, state.tp)
    most = sum(sorted([request.most_cached for request in requests])[-state.B :])
    if not room:
        notes.append(
            f"The weights of {state.model} alone do not fit {state.tp} x {state.gpu}: a schedule"
            " that nobody can run. Choose more GPUs that share it."
        )
    elif most > room:
        notes.append(
            f"{state.tp} x {state.gpu} has room for {room:,} tokens of cache, and B = {state.B}"
            f" requests may need {most:,}: a real engine would run fewer at once."
        )
    return notes


def side(state: State, policy: str, trace: Trace, bound: float) -> dict:
    """One schedule.

    iterations: [start, seconds, [[slot, request, first token, tokens] of each chunk], [slot of each
    decode]]. waits: [slot, from, to], where a request holds a slot and is in no batch. stalls:
    [slot, from, to, request]. queue: [moment, requests that wait from then on].
    """
    iterations, waits, slots = in_slots(trace)
    stalls = trace.stalls(bound)
    return {
        "policy": policy,
        "slots": 1 + max(slot for each in slots.values() for slot, _ in each),
        "iterations": iterations,
        "waits": waits,
        "stalls": [
            [slot_at(slots[request], start), start, start + seconds, request]
            for request, start, seconds in stalls
        ],
        "queue": queue(trace, slots),
        "numbers": numbers(trace, stalls),
        "says": says(state, trace, stalls, bound),
    }


def in_slots(trace: Trace) -> tuple[list, list, dict[int, list[tuple[int, float]]]]:
    """Iterations and waits by slot, and the slots of each request: (slot, from when).

    A request takes the lowest free slot when its prefill starts. A preempted one loses it.
    """
    iterations, waits = [], []
    slots: dict[int, list[tuple[int, float]]] = {}
    held: dict[int, int] = {}  # request -> slot, now
    until: dict[int, float] = {}  # request -> the end of its last bar
    leaving = sorted([*trace.finished, *trace.preempted], key=lambda leave: leave[1])
    left = 0
    for iteration in trace.iterations:
        start, end = iteration.start, iteration.start + iteration.seconds
        while left < len(leaving) and leaving[left][1] <= start:
            held.pop(leaving[left][0], None)
            left += 1
        chunks, decodes = [], []
        for request, first, tokens in iteration.chunks:
            if request not in held:
                taken = set(held.values())
                held[request] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                slots.setdefault(request, []).append((held[request], start))
                until[request] = start
            chunks.append([held[request], request, first, tokens])
        decodes = [held[request] for request in iteration.decodes]
        for request in (*[chunk[1] for chunk in chunks], *iteration.decodes):
            if until[request] < start:
                waits.append([held[request], until[request], start])
            until[request] = end
        iterations.append([start, iteration.seconds, chunks, decodes])
    return iterations, waits, slots


def slot_at(slots: Sequence[tuple[int, float]], moment: float) -> int:
    """The slot that a request has at a moment."""
    return [slot for slot, since in slots if since <= moment][-1]


def queue(trace: Trace, slots: dict[int, list[tuple[int, float]]]) -> list[list]:
    """How many requests wait for a slot: [moment, how many from then on]."""
    changes = [(life.arrival, 1) for life in trace.lives.values()]
    changes += [(moment, 1) for _, moment in trace.preempted]
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
        "ttft_p99": percentile(ttfts, 0.99),
        "tbt_p99": percentile(tbts, 0.99),
        "longest_stall": max([seconds for _, _, seconds in stalls], default=None),
        "mean_batch": trace.mean_batch_size,
        "seconds": trace.seconds,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, interpolated as numpy does."""
    values, place = sorted(values), share * (len(values) - 1)
    below = values[math.floor(place)]
    return below + (values[math.ceil(place)] - below) * (place - math.floor(place))


def says(
    state: State, trace: Trace, stalls: Sequence[tuple[int, float, float]], bound: float
) -> list[str]:
    """What is seen, in two or three short sentences."""
    found = []
    if stalls:
        request, start, seconds = max(stalls, key=lambda stall: stall[2])
        inside = [i for i in trace.iterations if start <= i.start < start + seconds]
        tokens = sum([iteration.num_prefill_tokens for iteration in inside])
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


def called(state: State, request: int) -> str:
    return "the long prompt" if state.long and request == state.n else f"request {request}"


def spoken(seconds: float) -> str:
    """1.24 s, or 87 ms."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"


# -------------------------------------------------------------------------------------- the gain


def best_ratio(state: State) -> float:
    """The P:D at which SARATHI gains most with the right side's C. It needs B > 1."""
    return balance(state.C_right or state.C, state.B)


def gain_points(given: object) -> dict:
    """The P:D of all points of the gain curve: 1 to 200 as in Fig 9, and those of the state."""
    state, _ = read_state(given)
    length = state.P + state.D
    wanted = [200 ** (i / (POINTS - 1)) for i in range(POINTS)] + [state.P / state.D]
    if state.B > 1:
        wanted.append(max(1, best_ratio(state)))
    pairs = {split(length, ratio) for ratio in wanted}
    return {"points": sorted(prompt / decodes for prompt, decodes in pairs)}


def gain_point(given: object, ratio: object) -> dict:
    """Throughput of the right policy over the left one's in a steady state, at one P:D (Fig 9).

    All requests are alike, with P + D tokens, and there are always more: no arrivals, no spread,
    no long prompt. left, right: tokens per second.
    """
    state, _ = read_state(given)
    check_number("P:D", ratio, 1e-4, 1e5)
    work = Workload(state.P + state.D, state.B, ratio)
    check_requests(work.requests(1), cost_of(state).model.max_length, state.model)
    speeds = []
    for own, policy in both(state):
        trace = run(own, policy, work.requests(5 * state.B), MOST_GAIN_WORK)
        speeds.append(tokens_per_second(trace, work.length, 2 * state.B, 4 * state.B))
    prompt, decodes = split(work.length, work.ratio)
    return {
        "x": prompt / decodes, "P": prompt, "D": decodes,
        "left": speeds[0], "right": speeds[1], "gain": speeds[1] / speeds[0],
    }  # fmt: skip


# ---------------------------------------------------------------------------- a policy of your own

OWN = Path("your_policy.py")


def load_own(text: str) -> list[str]:
    """Make the classes of a pasted text policies, instead of those pasted before. Their names.

    Raises UserError with the line where the text is broken.
    """
    path = OWN.resolve()  # of the browser's own files, which vanish with the page
    for name in LOADED.pop(path, []):
        POLICIES.pop(name, None)
    path.write_text(text, encoding="utf-8")
    return load_policies(path)


def plain(error: UserError) -> str:
    """What an error says, without the place where the browser keeps a pasted policy."""
    return str(error).replace(str(OWN.resolve()), "your policy")


# --------------------------------------------------------------------------- questions and answers

CALLS: dict[str, Callable[[dict], dict]] = {
    "page": lambda question: page(),
    "schedule": lambda question: schedule(question.get("state"), question.get("x")),
    "gain_points": lambda question: gain_points(question.get("state")),
    "gain_point": lambda question: gain_point(question.get("state"), question.get("x")),
}
# With "own": a text with policies. It is run, so a server must not have this call.
IN_BROWSER = CALLS | {"own": lambda question: {"names": load_own(question.get("code"))}}


def answer(text: str, calls: dict[str, Callable[[dict], dict]] = CALLS) -> str:
    """A question and its answer as JSON: {"call": a name of CALLS, "state": ..., "x": ...}.

    A user's mistake gives {"error": one sentence}.
    """
    try:
        question = json.loads(text)
        if not isinstance(question, dict):
            raise UserError(f"{shown(question)} is no question; it must be an object")
        return json.dumps(lookup(calls, question.get("call"), "call")(question))
    except UserError as error:
        return json.dumps({"error": plain(error)})
    except (ValueError, RecursionError):
        return json.dumps({"error": "the question is no JSON"})


def main() -> None:
    """Answer each line of the input with a line. It ends with the input."""
    if hasattr(os, "nice"):
        os.nice(10)  # a server's engine goes first
    for line in sys.stdin:
        print(answer(line), flush=True)


if __name__ == "__main__":
    run_main(main)
