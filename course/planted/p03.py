"""The chunk is always C - (B - 1), however few decodes ride."""

from batch import Chunk
from scheduler import IterationLevel, next_chunk

exercise = "6"
caught_by = "K3"
message = "Decodes that ride"


class Sarathi(IterationLevel):
    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = max(1, self.chunk_size - (self.max_batch_size - 1))
        if decode_rows + room > self.chunk_size:
            return []
        started = self.started()
        request = started[0] if started else self.admit()
        return [next_chunk(request, room)] if request else []
