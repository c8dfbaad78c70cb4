"""Where a request is named, the oldest goes."""

from batch import Request
from scheduler import SarathiServe as Right

exercise = "8"
caught_by = "P1"
message = "The caller may name the request"


class SarathiServe(Right):
    def preempt(self, request: Request | None = None) -> Request:
        return super().preempt(self.running[0] if request else None)
