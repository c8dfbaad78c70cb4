"""It admits a request before it knows that there is room."""

from batch import Chunk
from scheduler import IterationLevel, next_chunk

exercise = "6"
caught_by = "K7"
message = "Admit a request only when there is room"


class Sarathi(IterationLevel):
    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = self.chunk_size - decode_rows
        started = self.started()
        request = started[0] if started else self.admit()
        return [next_chunk(request, room)] if request and room > 0 else []
