"""E9, lesson 7: the words of serving. About 8 lines: four short functions.

`times` is one request: times.arrival, times.scheduled (the start of its first iteration) and
times.tokens (when each output token came). All are seconds; there is at least one token.
"""

from types import SimpleNamespace

from more.serving.search import percentile


def ttft(times: SimpleNamespace) -> float:
    """Time to first token, in seconds: what a reader waits from the arrival on."""
    raise NotImplementedError


def tbts(times: SimpleNamespace) -> list[float]:
    """Times between tokens, in seconds: the gaps between one token and the next."""
    raise NotImplementedError


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    """Gaps longer than `bound`: (time of the token before the gap, seconds of the gap) of each."""
    raise NotImplementedError


def p99(requests: list[SimpleNamespace]) -> float:
    """The P99 of the times between tokens of all requests.

    percentile(values, 99) interpolates as numpy does, and is 0.0 where there are no values.
    """
    raise NotImplementedError
