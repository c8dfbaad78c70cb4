"""The P99 of each request's mean gap."""

from itertools import pairwise
from statistics import mean
from types import SimpleNamespace

from serving.search import percentile

exercise = "9"
caught_by = "T2"
message = "a mean hides the stall"


def ttft(times: SimpleNamespace) -> float:
    return times.tokens[0] - times.arrival


def tbts(times: SimpleNamespace) -> list[float]:
    return [b - a for a, b in pairwise(times.tokens)]


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    return [(a, b - a) for a, b in pairwise(times.tokens) if b - a > bound]


def p99(requests: list[SimpleNamespace]) -> float:
    means = [mean(tbts(times)) for times in requests if len(times.tokens) > 1]
    return percentile(means, 99)
