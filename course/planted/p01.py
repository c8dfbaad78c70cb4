"""room = C: the decodes come on top."""

from batch import Chunk
from scheduler import IterationLevel, next_chunk

exercise = "6"
caught_by = "K1"
message = "C counts the decodes"


class Sarathi(IterationLevel):
    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = self.chunk_size
        if decode_rows >= room:
            return []
        started = self.started()
        request = started[0] if started else self.admit()
        return [next_chunk(request, room)] if request else []
