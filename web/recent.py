"""A trace that does not grow, for a server that runs for ever."""

from collections import deque

from batch import Request
from timeline import Trace

KEPT = 1000  # iterations, and ends of requests


class RecentTrace(Trace):
    """The last `kept` iterations, and the lives of those requests that have not ended."""

    def __init__(self, kept: int = KEPT):
        iterations, finished, cancelled = [deque(maxlen=kept) for _ in range(3)]
        super().__init__(iterations, finished=finished, cancelled=cancelled)

    def forget(self, request: Request) -> None:
        """Drop the times of a request that has ended."""
        self.lives.pop(request.request_id, None)

    def take_preempted(self) -> list[tuple[int, float]]:
        """(request id, time) of the preemptions since the last call."""
        preempted, self.preempted = self.preempted, []
        return preempted
