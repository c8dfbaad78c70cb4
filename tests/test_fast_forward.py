"""more/fast_forward.py: a run that counts and jumps is the run of `Loop`, to the last bit."""

import random

import pytest

import more.simulate as priced
from batch import Batch, Request
from configs import GPUS, MODELS
from configs.hosts import HOSTS
from costmodel import CostModel
from loop import Loop
from more.fast_forward import COUNTED, JUMPED, FastForward
from more.policies.engines import NoEvict
from scheduler import (
    POLICIES,
    Memory,
    RequestLevel,
    Sarathi,
    SarathiServe,
    Scheduler,
    make_scheduler,
)
from simulate import CostExecutor, run_all
from timeline import Trace

COSTS = [
    priced.make_cost_model("llama-13b", "a6000", 1, None, "xformers-2023"),
    priced.make_cost_model("llama3.1-8b", "h100", 2, None, "vllm", HOSTS["vllm-async"]),
]
OPTIONS = ("vllm_v0:600", "dynamic:128,64,32", "vllm_v1:48", "sarathi_pd", "equal_progress:16")
# B, C, and tokens of cache
SIZES = [
    (6, 64, None),
    (40, 64, None),
    (18, 256, None),
    (20, 96, 1400),
    (24, 12, 1500),
    (40, 256, 2000),
]


def draw(seed: int, count: int = 40, longest: int = 900) -> list[Request]:
    """Some come together, some late; a few have one output token, or end at their first 0."""
    own = random.Random(seed)
    moment = 0.0
    requests = []
    for i in range(count):
        moment += own.choice([0.0, own.expovariate(8), 20.0 * (i == count // 2)])
        stop_ids = frozenset([0]) if own.random() < 0.1 else frozenset()
        tokens = own.choice([1, 2, own.randint(1, 40), own.randint(1, 400), own.randint(100, 400)])
        prompt = range(own.choice([1, own.randint(1, 100), own.randint(1, longest)]))
        requests.append(Request(i, prompt, tokens, stop_ids, arrival=moment))
    return requests


def everything(loop: Loop, requests: list[Request]) -> dict[str, object]:
    """All that a run leaves, but what the policy's own time was."""
    found = {name: getattr(loop.trace, name) for name in vars(Trace(policy="?"))}
    for name in ("schedules", "policy_seconds", "longest_schedule"):
        del found[name]
    for name in ("prefilled", "context", "chunks_run", "output", "finish_reason", "preemptions"):
        found[name] = [getattr(each, name) for each in requests]
    return found | {"clock": loop.executor.clock, "taken": loop.scheduler.memory.taken}


@pytest.mark.parametrize("policy", [*POLICIES, *OPTIONS])
def test_every_number_is_that_of_the_loop(policy: str) -> None:
    preempted = 0
    for seed, (B, C, cache) in enumerate(SIZES):
        seen = []
        for kind in (Loop, FastForward):
            scheduler = make_scheduler(policy, B, C, cache)
            loop = kind(scheduler, CostExecutor(COSTS[seed % 2]))
            requests = draw(seed, longest=100 if cache else 900)
            run_all(loop, requests)
            seen.append(everything(loop, requests))
            asked = loop.trace.schedules
        for name, value in seen[0].items():
            assert seen[1][name] == value, (name, B, C, cache)
        known = type(scheduler)
        jumps = known in JUMPED and policy != "vllm_v1:48"
        assert (asked < 0.8 * len(loop.trace.iterations)) == jumps
        preempted += len(loop.trace.preempted)
    assert preempted > 5 or known in (NoEvict, RequestLevel), "the memory is full"


def test_the_books_policies_and_those_of_todays_engines_are_counted() -> None:
    modules = "scheduler", "more.policies.engines"
    assert {own for own in POLICIES.values() if own.__module__ in modules} == COUNTED


class Clock(SarathiServe):
    """A prompt waits until the clock is even: no batch says what the next one is."""

    name = "clock"

    def schedule(self, now: float) -> Batch | None:
        return super().schedule(now) if int(10 * now) % 2 else self.decode_only()

    def decode_only(self) -> Batch | None:
        return super().decode_only() or super().schedule(0.0)


class Third(Sarathi):
    """Each third batch has no chunk. It counts its own batches."""

    name = "third"
    count = 0

    def prefills(self, decode_rows: int) -> list:
        self.count += 1
        return super().prefills(decode_rows) if self.count % 3 or not decode_rows else []


class Longest(SarathiServe):
    """The newest decode pauses once the outputs are long: it looks at what is counted."""

    name = "longest"

    def schedule(self, now: float) -> Batch | None:
        batch = super().schedule(now)
        if batch and len(batch.decodes) > 1 and sum(len(r.output) for r in batch.decodes) > 50:
            batch.decodes.pop()
        return batch


@pytest.mark.parametrize("kind", [Clock, Third, Longest])
def test_a_policy_of_your_own_is_asked_for_each_batch(kind: type[Scheduler]) -> None:
    seen = []
    for loop_kind in (Loop, FastForward):
        loop = loop_kind(kind(6, 64), CostExecutor(COSTS[0]))
        requests = draw(1, 20)
        trace = run_all(loop, requests)
        seen.append(everything(loop, requests))
        assert trace.schedules >= len(trace.iterations)
    assert seen[0] == seen[1]


def test_between_two_steps_one_may_leave_and_all_can_be_written_down() -> None:
    """As a closed loop does, and a run that is left early."""
    seen = []
    for kind in (Loop, FastForward):
        loop = kind(make_scheduler("sarathi_serve", 4, 64, 3000), CostExecutor(COSTS[0]))
        requests = draw(3, 12)
        for request in requests:
            loop.add(request)
        while len(loop.trace.finished) < 3:
            loop.step()
        victim = next(each for each in loop.scheduler.running if each.output)
        assert loop.cancel(victim) and not loop.cancel(victim)
        again = [Request(100 + i, range(50), 30, arrival=loop.executor.clock) for i in range(3)]
        for request in again:
            loop.add(request)
        while len(loop.trace.finished) < 6:
            loop.step()
        if kind is FastForward:
            loop.settle()
        seen.append(everything(loop, requests + again))
    assert seen[0] == seen[1]


class OwnRequest(Request):
    """As a beam search has one."""


class OwnMemory(Memory):
    """As blocks are one."""


class OwnPrices(CostModel):
    """As those of a machine that was measured."""

    def attention(self, batch: Batch) -> float:
        return 2 * super().attention(batch)


@pytest.mark.parametrize("what", [OwnRequest, OwnMemory, OwnPrices])
def test_what_is_not_the_books_own_runs_step_by_step(what: type) -> None:
    cost = OwnPrices(MODELS["llama-13b"], GPUS["a6000"]) if what is OwnPrices else COSTS[0]
    seen = []
    for kind in (Loop, FastForward):
        scheduler = make_scheduler("sarathi", 4, 64)
        scheduler.memory = (what if what is OwnMemory else Memory)(None)
        loop = kind(scheduler, CostExecutor(cost))
        for i in range(5):
            loop.add((what if what is OwnRequest else Request)(i, range(100), 20))
        trace = loop.run()
        assert trace.schedules == len(trace.iterations)
        seen.append(trace.iterations)
    assert seen[0] == seen[1]
