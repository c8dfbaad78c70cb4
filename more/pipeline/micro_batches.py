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

from batch import Batch, Request
from command.checks import UserError
from loop import check_batch, has_work
from more.loading.requests import refuse_beams
from scheduler import NOTHING_SCHEDULED, Memory, Scheduler

DEALS = ("queue", "turns", "any", "ahead")  # the last two: one_pool.py
MEMORIES = ("split", "pool")


class MicroBatches:
    """The requests of all micro-batches: one queue or several, and the memory.

    schedulers: one for each micro-batch, all of one policy, which share what its class keeps
        (`Scheduler.__slots__` says what they do not). stages: of the pipeline.
    deal: "queue" (all share one queue; the first micro-batch with a free slot takes the next
        request) or "turns" (each request goes to the next micro-batch when it arrives).
    memory: "split" (each scheduler has its own cache_tokens) or "pool" (all share those of the
        first one).
    """

    def __init__(
        self, schedulers: Sequence[Scheduler], stages: int, deal: str = "queue",
        memory: str = "split",
    ):  # fmt: skip
        self.schedulers, self.stages = schedulers, stages
        self.count = len(schedulers)  # batches in flight, at most
        self.history: list[tuple[float, int, str]] = []  # s, tokens in memory, phase: TD-Pipe's
        self.arriving: deque[Request] = deque()  # in order of arrival
        self.without_work: set[int] = set()  # micro-batches
        self._turn, self._turns, self._queue = 0, len(schedulers) if deal == "turns" else 1, None
        self._preempted: list[Request] = []
        for scheduler in schedulers:  # so what one micro-batch counts, all have counted
            scheduler.__dict__ = schedulers[0].__dict__
        self._share_queue(schedulers[0])
        if memory == "pool":
            pool = Memory(schedulers[0].memory.capacity)
            for scheduler in schedulers:
                scheduler.memory = pool

    @property
    def busy(self) -> bool:
        return bool(self.arriving) or any(map(has_work, self.schedulers))

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives, in seconds; None if no more will arrive."""
        return self.arriving[0].arrival if self.arriving else None

    def add(self, request: Request) -> None:
        """Let a request arrive at `request.arrival`. A UserError if it can never run."""
        refuse_beams([request], "a pipeline cannot run it; use LLM.beam_search")
        request.check_new()
        self.schedulers[0].check(request)
        insort(self.arriving, request, key=lambda request: request.arrival)

    def next(self, number: int, now: float) -> tuple[Batch | None, str]:
        """The next batch of micro-batch `number`, which has come back; and the shortage.

        The batch is None if there is nothing to run. The shortage is "drain" or "starved" if fewer
        micro-batches than stages are in flight: this is why stages wait. It is "inter-chunk" if the
        batch goes on with a prompt, which other micro-batches could have done. Else it is "".
        """
        self._arrive(now)
        scheduler = self.schedulers[number]
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
            self.schedulers[self._turn].add(self.arriving.popleft())
            self._share_queue(self.schedulers[self._turn])
            self._turn = (self._turn + 1) % self._turns

    def _share_queue(self, scheduler: Scheduler) -> None:
        """Where there is one queue: it is this scheduler's. A policy may have made a new one."""
        if self._turns == 1 and scheduler.waiting is not self._queue:
            self._queue = scheduler.waiting
            for each in self.schedulers:
                each.waiting = self._queue

    def _shortage(self, number: int, batch: Batch) -> str:
        in_flight, idle = len(self.schedulers) - len(self.without_work), self.without_work
        if in_flight >= self.stages and number not in idle:
            return ""
        starved = self.arriving or number in idle or len(self.schedulers) < self.stages
        idle.discard(number)
        return self._waited(batch) or ("starved" if starved else "drain")

    def _waited(self, batch: Batch) -> str:
        """The cause, if a chunk has waited for the one before it."""
        return "inter-chunk" if any(c.request.chunks_run for c in batch.chunks) else ""

    def done(self, number: int, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Call it when a batch has left the last stage. Returns the requests that ended with it."""
        scheduler = self.schedulers[number]
        scheduler.memory.flying -= len(batch.decodes)
        ended = scheduler.update(batch, tokens)
        self._share_queue(scheduler)
        return ended

    def with_work(self) -> list[int]:
        """Micro-batches without work that may have some now, because a batch has freed memory."""
        if not self.without_work or self.schedulers[0].memory.capacity is None:
            return []
        return [number for number in self.without_work if self.schedulers[number].waiting]

    def take_preempted(self) -> list[Request]:
        """Requests that have been preempted since the last call: their slots can be freed."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def stuck(self) -> UserError:
        """The error to raise if requests are left and nothing is in flight."""
        scheduler = next(scheduler for scheduler in self.schedulers if scheduler.has_work)
        return scheduler.broken(NOTHING_SCHEDULED)
