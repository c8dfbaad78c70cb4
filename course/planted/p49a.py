"""Each gap is the mean one: their number and their sum are right."""

from types import SimpleNamespace

from course.reference import p99, stalls, ttft  # noqa: F401

exercise = "9"
caught_by = "T1"
message = "one token and the next"


def tbts(times: SimpleNamespace) -> list[float]:
    gaps = len(times.tokens) - 1
    return [(times.tokens[-1] - times.tokens[0]) / gaps] * gaps if gaps else []
