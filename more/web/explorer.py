"""What the explorer's page asks: two schedules of the same requests, and the curve of their gain.

The page runs this file, and the files that it imports, in the browser. They need the standard
library alone.
more/web/explore_state.py says what may be asked for. more/web/explore_side.py turns a schedule into
the form that is drawn. If you do not use the page, skip all three: `simulate` gives the same
numbers.

Times are in seconds, lengths in tokens.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from batch import Request
from command.checks import UserError, check_number, lookup, shown
from command.cli import write_file
from costmodel import CostModel, make_batch
from more.fast_forward import FastForward
from more.loading.policyfile import LOADED, load_policies
from more.loading.requests import check_requests
from more.serving.steady import Workload, balance, run_steady, split, tokens_per_second
from more.simulate import CostExecutor, make_cost_model, run_all
from more.web.explore_side import side
from more.web.explore_state import RATIOS, State, link_of, page, read_state
from scheduler import POLICIES, make_scheduler
from timeline import Iteration, Trace

STALL = 5  # decode-only iterations: a longer gap is a stall (Sarathi-Serve, Table 3, strict)
MOST_WORK = 300_000  # iterations, chunks and decodes of one schedule
MOST_GAIN_WORK = 1_000_000  # the same, of one point of the gain curve
POINTS = 24  # of the gain curve


# ------------------------------------------------------------------------------------- the requests


def draw_requests(state: State) -> list[Request]:
    """n requests, without the long one. Lengths are uniform from mean - spread to mean + spread.

    Arrivals are Poisson. `random()` gives the same numbers in every version of Python.
    """
    lengths = random.Random(2 * state.seed)
    gaps = random.Random(2 * state.seed + 1)
    requests = []
    arrival = 0.0
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
        sides = ("left", "right", "C", "C_right")
        usual = {name: getattr(State, name) for name in sides}
        alone = replace(state, long=0, **usual)
        arrival = halfway(alone)  # the same for all policies and chunk sizes
        requests.append(Request(state.n, range(state.long), state.D + 1, arrival=arrival))
    return requests


@lru_cache(maxsize=8)
def halfway(state: State) -> float:
    """When the long prompt arrives: in the middle of a run of the others, under orca."""
    return run(state, "orca", draw_requests(state)).seconds / 2


@lru_cache(maxsize=8)
def cost_model(model: str, gpu: str, tp: int, software: str) -> CostModel:
    """One for many runs: it remembers what batches cost."""
    return make_cost_model(model, gpu, tp, None, software)


def cost_of(state: State) -> CostModel:
    return cost_model(state.model, state.gpu, state.tp, state.software)


class Limited(FastForward):
    """It raises a UserError where the work exceeds `most`."""

    def __init__(self, state: State, policy: str, most: int = MOST_WORK):
        super().__init__(make_scheduler(policy, state.B, state.C), CostExecutor(cost_of(state)))
        self.most = most

    def step(self) -> Iteration | None:
        ran = len(self.trace.iterations)
        iteration = super().step()
        for each in self.trace.iterations[ran:]:
            self.most -= 1 + each.num_chunks + each.num_decodes
        if self.most < 0 and self.busy:
            raise UserError(
                f"policy {self.scheduler.name!r} has run {len(self.trace.iterations)} iterations,"
                " and is not done: choose fewer or shorter requests, or a larger C"
            )
        return iteration


def run(state: State, policy: str, requests: Sequence[Request]) -> Trace:
    """As `simulate`."""
    return run_all(Limited(state, policy), requests)


# ------------------------------------------------------------------------------------- the schedule


def schedule(given: object, ratio: object = None) -> dict:
    """Both schedules of a state, ready to be drawn. ratio: another P:D, with the same P + D.

    error: why there is nothing to draw; then all below is missing. bound: a longer gap between two
    tokens is a stall. long: when the long prompt arrives, or None. balance: C/(B-1) - 1 of the
    right side, or None.
    sides: the left and the right one, each {"policy", "error"} or what `side` says.
    """
    state, notes = read_state(given)
    if ratio is not None:
        RATIOS.bounds.check("P:D", ratio)
        prompt, decodes = split(state.P + state.D, ratio)
        state = replace(state, P=prompt, D=decodes)
    found = {"state": asdict(state), "link": link_of(state), "notes": notes}
    try:
        requests = make_requests(state)
        bound = stall_bound(state)
        check_requests(requests, cost_of(state).model.max_length, state.model)
    except UserError as error:
        return found | {"error": plain(error)}
    return found | {
        "notes": notes + doubts(state, requests),
        "bound": bound,
        "long": requests[-1].arrival if state.long else None,
        "balance": best_ratio(state) if state.B > 1 else None,
        "sides": [one_side(own, policy, bound) for own, policy in both(state)],
    }


def one_side(state: State, policy: str, bound: float) -> dict:
    try:
        trace = run(state, policy, make_requests(state))
        return side(state, policy, trace, bound)
    except UserError as error:
        return {"policy": policy, "error": plain(error)}


def stall_bound(state: State) -> float:
    """Seconds of five decode-only iterations of B requests, each in the middle of its decodes."""
    batch = make_batch(decodes=min(state.B, state.n), context=state.P + -(-state.D // 2))
    return STALL * cost_of(state).seconds(batch)


def doubts(state: State, requests: Sequence[Request]) -> list[str]:
    """What a reader should know of the prediction: borrowed constants, too little memory."""
    most = sum(sorted([request.most_cached for request in requests])[-state.B :])
    said = cost_of(state).doubts(most)
    return [f"Note: {said}."] if said else []


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
        loop = Limited(own, policy, MOST_GAIN_WORK)
        window = run_steady(loop, work)
        speeds.append(tokens_per_second(loop.trace, work.length, *window))
    prompt, decodes = split(work.length, work.ratio)
    return {
        "x": prompt / decodes,
        "P": prompt,
        "D": decodes,
        "left": speeds[0],
        "right": speeds[1],
        "gain": speeds[1] / speeds[0],
    }


# ---------------------------------------------------------------------------- a policy of your own

OWN = Path("your_policy.py")


def load_own(text: str) -> list[str]:
    """Make the classes of a pasted text policies, instead of those pasted before. Their names.

    Raises UserError with the line where the text is broken.
    """
    path = OWN.resolve()  # of the browser's own files, which vanish with the page
    for name in LOADED.pop(path, []):
        POLICIES.pop(name, None)
    write_file(path, text)
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


def with_own(call: Callable[[dict], dict]) -> Callable[[dict], dict]:
    """A call that first loads what has been pasted, which the question holds as "own"."""

    def load_and_call(question: dict) -> dict:
        if question.get("own"):
            load_own(question["own"])
        return call(question)

    return load_and_call


# What has been pasted is run, so a server must not have these calls.
IN_BROWSER = {name: with_own(call) for name, call in CALLS.items()} | {
    "own": lambda question: {"names": load_own(question.get("own"))}
}


def answer(text: str, calls: dict[str, Callable[[dict], dict]] = CALLS) -> str:
    """A question and its answer as JSON: {"call": a name of CALLS, "state": ..., "x": ...}.

    A user's mistake gives {"error": one sentence}.
    """
    try:
        question = json.loads(text)
        if not isinstance(question, dict):
            raise UserError(f"{shown(question)} is no question; it must be an object")
        found = lookup(calls, question.get("call"), "call")(question)
    except UserError as error:
        found = {"error": plain(error)}
    except (ValueError, RecursionError):
        found = {"error": "the question is no JSON"}
    return json.dumps(found)


def in_browser(text: str, tell: object = None) -> str:
    """What the page's worker asks (more/web/static/python_worker.js)."""
    return answer(text, IN_BROWSER)
