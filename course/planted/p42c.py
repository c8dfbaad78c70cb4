"""A request that has never run counts as preempted."""

from batch import Request
from scheduler import SarathiServe as Right
from scheduler import held

exercise = "8"
caught_by = "P1"
message = "no preemption to count"


class SarathiServe(Right):
    def preempt(self, request: Request | None = None) -> Request:
        request = request or self.running[-1]
        self.running.remove(request)
        self.memory.taken -= held(request)
        request.preemptions += 1
        if request.prefilled:
            self._preempted.append(request)
        request.restart()
        self.waiting.appendleft(request)
        return request
