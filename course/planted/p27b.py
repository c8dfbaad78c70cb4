"""TTFT is among the gaps."""

from itertools import pairwise
from types import SimpleNamespace

from serving.search import percentile

exercise = "9"
caught_by = "T1"
message = "The time to the first token is no gap"


def ttft(times: SimpleNamespace) -> float:
    return times.tokens[0] - times.arrival


def tbts(times: SimpleNamespace) -> list[float]:
    return [b - a for a, b in pairwise([times.arrival, *times.tokens])]


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    return [(a, b - a) for a, b in pairwise(times.tokens) if b - a > bound]


def p99(requests: list[SimpleNamespace]) -> float:
    gaps = [gap for times in requests for gap in tbts(times)]
    return percentile(gaps, 99)
