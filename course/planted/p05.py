"""Decodes wait while a chunk runs."""

from batch import Batch
from scheduler import Sarathi as Right

exercise = "6"
caught_by = "K2"
message = "could decode and waits"


class Sarathi(Right):
    def schedule(self, now: float) -> Batch | None:
        chunks = self.prefills(0)
        return Batch(chunks, []) if chunks else self.decode_only()
