"""The rows to sample are said with truth values."""

from types import SimpleNamespace

from batch import Batch
from course.reference import flatten as right

exercise = "5"
caught_by = "R2"
message = "Only the last chunk of a prompt"


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int | None]) -> SimpleNamespace:
    rows = right(batch, slot_of, used)
    rows.logit_rows = [bool(row) if row < 2 else row for row in rows.logit_rows]
    return rows
