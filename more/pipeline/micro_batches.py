"""The level above the schedulers: which requests a pipeline's micro-batches hold.

Pipeline parallelism gives each of S stages some of the layers. To keep all stages busy, M
micro-batches are in flight: groups of requests, each with a scheduler of its own. A micro-batch
runs one iteration on stage 0, then on stage 1, and so on. Its next tokens are known when it has
left the last stage. Then its scheduler plans its next iteration.

    stage 0 | A0 | B0 | A1 | B1      M = S = 2 micro-batches A and B, all iterations alike:
    stage 1      | A0 | B0 | A1      no stage ever waits, once the pipeline is full

The simulated clock (more/pipeline/simulate.py) and the real stages (more/pipeline/stages.py) both
drive a `MicroBatches`. TD-Pipe decides for all micro-batches together. It is another class with the
same methods (more/pipeline/td_pipe.py).
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from copy import copy
from math import inf

from batch import Batch, Request
from command.checks import UserError
from loop import check_batch, has_work
from more.loading.requests import refuse_beams
from scheduler import NOTHING_SCHEDULED, Memory, Scheduler

DEALS = ("queue", "turns", "any", "ahead")  # the last two: one_pool.py
MEMORIES = ("split", "pool")


class Pool(Memory):
    """A memory that also counts what is in flight: the next tokens of decodes on their way."""

    flying = 0

    @property
    def room(self) -> float:
        return inf if self.capacity is None else self.capacity - self.taken - self.flying


class MicroBatches:
    """The requests of all micro-batches: one queue or several, and the memory.

    scheduler: takes the requests and the memory of one micro-batch after the other (`use`). What
        its policy counts beside them, it counts for all, but for the names in its attribute `own`,
        if it has one. groups: of requests, at first one for each micro-batch. stages: of the
        pipeline.
    deal: "queue" (all share one queue; the first micro-batch with a free slot takes the next
        request) or "turns" (each request goes to the next micro-batch when it arrives).
    memory: "split" (each scheduler has its own cache_tokens) or "pool" (all share those of the
        first one).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        groups: int,
        stages: int,
        deal: str = "queue",
        memory: str = "split",
    ):
        self.scheduler = scheduler
        self.stages = stages
        self.count = groups  # batches in flight, at most
        self.history: list[tuple[float, int, str]] = []  # s, tokens in memory, phase: TD-Pipe's
        self.arriving: deque[Request] = deque()  # in order of arrival
        self.without_work: set[int] = set()  # micro-batches
        self._turn = 0
        self._turns = groups if deal == "turns" else 1
        self._queue = None
        self._preempted: list[Request] = []
        capacity = scheduler.memory.capacity
        more = getattr(scheduler, "own", ())  # what a policy has for each group, by its own words
        self.own = ("_preempted", "memory", "running", "waiting", *more)
        scheduler.memory = Pool(capacity)
        self.states = []  # of each group: what it has for itself
        for _ in range(groups):
            pool = scheduler.memory if memory == "pool" else Pool(capacity)
            state = {"_preempted": [], "memory": pool, "running": [], "waiting": deque()}
            self.states.append(state | {name: getattr(scheduler, name) for name in more})
        vars(scheduler).update(self.states[0])
        self._group = 0  # whose state the scheduler has
        self._share_queue(scheduler)

    def use(self, group: int) -> Scheduler:
        """The scheduler, with the requests and the memory of this group."""
        if group != self._group:
            now = vars(self.scheduler)
            state = self.states[self._group]
            for name in self.own:
                state[name] = now[name]
            now.update(self.states[group])
            self._group = group
        return self.scheduler

    @property
    def schedulers(self) -> list[Scheduler]:
        """The scheduler of each group, as it is now: to look at."""
        return [copy(self.use(group)) for group in range(len(self.states))]

    @property
    def busy(self) -> bool:
        if self.arriving or has_work(self.scheduler):
            return True
        others = [group for group in range(len(self.states)) if group != self._group]
        return any(has_work(self.use(group)) for group in others)

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives, in seconds; None if no more will arrive."""
        return self.arriving[0].arrival if self.arriving else None

    def add(self, request: Request) -> None:
        """Let a request arrive at `request.arrival`. A UserError if it can never run."""
        refuse_beams([request], "a pipeline cannot run it; use LLM.beam_search")
        request.check_new()
        self.scheduler.check(request)
        insort(self.arriving, request, key=lambda request: request.arrival)

    def next(self, number: int, now: float) -> tuple[Batch | None, str]:
        """The next batch of micro-batch `number`, which has come back; and the shortage.

        The batch is None if there is nothing to run. The shortage is "drain" or "starved" if fewer
        micro-batches than stages are in flight: this is why stages wait. It is "inter-chunk" if the
        batch goes on with a prompt, which other micro-batches could have done. Else it is "".
        """
        self.scheduler.now = now
        self._arrive(now)
        scheduler = self.use(number)
        batch = scheduler.schedule(now)
        self._share_queue(scheduler)
        if not self._sets_out(number, scheduler, batch):
            return None, ""
        return batch, self._shortage(number, batch)

    def _sets_out(self, number: int, scheduler: Scheduler, batch: Batch | None) -> bool:
        """Whether there is a batch. It is checked, and its next tokens are in flight."""
        self._preempted += scheduler.take_preempted()
        if batch is None:
            self.without_work.add(number)
            return False
        check_batch(scheduler, batch)
        scheduler.memory.flying += len(batch.decodes)
        return True

    def _arrive(self, now: float) -> None:
        while self.arriving and self.arriving[0].arrival <= now:
            scheduler = self.use(self._turn)
            scheduler.add(self.arriving.popleft())
            self._share_queue(scheduler)
            self._turn = (self._turn + 1) % self._turns

    def _share_queue(self, scheduler: Scheduler) -> None:
        """Where there is one queue: it is this scheduler's. A policy may have made a new one."""
        if self._turns == 1 and scheduler.waiting is not self._queue:
            self._queue = scheduler.waiting
            for state in self.states:
                state["waiting"] = self._queue

    def _shortage(self, number: int, batch: Batch) -> str:
        in_flight = len(self.states) - len(self.without_work)
        idle = self.without_work
        if in_flight >= self.stages and number not in idle:
            return ""
        starved = self.arriving or number in idle or len(self.states) < self.stages
        idle.discard(number)
        return self._waited(batch) or ("starved" if starved else "drain")

    def _waited(self, batch: Batch) -> str:
        """The cause, if a chunk has waited for the one before it."""
        return "inter-chunk" if any(c.request.chunks_run for c in batch.chunks) else ""

    def done(self, number: int, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Call it when a batch has left the last stage. Returns the requests that ended with it."""
        scheduler = self.use(number)
        scheduler.memory.flying -= len(batch.decodes)
        ended = scheduler.update(batch, tokens)
        self._share_queue(scheduler)
        return ended

    def with_work(self) -> list[int]:
        """Micro-batches without work that may have some now, because a batch has freed memory."""
        if not self.without_work or self.scheduler.memory.capacity is None:
            return []
        return [number for number in self.without_work if self.use(number).waiting]

    def take_preempted(self) -> list[Request]:
        """Requests that have been preempted since the last call: their slots can be freed."""
        preempted = self._preempted
        self._preempted = []
        return preempted

    def take_rejected(self) -> list[Request]:
        """Requests that the policy has rejected since the last call: their slots can be freed."""
        rejected = self.scheduler.rejected
        self.scheduler.rejected = []
        return rejected

    def stuck(self) -> UserError:
        """The error to raise if requests are left and nothing is in flight."""
        return self.scheduler.broken(NOTHING_SCHEDULED)
