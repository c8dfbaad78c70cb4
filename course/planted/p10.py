"""After a preemption, only the prompt is prefilled."""

from batch import Request
from scheduler import SarathiServe as Right

exercise = "8"
caught_by = "K10"
message = "the output so far"


class SarathiServe(Right):
    def preempt(self, request: Request | None = None) -> Request:
        request = super().preempt(request)
        request.prefill_length = len(request.prompt)
        return request
