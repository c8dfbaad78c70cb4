"""A prefill claims tokens that no prompt has, to fill a batch."""

from batch import Request
from scheduler import SarathiServe

exercise = "final"
caught_by = "K0"
message = "and after a preemption the output so far"


class Mine(SarathiServe):
    def admit(self) -> Request | None:
        request = super().admit()
        if request:
            request.prefill_length += 3
            self.memory.taken += 3
        return request
