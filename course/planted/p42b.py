"""A request without output is preempted, and its slot is not freed."""

from batch import Request
from scheduler import SarathiServe as Right
from scheduler import held

exercise = "8"
caught_by = "K7"
message = "so that the loop frees its slot"


class SarathiServe(Right):
    def preempt(self, request: Request | None = None) -> Request:
        request = request or self.running[-1]
        self.running.remove(request)
        self.memory.taken -= held(request)
        if request.output:
            request.preemptions += 1
            self._preempted.append(request)
        request.restart()
        self.waiting.appendleft(request)
        return request
