"""It waits until the room holds a full chunk."""

from batch import Chunk
from scheduler import Sarathi as Right

exercise = "6"
caught_by = "K3"
message = "Rows that stay empty"


class Sarathi(Right):
    def prefills(self, decode_rows: int) -> list[Chunk]:
        if 0 < decode_rows and self.chunk_size - decode_rows < self.chunk_size:
            return []
        return super().prefills(decode_rows)
