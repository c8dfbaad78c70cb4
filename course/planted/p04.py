"""A request decodes in the batch that ends its prefill."""

from batch import Batch
from scheduler import Sarathi as Right

exercise = "6"
caught_by = "K0"
message = "Its first token is not known until this batch ends"


class Sarathi(Right):
    def schedule(self, now: float) -> Batch | None:
        batch = super().schedule(now)
        if batch:
            batch.decodes += [chunk.request for chunk in batch.chunks if chunk.is_last]
        return batch
