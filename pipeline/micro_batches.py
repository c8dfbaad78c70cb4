"""The level above the schedulers: which requests a pipeline's micro-batches hold.

Pipeline parallelism gives each of S stages some of the layers. To keep all of them busy, M
micro-batches are in flight: groups of requests, each with a scheduler of its own. A micro-batch
runs one iteration on stage 0, then on stage 1, and so on. Only when it has left the last stage are
its next tokens known. Then its scheduler says what its next iteration runs.

    stage 0 | A0 | B0 | A1 | B1      M = S = 2 micro-batches A and B, all iterations alike:
    stage 1      | A0 | B0 | A1      no stage ever waits, once the pipeline is full

The simulated clock (pipeline/simulate.py) and the real stages (pipeline/stages.py) both drive a
`MicroBatches`. TD-Pipe decides for all micro-batches together. It is another class with the same
methods (pipeline/td_pipe.py).
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence

from batch import Batch, Request
from configs import UserError, check_whole
from scheduler import NOTHING_SCHEDULED, Memory, Scheduler, check_batch
from simulate import refuse_beams

DEALS = ("queue", "turns")
MEMORIES = ("split", "pool")


class MicroBatches:
    """Queue, dealing, memory, refills, and why too few micro-batches are in flight.

    schedulers: one for each micro-batch. stages: of the pipeline.
    deal: "queue" (all share one queue, and the first with a free slot takes the next request) or
        "turns" (requests are dealt out on arrival).
    memory: "split" (each scheduler's cache_tokens are its own) or "pool" (they are of all together:
        those of the first scheduler count).
        With "turns" and "pool" together, a long prompt can wait for as long as short ones come:
        the queues do not know of each other.
    refill_every: 8, say: a micro-batch that has work lets new requests in only at every eighth of
        its iterations, so that all refill in step.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        stages: int,
        deal: str = "queue",
        memory: str = "split",
        refill_every: int = 1,
    ):
        for what, value, allowed in (("deal", deal, DEALS), ("memory", memory, MEMORIES)):
            if value not in allowed:
                raise UserError(f"unknown {what} {value!r}: choose from {', '.join(allowed)}")
        check_whole("refill_every", refill_every)
        self.schedulers, self.stages, self.refill_every = schedulers, stages, refill_every
        self.count = len(schedulers)  # batches in flight, at most
        self.history: list[tuple[float, int, str]] = []  # s, tokens in memory, phase: TD-Pipe's
        self.arriving: deque[Request] = deque()  # in order of arrival
        self.without_work: set[int] = set()  # micro-batches
        self.iterations = [0] * len(schedulers)
        self._turn, self._turns = 0, len(schedulers) if deal == "turns" else 1
        self._preempted: list[Request] = []
        if deal == "queue":
            for scheduler in schedulers:
                scheduler.waiting = schedulers[0].waiting
        if memory == "pool":
            pool = Memory(schedulers[0].memory.capacity)
            for scheduler in schedulers:
                scheduler.memory = pool

    @property
    def busy(self) -> bool:
        return bool(self.arriving or any(scheduler.has_work for scheduler in self.schedulers))

    @property
    def next_arrival(self) -> float | None:
        """Seconds; None if nobody else will arrive."""
        return self.arriving[0].arrival if self.arriving else None

    def add(self, request: Request) -> None:
        """Let a request arrive at `request.arrival`. A UserError if it can never run."""
        refuse_beams([request], "the stages of a pipeline run none; LLM.beam_search does")
        self.schedulers[0].check(request)
        insort(self.arriving, request, key=lambda request: request.arrival)

    def next(self, number: int, now: float) -> tuple[Batch | None, str]:
        """What micro-batch `number`, which has come back, runs next, and the shortage.

        The batch is None if it runs nothing. The shortage is "drain" or "starved" if fewer
        micro-batches than stages are in flight: then that is why stages wait. Else it is "".
        """
        self._arrive(now)
        scheduler = self.schedulers[number]
        if scheduler.running and self.iterations[number] % self.refill_every:
            batch = schedule_closed(scheduler, now)
        else:
            batch = scheduler.schedule(now)
        self.iterations[number] += 1
        self._preempted += scheduler.take_preempted()
        if batch is None:
            self.without_work.add(number)
            return None, ""
        check_batch(scheduler, batch)
        scheduler.memory.flying += len(batch.decodes)
        return batch, self._shortage(number)

    def _arrive(self, now: float) -> None:
        while self.arriving and self.arriving[0].arrival <= now:
            self.schedulers[self._turn].add(self.arriving.popleft())
            self._turn = (self._turn + 1) % self._turns

    def _shortage(self, number: int) -> str:
        in_flight, idle = len(self.schedulers) - len(self.without_work), self.without_work
        if in_flight >= self.stages and number not in idle:
            return ""
        starved = self.arriving or number in idle or len(self.schedulers) < self.stages
        idle.discard(number)
        return "starved" if starved else "drain"

    def done(self, number: int, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """A batch of micro-batch `number` has left the last stage; the requests that it ended."""
        self.schedulers[number].memory.flying -= len(batch.decodes)
        return self.schedulers[number].update(batch, tokens)

    def with_work(self) -> list[int]:
        """Micro-batches that had no work, and may have some now that a batch is done."""
        if not self.without_work or self.schedulers[0].memory.capacity is None:
            return []
        return [number for number in self.without_work if self.schedulers[number].waiting]

    def take_preempted(self) -> list[Request]:
        """Requests that have been preempted since the last call: their slots can be freed."""
        if not self._preempted:
            return self._preempted
        preempted, self._preempted = self._preempted, []
        return preempted

    def stuck(self) -> UserError:
        """What to raise if requests are left and nothing is in flight."""
        scheduler = next(scheduler for scheduler in self.schedulers if scheduler.has_work)
        return scheduler.broken(NOTHING_SCHEDULED)


def schedule_closed(scheduler: Scheduler, now: float) -> Batch | None:
    """The next batch without anybody new in it."""
    queue, scheduler.waiting = scheduler.waiting, deque()
    batch = scheduler.schedule(now)
    queue.extendleft(reversed(scheduler.waiting))  # those that it has preempted
    scheduler.waiting = queue
    return batch
