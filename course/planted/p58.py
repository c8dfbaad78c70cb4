"""What ends in its first batch never runs: it is taken from the queue, and not admitted."""

from batch import Batch, Chunk
from scheduler import SarathiServe

exercise = "final"
caught_by = "K0"
message = "Take it in with `admit`"


class Mine(SarathiServe):
    def schedule(self, now: float) -> Batch | None:
        if self.waiting and not self.running and self.memory.capacity is None:
            first = self.waiting[0]
            if first.max_tokens == 1 and len(first.prompt) <= self.chunk_size:
                self.waiting.popleft()
                self.memory.taken += first.prefill_length
                return Batch([Chunk(first, 0, len(first.prompt))], [])
        return super().schedule(now)
