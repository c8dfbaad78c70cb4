"""The last prompt token is left out, to be decoded."""

from batch import Chunk
from scheduler import IterationLevel

exercise = "6"
caught_by = "K0"
message = "The last row yields the first token"


class Sarathi(IterationLevel):
    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = self.chunk_size - decode_rows
        if room < 1:
            return []
        started = self.started()
        request = started[0] if started else self.admit()
        if not request:
            return []
        left = request.prefill_length - 1 - request.prefilled
        return [Chunk(request, request.prefilled, min(room, left))]
