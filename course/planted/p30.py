"""It counts decodes, not output tokens, up to max_tokens."""

from collections.abc import Sequence

from batch import Batch, Request
from scheduler import Sarathi as Right

exercise = "6"
caught_by = "K10"
message = "The prefill's token counts"


class Sarathi(Right):
    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        for chunk in batch.chunks:
            if chunk.is_last:
                chunk.request.max_tokens += 1
        return super().update(batch, tokens)
