"""It preempts the oldest request."""

from batch import Request
from scheduler import SarathiServe as Right

exercise = "8"
caught_by = "K9"
message = "nobody is sure to end"


class SarathiServe(Right):
    def preempt(self, request: Request | None = None) -> Request:
        return super().preempt(request or self.running[0])
