"""The context grows with the first output token: it is not cached yet."""

from collections.abc import Sequence

from batch import Batch, Request
from scheduler import Sarathi as Right

exercise = "6"
caught_by = "K6"
message = "cached when it is fed"


class Sarathi(Right):
    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        ended = super().update(batch, tokens)
        for chunk in batch.chunks:
            if chunk.is_last:
                chunk.request.context += 1
        return ended
