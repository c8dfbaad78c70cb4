"""A preempted request gives back what is cached: in its prefill it holds more."""

from batch import Request
from scheduler import SarathiServe as Right

exercise = "8"
caught_by = "P1"
message = "held(request)"


class SarathiServe(Right):
    def preempt(self, request: Request | None = None) -> Request:
        request = request or self.running[-1]
        self.running.remove(request)
        self.memory.taken -= request.context
        if request.prefilled:
            request.preemptions += 1
            self._preempted.append(request)
        request.restart()
        self.waiting.appendleft(request)
        return request
