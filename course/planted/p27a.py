"""TTFT counts from the first iteration."""

from itertools import pairwise
from types import SimpleNamespace

from serving.search import percentile

exercise = "9"
caught_by = "T1"
message = "TTFT counts from the arrival"


def ttft(times: SimpleNamespace) -> float:
    return times.tokens[0] - times.scheduled


def tbts(times: SimpleNamespace) -> list[float]:
    return [b - a for a, b in pairwise(times.tokens)]


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    return [(a, b - a) for a, b in pairwise(times.tokens) if b - a > bound]


def p99(requests: list[SimpleNamespace]) -> float:
    gaps = [gap for times in requests for gap in tbts(times)]
    return percentile(gaps, 99)
