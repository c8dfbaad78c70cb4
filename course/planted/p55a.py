"""A gap of just the bound is a stall."""

from itertools import pairwise
from types import SimpleNamespace

from course.reference import p99, tbts, ttft  # noqa: F401

exercise = "9"
caught_by = "T3"
message = "longer than the bound"


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    return [(a, b - a) for a, b in pairwise(times.tokens) if b - a >= bound]
