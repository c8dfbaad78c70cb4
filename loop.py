"""The loop: schedule, check, execute, update. `Loop.step` is the whole engine on one screen.

Everything that generates text or simulates drives this loop, with one of two executors. The loop
cannot tell them apart:

    ModelExecutor   executor.py: torch, the wall clock, real tokens
    CostExecutor    simulate.py: the cost model of a named GPU, a virtual clock, placeholder tokens
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from batch import Batch, Request
from command.checks import UserError
from scheduler import NOTHING_SCHEDULED, Scheduler
from timeline import Iteration, Trace


@dataclass(slots=True)
class Result:
    """The outcome of a batch.

    tokens: one for each request of `batch.sampled`. seconds: how long the batch took.
    operators: seconds of each operator, if they were timed.
    """

    tokens: list[int]
    seconds: float
    operators: dict[str, float] | None = None


class Executor(Protocol):
    """What the loop needs of an executor. All times are seconds on the executor's clock."""

    cost: Callable[[Batch], float] | None  # seconds that a batch would take; None: it cannot say

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...

    def execute(self, batch: Batch) -> Result: ...

    def release(self, request: Request) -> None:
        """Free the slot of a request that has run."""


class Loop:
    """Runs requests step by step. Between two steps, requests may be added and cancelled.

    Each request has an id of its own. One thread only: what calls `step` in the middle of a step
    gets a UserError.
    trace: what has happened so far. batch: the one that ran last.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor):
        self.scheduler = scheduler
        self.executor = executor
        if executor.cost is not None:
            scheduler.cost = executor.cost  # in place of the method, which raises an error
        self.trace = Trace(policy=scheduler.name)
        self.batch: Batch | None = None
        self.arriving: deque[Request] = deque()  # in order of arrival
        self.here: set[Request] = set()  # that have arrived, and not ended
        self._stepping = False
        self._leaving = []  # requests cancelled during a step

    @property
    def busy(self) -> bool:
        return bool(self.arriving) or has_work(self.scheduler)

    def add(self, request: Request) -> None:
        """Let a request arrive at `request.arrival`, or now if that time has passed.

        A UserError if it can never run, or has run before.
        """
        request.check_new()
        self.scheduler.check(request)
        if not self.arriving or self.arriving[-1].arrival <= request.arrival:
            self.arriving.append(request)
        else:
            insort(self.arriving, request, key=lambda request: request.arrival)

    def cancel(self, request: Request) -> bool:
        """End a request now, waiting or running: its slot and its memory are free at once.

        No other request's tokens change. False if it has ended already.
        """
        # Python may delete a stream (engine.py) at any moment, even in the middle of a step. The
        # stream then cancels its requests here. They leave when the step is over.
        if self._stepping:
            self._leaving.append(request)
            return True
        if request in self.arriving:
            self.arriving.remove(request)
        elif not self.scheduler.cancel(request):
            return False
        request.finish_reason = "abort"
        self._gone(request, self.trace.cancelled)
        return True

    def _gone(self, request: Request, events: list[tuple[int, float]]) -> None:
        """It has left the scheduler before its last token: free its slot, and write it down."""
        if request.chunks_run:  # it holds a slot
            self.executor.release(request)
        self.here.discard(request)
        events.append((request.request_id, self.executor.now()))

    def _take_rejected(self) -> None:
        rejected = self.scheduler.rejected
        while rejected:
            self._gone(rejected.pop(0), self.trace.rejected)

    def step(self) -> Iteration | None:
        """Run the next batch; if no request is here yet, wait for one. None: nothing is left."""
        if self._stepping:
            raise UserError(
                "step was called while a step runs, or after one failed: make a new Loop after a"
                " failure"
            )
        scheduler = self.scheduler
        executor = self.executor
        arriving = self.arriving
        self._stepping = True  # stays so if the step fails: this loop must not go on
        iteration = None
        while iteration is None and self.busy:
            now = executor.now()
            scheduler.now = now
            while arriving and arriving[0].arrival <= now:
                self.here.add(arriving[0])
                scheduler.add(arriving.popleft())
            began = perf_counter()
            batch = scheduler.schedule(now)
            self.trace.asked(perf_counter() - began)
            for request in scheduler.take_preempted():
                self.trace.preempt(request, now)
                executor.release(request)
            self._take_rejected()
            if batch is None:
                if not self.busy or not self.wait():
                    break  # the last ones were rejected; or see `wait`
                continue
            check_batch(scheduler, batch)
            start = executor.now()  # on a wall clock, the policy has taken time
            result = executor.execute(batch)
            scheduler.now = executor.now()
            ended = scheduler.update(batch, result.tokens)
            for request in ended:
                executor.release(request)
                self.here.discard(request)
            self.batch = batch
            iteration = self.trace.record(
                batch, start, result.seconds, result.operators, ended, executor.now()
            )
            self._take_rejected()
        self._stepping = False
        if self.here and not self.busy:
            lost = min(request.request_id for request in self.here)
            raise scheduler.broken(f"it has lost request {lost}: `reject` lets one go")
        while self._leaving:
            self.cancel(self._leaving.pop())
        return iteration

    def wait(self) -> bool:
        """Nothing can run now: wait until the next request arrives, and return True.

        A loop in more/apart/ returns False instead: then `step` ends without an iteration.
        """
        if not self.arriving:
            raise self.scheduler.broken(NOTHING_SCHEDULED)
        self.executor.wait_until(self.arriving[0].arrival)
        return True

    def run(self) -> Trace:
        """Step until every request has ended."""
        while self.step():
            pass
        return self.trace


# ---- what every policy must keep: no request is forgotten, and no batch breaks a rule


def has_work(scheduler: Scheduler) -> bool:
    """What the policy says. Raise a UserError if it denies work while requests wait or run."""
    if scheduler.has_work:
        return True
    if scheduler.waiting or scheduler.running:
        raise scheduler.broken("has_work is False, while requests wait or run")
    return False


def check_batch(scheduler: Scheduler, batch: Batch) -> None:
    """Raise a UserError, before the batch runs, if it breaks a rule of all policies."""
    chunks = batch.chunks
    decodes = batch.decodes
    broken = scheduler.broken
    members = {chunk.request for chunk in chunks}.union(decodes)
    if not members:
        raise broken("the batch is empty; return None where there is nothing to run")
    if len(members) < len(chunks) + len(decodes):
        every = [*[chunk.request for chunk in chunks], *decodes]
        twice = min(r.request_id for r in every if every.count(r) > 1)
        raise broken(f"a request is in the batch twice: {twice}")
    if not members.issubset(scheduler.running):
        stray = min(r.request_id for r in members.difference(scheduler.running))
        raise broken(
            f"request {stray} is in the batch but not running: take it in with `admit`, and call"
            " `decodes` first, because that may preempt"
        )
    if len(members) > scheduler.max_batch_size:
        raise broken(
            f"the batch exceeds B: {len(members)} requests, and {scheduler.max_batch_size} may run"
        )
    for chunk in chunks:
        request = chunk.request
        end = chunk.start + chunk.length
        if not chunk.start == request.prefilled < end <= request.prefill_length:
            raise broken(
                f"request {request.request_id} has prefilled {request.prefilled} of"
                f" {request.prefill_length} tokens, and its chunk is {chunk.start} to {end - 1}:"
                " prompt tokens run exactly once and in order"
            )
    for request in decodes:
        if request.prefilled < request.prefill_length:
            raise broken(
                f"request {request.request_id} decodes, but has prefilled {request.prefilled} of"
                f" {request.prefill_length} tokens"
            )
    memory = scheduler.memory
    if not memory.holds(decodes):
        raise broken(
            f"the cache overflows: {memory.capacity - memory.room + len(decodes)} tokens, and it"
            f" holds {memory.capacity}; `decodes` preempts until they fit"
        )
