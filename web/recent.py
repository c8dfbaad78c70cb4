"""A trace that does not grow: for a server, whose run has no end."""

from collections import deque
from collections.abc import Sequence

from batch import Batch, Request
from timeline import Iteration, Trace

KEPT = 1000  # iterations, and ends of requests


class RecentTrace(Trace):
    """The last `kept` iterations, and the lives of those requests that have not ended.

    count: of all iterations. preemptions: of all requests.
    """

    def __init__(self, kept: int = KEPT):
        iterations, finished, cancelled = [deque(maxlen=kept) for _ in range(3)]
        super().__init__(iterations, finished=finished, cancelled=cancelled)
        self.count = self.preemptions = 0

    def record(
        self,
        batch: Batch,
        start: float,
        seconds: float,
        operators: dict[str, float] | None,
        ended: Sequence[Request],
    ) -> Iteration:
        iteration = super().record(batch, start, seconds, operators, ended)
        self.count += 1
        for request in ended:
            self.forget(request)
        return iteration

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self.lives.pop(request.request_id, None)

    def take_preempted(self) -> list[tuple[int, float]]:
        """(request id, time) of the preemptions since the last call."""
        preempted, self.preempted = self.preempted, []
        self.preemptions += len(preempted)
        return preempted
