"""E6, lesson 4: SARATHI's chunk. About 7 lines.

`IterationLevel.schedule` has collected the decodes. You pick what runs beside them.
"""

from batch import Chunk
from scheduler import IterationLevel


class Sarathi(IterationLevel):
    """Chunked prefills and decode-maximal batching (SARATHI, Sec 4.2 to 4.4)."""

    name = "sarathi"

    def prefills(self, decode_rows: int) -> list[Chunk]:
        """The chunks of the next batch: none or one.

        decode_rows: rows that the decodes take. The whole batch may have self.chunk_size rows (C).

        A prompt that has started goes on first; else the oldest that waits is admitted. The chunk
        fills the batch up to C rows, or to the end of its prompt. If the decodes fill C already,
        there is no chunk, and nobody is admitted.

        self.started() -> running requests that are still in their prefill, oldest first.
        self.admit() -> the next waiting request, which then runs; None if none can.
        self.plan(request, room) -> its next chunk, of at most `room` tokens, for this batch.
        """
        raise NotImplementedError
