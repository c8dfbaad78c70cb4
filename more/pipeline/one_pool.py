"""One scheduler for all micro-batches: no request belongs to one, and chunks need not wait.

`MicroBatches` gives each micro-batch a scheduler and requests of its own. Here, whoever comes to
stage 0 next asks the one scheduler for a batch of any requests that are here. Two rules say who is:

    a decode, and the last chunk of a prompt    not before its token has come back
    any other chunk of a prompt                 at once: the next chunk may follow it into stage 0

The second rule is *chunked pipeline parallelism*. A chunk needs keys and values of the chunks
before it, and no token of theirs. On each stage, they have run when it comes. So the progress of a
prompt counts when a chunk is scheduled, not when it has come back (vLLM V1: pull request 13637;
SGLang: lmsys.org/blog/2026-01-15-chunked-pipeline; Medha's SPP: arXiv 2409.17264).

    stage 0 | P0 | P1 | P2 | P3 |          one prompt of four chunks, S = 2 stages. In
    stage 1      | P0 | P1 | P2 | P3 |     `MicroBatches`, P1 starts when P0 has left stage 1

A chunk that is in flight when its request is preempted is not in the trace's `recomputed`.

Decodes are not dealt out: a policy that takes all that are here, takes all (as vLLM V1 does).
`away` and `shares` let one take its share (more/policies/token_throttling.py).
"""

from collections.abc import Sequence

from batch import Batch, Request
from more.pipeline.micro_batches import MicroBatches
from scheduler import Scheduler


class OnePool(MicroBatches):
    """See above. scheduler: with B and the memory of all micro-batches. count: M.

    ahead: whether a prompt's next chunk may enter before the last one has come back.
    """

    def __init__(self, scheduler: Scheduler, stages: int, count: int, ahead: bool = True):
        super().__init__(scheduler, 1, stages)
        self.count = count
        self.ahead = ahead
        self.most = scheduler.max_batch_size
        self.flying: dict[int, Batch] = {}  # by micro-batch
        scheduler.shares = count

    def next(self, number: int, now: float) -> tuple[Batch | None, str]:
        """See `MicroBatches.next`."""
        self.scheduler.now = now
        self._arrive(now)
        scheduler = self.scheduler
        everyone = self.scheduler.running
        away = self._away()
        scheduler.away = [request for request in everyone if request in away]
        scheduler.running = [request for request in everyone if request not in away]
        scheduler.max_batch_size = self.most - len(away)
        try:
            batch = scheduler.schedule(now)
        finally:  # in order of admission
            left = away.union(scheduler.running)
            known = set(everyone)
            new = [request for request in scheduler.running if request not in known]
            scheduler.running = [request for request in everyone if request in left] + new
            scheduler.max_batch_size = self.most
            scheduler.away = []
        if not self._sets_out(number, scheduler, batch):
            return None, ""
        self.without_work.discard(number)
        self.flying[number] = batch
        shortage = ""
        if self.count - len(self.without_work) < self.stages:
            shortage = "starved" if self.arriving or self.count < self.stages else "drain"
            shortage = shortage if self.ahead else self._waited(batch) or shortage
        for chunk in batch.chunks:
            if not chunk.is_last and self.ahead:  # what `update` does when it has come back
                request = chunk.request
                request.prefilled = request.context = chunk.start + chunk.length
                request.chunks_run += 1
        return batch, shortage

    def _away(self) -> set[Request]:
        """Running requests whose next step depends on what is in flight."""
        away: set[Request] = set()
        for batch in self.flying.values():
            away.update(batch.sampled if self.ahead else [c.request for c in batch.chunks])
            away.update(batch.decodes)
        return away

    def done(self, number: int, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """See `MicroBatches.done`. Chunks that counted when they were scheduled are left out."""
        del self.flying[number]
        left = [chunk for chunk in batch.chunks if chunk.is_last or not self.ahead]
        return super().done(0, Batch(left, batch.decodes), tokens)

    def with_work(self) -> list[int]:
        """See `MicroBatches.with_work`: what has come back is work for all."""
        scheduler = self.scheduler
        here = scheduler.waiting or not self._away().issuperset(scheduler.running)
        return sorted(self.without_work) if here else []
