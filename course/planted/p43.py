"""The oldest that waits does not fit the cache: a later one goes first."""

from batch import Chunk
from scheduler import IterationLevel, next_chunk

exercise = "6"
caught_by = "K5"
message = "Then the oldest that waits"


class Sarathi(IterationLevel):
    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = self.chunk_size - decode_rows
        if room < 1:
            return []
        started = self.started()
        request = started[0] if started else self.admit()
        if request is None and self.waiting:
            self.waiting.rotate(-1)
            request = self.admit()
        return [next_chunk(request, room)] if request else []
