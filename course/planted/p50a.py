"""The tokens in a slot are never counted: positions come from the request."""

from types import SimpleNamespace

from batch import Batch
from course.reference import flatten as right

exercise = "5"
caught_by = "R1"
message = "grows with each token"


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int | None]) -> SimpleNamespace:
    for request in batch.decodes:
        used[slot_of[request.request_id]] = request.context
    for chunk in batch.chunks:
        if chunk.start:
            used[slot_of[chunk.request.request_id]] = chunk.start
    rows = right(batch, slot_of, used)
    used[:] = [None if tokens is None else 0 for tokens in used]
    return rows
