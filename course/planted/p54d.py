"""The rows of a product are no whole numbers."""

from course.reference import padded as right
from course.reference import seconds  # noqa: F401

exercise = "7"
caught_by = "Q2"
message = "256 fills two tiles"


def padded(rows: int) -> float:
    return float(right(rows))
