"""E8, lesson 6: Sarathi-Serve's batches, and what to do when the memory runs out. About 16 lines.

`Scheduler.decodes` calls `preempt()` while the next tokens of the decodes do not fit the cache.
"""

from batch import Chunk, Request
from scheduler import IterationLevel


class SarathiServe(IterationLevel):
    """Stall-free batching (Sarathi-Serve, Algorithm 3)."""

    name = "sarathi_serve"

    def prefills(self, decode_rows: int) -> list[Chunk]:
        """As many chunks as the token budget self.chunk_size (C) has room for.

        decode_rows: rows that the decodes take. Started prompts go first, oldest first; then new
        ones, as long as `self.admit()` gives one and there is room. A request has one chunk per
        batch. Helpers: see E6.
        """
        raise NotImplementedError

    def preempt(self, request: Request | None = None) -> Request:
        """Send a running request back to the head of the queue (None: the newest). Returns it.

        self.running is in order of admission. self.memory.give(request) gives its room back. Call
        it before restart(). If a chunk of the request has run (request.chunks_run), count it in
        request.preemptions, and append it to self._preempted, so that the loop frees its slot.
        request.restart() forgets what was cached, and keeps the output. At the end, the request is
        at the left end of self.waiting, a deque.
        """
        raise NotImplementedError
