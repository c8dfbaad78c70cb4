"""A new prompt goes before one that has started."""

from batch import Chunk
from scheduler import IterationLevel, next_chunk

exercise = "6"
caught_by = "K5"
message = "started holds a slot: end it first"


class Sarathi(IterationLevel):
    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = self.chunk_size - decode_rows
        if room < 1:
            return []
        request = self.admit() or next(iter(self.started()), None)
        return [next_chunk(request, room)] if request else []
