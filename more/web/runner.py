"""The bridge from a server to the loop. One thread steps it; all others talk to that thread.

    any thread                           the engine thread, again and again
    submit, cancel, switch  -- inbox --> what the inbox says, between two steps
                                         one step of the loop
    deliver(...)            <-----------  the tokens of the step, all at once

Requests come, go and change their policy only between two steps. So the loop and the schedulers
know nothing of threads, and each request gets the tokens that `LLM.generate` would give.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from batch import Batch, Request
from command.checks import MOST, UserError, check_whole
from command.cli import one_line
from loop import Executor, Loop, Result
from more.loading.policyfile import is_ours
from more.web.lanes import Lanes
from scheduler import Orca, RequestLevel, Scheduler, VLLMv0
from timeline import Iteration, Trace, contents

LONGEST_STEP = 30.0  # s: for a step that runs on while the server ends
LAST_RESORT = "sarathi_serve"  # what takes over from a user's own policy that fails
KEPT = 1000  # iterations, and ends of requests

log = logging.getLogger("nano-sarathi")


class Full(Exception):
    def __init__(self) -> None:
        super().__init__("the queue is full; try again in a second")


class Stopping(Exception):
    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True, slots=True)
class Delta:
    """News of a request: a token, or its end, or both.

    token: None if it ended without one, or BROKEN. finish_reason: "stop", "length", "error" or
    "abort" (cancelled); None: it goes on. moment: s on the engine's clock. policy: what was in
    force. refused: why this policy cannot serve it, in one line.
    """

    token: int | None
    finish_reason: str | None
    moment: float
    policy: str
    refused: str = ""


class Engine(Protocol):
    """What runs requests: a RealEngine (real.py) or a PricedEngine (priced.py)."""

    name: str
    priced: bool
    policy: str  # the first one, with its chunk size
    chunk_size: int
    max_batch_size: int
    max_length: int  # tokens of one request

    cost: Callable[[Batch], float] | None  # see `loop.Executor`

    def scheduler(self, policy: str, chunk_size: int) -> Scheduler: ...

    def sampler(self, seed: int, **params: float) -> object:
        """What draws the tokens of one request, as SamplingParams(**params) say; None: nothing."""

    def executor(self) -> Executor:
        """A new executor on an empty cache."""

    def check(self, requests: Sequence[Request]) -> None:
        """A UserError for a request that can never run."""

    def surroundings(self) -> AbstractContextManager:
        """A context in which the engine thread runs."""

    def stop(self) -> None:
        """Interrupt the current step, if possible."""


class Runner:
    """Steps a loop in a thread of its own. All public methods may be called from any thread.

    queue: how many requests may wait when B run. deliver: gets [(tag, Delta), ...] of all requests,
    once an iteration. It is called in the engine thread, and must not block.
    """

    def __init__(
        self, engine: Engine, *, queue: int, deliver: Callable[[list[tuple[object, Delta]]], None]
    ):
        check_whole("queue", queue, 0)
        self.engine = engine
        self.deliver = deliver
        self.most = engine.max_batch_size + queue  # requests at once
        self.policy = engine.policy
        self.chunk_size = engine.chunk_size
        self.changed = threading.Condition()  # guards the next three
        self.inbox: deque[Callable[[], None]] = deque()  # what the engine thread has to do
        self.streams: dict[int, tuple[Request, object]] = {}  # id -> a request that runs, its tag
        self.stopping = self.closed = False
        self.ids = itertools.count()
        self.listeners: tuple[Callable[[dict], None], ...] = ()
        self.done = 0
        self.failures = 0
        self.error = None
        self.iterations = 0
        self.news: list[tuple[object, Delta]] = []  # to be delivered
        self.ended: list[int] = []  # their ids, to be forgotten
        self._new_loop(engine.scheduler(self.policy, self.chunk_size))
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self.thread.start()

    def submit(self, requests: Sequence[Request], tags: Sequence[object]) -> None:
        """Queue all of these requests, or none. Each gets its id and its arrival here.

        tags: come back with the tokens of each request. Raises Full, Stopping, or UserError.
        """
        if len(requests) > self.most:
            raise UserError(f"{len(requests)} requests at once; the server holds {self.most}")
        for request in requests:
            request.request_id = next(self.ids)
            request.arrival = self.loop.executor.now()
        self.engine.check(requests)
        for request in requests:
            self.loop.scheduler.check(request)
        with self.changed:
            if self.stopping:
                raise Stopping
            if len(self.streams) + len(requests) > self.most:
                raise Full
            for request, tag in zip(requests, tags, strict=True):
                self.streams[request.request_id] = request, tag
                self._post(self._accept, request)

    def cancel(self, request: Request) -> None:
        """End a request before the next step. Nothing happens if it has ended, or never came."""
        with self.changed:
            self._post(self._cancel, request)

    def switch(self, policy: str, chunk_size: int) -> Future:
        """Change the policy before the next step. The future gives the ids of preempted requests.

        Requests in the middle of their prefill are preempted, because not every policy could go on
        with them. Decodes go on. What the new policy refuses ends with "error", alone. If there is
        no such policy, the future raises a UserError.
        """
        future: Future = Future()
        with self.changed:
            if self.closed:
                raise Stopping
            self._post(self._switch, policy, chunk_size, future)
        return future

    def watch(self, listener: Callable[[dict], None]) -> Callable[[], None]:
        """Call `listener` with each event, in the engine thread. Returns what unsubscribes it."""
        with self.changed:
            self.listeners = (*self.listeners, listener)
        return partial(self._unwatch, listener)

    @property
    def in_force(self) -> str:
        """The policy and its C, as an answer tells them."""
        return f"{self.policy} C={self.chunk_size}"

    def state(self) -> dict:
        """The current state, ready for JSON."""
        loop = self.loop
        scheduler = self.loop.scheduler
        running = len(scheduler.running)
        return {
            "name": self.engine.name,
            "priced": self.engine.priced,
            "policy": self.policy,
            "chunk_size": self.chunk_size,
            "budget": budget_of(scheduler),
            "max_batch_size": self.engine.max_batch_size,
            "max_length": self.engine.max_length,
            "waiting": max(0, len(self.streams) - running),
            "running": running,
            "held": scheduler.memory.taken,
            "capacity": scheduler.memory.capacity,
            "done": self.done,
            "iterations": self.iterations,
            "failures": self.failures,
            "error": self.error,
            "alive": self.thread.is_alive(),
            "draining": self.stopping,
            "t": loop.executor.now(),
        }

    def drop_unread(self) -> int:
        """Cancel the requests that nobody reads: a live page's. Returns how many others are here.

        A page's are those without a tag.
        """
        with self.changed:
            unread = [request for request, tag in self.streams.values() if tag is None]
            for request in unread:
                self._post(self._cancel, request)
            return len(self.streams) - len(unread)

    def drain(self, seconds: float) -> bool:
        """Take no more requests, and run those that are here to their end.

        After `seconds`, those that still run are aborted. Returns whether all ended in time.
        """
        with self.changed:
            self.stopping = True
            in_time = self.changed.wait_for(lambda: not self.streams, seconds)
            for request, _ in self.streams.values():
                self._post(self._cancel, request)
            self.changed.wait_for(lambda: not self.streams, LONGEST_STEP)
        return in_time

    def close(self) -> None:
        """End the engine thread after its current step. Remaining requests are aborted."""
        with self.changed:
            self.stopping = self.closed = True
            self.changed.notify_all()
        self.engine.stop()
        if self.thread.ident is None:  # it was never started: its end gives back what it holds
            self.start()
        self.thread.join(LONGEST_STEP)

    def _post(self, do: Callable, *arguments: object) -> None:
        """Put a call into the inbox. The caller holds `changed`."""
        self.inbox.append(partial(do, *arguments))
        self.changed.notify_all()

    def _unwatch(self, listener: Callable[[dict], None]) -> None:
        with self.changed:
            self.listeners = tuple(each for each in self.listeners if each is not listener)

    # ---- the engine thread

    def _run(self) -> None:
        try:
            with self.engine.surroundings():
                while not self.closed:
                    try:
                        if self._wait():
                            self._read_inbox()
                            if self._busy():
                                self._step()
                    except BaseException as error:  # noqa: BLE001 (a kernel, a policy that exits)
                        self._fail(error)
                    self._flush()
        finally:  # whatever has happened, no client must wait for ever
            with self.changed:
                self.stopping = self.closed = True
            self._end_all("abort", self.in_force)
            self._flush()
            self._read_inbox()

    def _wait(self) -> bool:
        """Sleep while there is nothing to do. False: the thread should end."""
        busy = self._busy()  # before we hold what all others need: a user's own might be slow
        with self.changed:
            if not (self.inbox or busy or self.closed):
                if self.streams:
                    lost = len(self.streams)
                    raise UserError(f"a policy has lost {lost} requests: they neither wait nor run")
                self.changed.wait_for(lambda: self.inbox or self.closed)
            return not self.closed

    def _busy(self) -> bool:
        """Whether to step. Without requests, we do not ask a user's own policy: it might fail."""
        return bool(self.streams) and self.loop.busy

    def _read_inbox(self) -> None:
        while self.inbox:
            self.inbox.popleft()()

    def _step(self) -> None:
        loop = self.loop
        iteration = loop.step()
        self._tell_rejected()
        if iteration is None:  # the last requests were rejected
            return
        self.iterations += 1
        end = iteration.end
        if self.listeners:
            self._tell("iteration", **self._shown(iteration))
        policy = self.in_force
        for request in loop.batch.sampled:
            self._send(request, Delta(request.output[-1], request.finish_reason, end, policy))

    def _execute(self, execute: Callable[[Batch], Result], batch: Batch) -> Result:
        """Give new requests a lane, and announce a batch with chunks, which may run for long."""
        self._tell_preempted()
        self._tell_rejected()
        if batch.chunks:
            moment = self.loop.executor.now()
            waiting = len(self.loop.scheduler.waiting)
            rows = self.lanes.rows(*contents(batch))
            self._tell("started", t=moment, waiting=waiting, **rows)
        return execute(batch)

    def _tell_preempted(self) -> None:
        preempted = self.loop.trace.preempted
        self.loop.trace.preempted = []
        for own, moment in preempted:
            self.lanes.leave(own)
            self._tell("preempted", id=own, t=moment)

    def _tell_rejected(self) -> None:
        rejected = self.loop.trace.rejected
        self.loop.trace.rejected = []
        for own, moment in rejected:
            self._send(self.streams[own][0], Delta(None, "reject", moment, self.in_force))

    def _shown(self, iteration: Iteration) -> dict:
        scheduler = self.loop.scheduler
        batch = self.loop.batch
        return {
            "n": self.iterations,
            "t": iteration.start,
            "seconds": iteration.seconds,
            "policy": self.policy,
            "budget": budget_of(scheduler),
            "rows": batch.num_tokens,
            **self.lanes.rows(iteration.chunks, iteration.decodes),
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "held": scheduler.memory.taken,
            "capacity": scheduler.memory.capacity,
        }

    def _accept(self, request: Request) -> None:
        if request.request_id not in self.streams:  # it ended with the others, in `_fail`
            return
        self._tell(
            "queued",
            id=request.request_id,
            t=request.arrival,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            label=request.tags.get("label", ""),
        )
        try:
            self.loop.add(request)
        except UserError as error:  # the policy has changed since `submit`
            self._refuse(request, error)

    def _cancel(self, request: Request) -> None:
        here, _ = self.streams.get(request.request_id, (None, None))
        if here is request and self.loop.cancel(request):
            self._send(request, Delta(None, "abort", self.loop.executor.now(), self.in_force))

    def _refuse(self, request: Request, error: UserError) -> None:
        """End a request that the policy in force cannot serve."""
        told = f"policy {self.policy!r} refuses it: {why(error)}"
        self.loop.cancel(request)
        last = Delta(None, "error", self.loop.executor.now(), self.in_force, told)
        self._send(request, last)

    def _switch(self, policy: str, chunk_size: int, future: Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self.closed:
            future.set_exception(Stopping())
            return
        try:
            scheduler = self.engine.scheduler(policy, chunk_size)
            refused = refused_by(scheduler, self.loop)
            preempted = [each.request_id for each in take_over(self.loop, scheduler, refused)]
        except BaseException as error:  # noqa: BLE001 (a policy of a user's own; somebody waits)
            future.set_exception(UserError(why(error)))
            return  # and the old policy goes on
        self._tell_preempted()
        self.policy = policy
        self.chunk_size = chunk_size
        self._tell_switched(preempted)
        for request, error in refused.items():
            self._refuse(request, error)
        future.set_result(preempted)

    def _tell_switched(self, preempted: list[int]) -> None:
        self._tell(
            "switched",
            t=self.loop.executor.now(),
            policy=self.policy,
            chunk_size=self.chunk_size,
            budget=budget_of(self.loop.scheduler),
            preempted=preempted,
        )

    def _send(self, request: Request, delta: Delta) -> None:
        """Queue a token, or the end, of a request that has not ended before."""
        own = request.request_id
        self.news.append((self.streams[own][1], delta))
        if delta.finish_reason:
            request.finish_reason = delta.finish_reason
            self.ended.append(own)
            self.loop.trace.lives.pop(own, None)
            self.lanes.leave(own)
            self._tell("ended", id=own, t=delta.moment, reason=delta.finish_reason)

    def _flush(self) -> None:
        """Deliver the news. Then forget the requests that have ended: `drain` waits for that."""
        news = self.news
        self.news = []
        try:
            if news:
                self.deliver(news)
        except Exception:  # the engine serves on
            log.exception("the tokens of %d streams were not delivered", len(news))
        if self.ended:
            with self.changed:
                for own in self.ended:
                    del self.streams[own]
                self.done += len(self.ended)
                self.ended.clear()
                self.changed.notify_all()

    def _tell(self, kind: str, **event: object) -> None:
        for listener in self.listeners:
            try:
                listener({"type": kind, **event})
            except Exception:  # a listener must not stop the engine
                log.exception("a listener failed, and is told no more")
                self._unwatch(listener)

    def _fail(self, error: BaseException) -> None:
        """End all streams with "error", and go on with a new loop on an empty cache."""
        traced = None if isinstance(error, UserError) else error
        log.error("the engine failed and was restarted: %s", why(error), exc_info=traced)
        failed = self.in_force
        self.failures += 1
        self.error = why(error)
        own = not is_ours(type(self.loop.scheduler))
        if own:
            told = f"{self.policy} gives way to {LAST_RESORT}"
            self.policy = LAST_RESORT
            log.error(told)
            self.error += f"; {told}"
        self._tell("failed", t=self.loop.executor.now(), error=self.error)
        self._end_all("error", failed)
        self._new_loop(self.engine.scheduler(self.policy, self.chunk_size))
        if own:
            self._tell_switched([])

    def _end_all(self, reason: str, policy: str) -> None:
        last = Delta(None, reason, self.loop.executor.now(), policy)
        with self.changed:
            left = [request for request, _ in self.streams.values()]
        for request in left:
            if request.request_id not in self.ended:
                self._send(request, last)

    def _new_loop(self, scheduler: Scheduler) -> None:
        executor = self.engine.executor()
        executor.execute = partial(self._execute, executor.execute)
        self.loop = Loop(scheduler, executor)
        iterations, finished, cancelled = [deque(maxlen=KEPT) for _ in range(3)]
        self.loop.trace = Trace(iterations, finished=finished, cancelled=cancelled)
        self.lanes = Lanes()


def refused_by(new: Scheduler, loop: Loop) -> dict[Request, UserError]:
    """The requests of a loop that this scheduler cannot take over, and why."""
    old = loop.scheduler
    refused = {}
    for request in (*old.running, *old.waiting, *loop.arriving):
        try:
            new.check(request)
        except UserError as error:
            refused[request] = error
    return refused


def take_over(loop: Loop, new: Scheduler, refused: Collection[Request] = ()) -> list[Request]:
    """Replace a loop's scheduler. Returns the preempted requests.

    These were in the middle of their prefill. The new one puts all that wait in an order of its
    own, and has not seen any of them in its `add`. The old one is not asked: a user's own might
    fail. refused: whom the new one cannot serve. They are last, and it is not asked about them.
    """
    old = loop.scheduler
    moment = loop.executor.now()
    new.cost = loop.executor.cost or new.cost
    new.now = moment
    for request in old.waiting:
        if request not in refused:
            new.enqueue(request)
    new.running = old.running
    new.memory = old.memory
    for request in reversed([each for each in old.running if each.in_prefill]):
        if request not in refused:
            Scheduler.preempt(new, request)
    new.waiting.extend(request for request in old.waiting if request in refused)
    loop.scheduler = new
    preempted = Scheduler.take_preempted(new)
    for request in preempted:
        loop.trace.preempt(request, moment)
        loop.executor.release(request)
    return preempted


def budget_of(scheduler: Scheduler) -> int | None:
    """Tokens that a batch may have. None: the policy knows no such limit."""
    if isinstance(scheduler, RequestLevel | Orca):
        return None
    most = scheduler.most_tokens if isinstance(scheduler, VLLMv0) else scheduler.chunk_size
    return int(most) if most <= MOST else None  # a user's own may be infinite, or numpy's


def why(error: BaseException) -> str:
    """What is wrong, in one line. An error that is not ours may say nothing without its name."""
    own = isinstance(error, UserError)
    return one_line(error if own else f"{type(error).__name__}: {error}".removesuffix(": "))
