"""Priority classes: of the waiting requests, those of the most urgent class are next.

A request's class is its tag `priority`, a number: the smallest is the most urgent. Without a tag,
it is 0. If the cache is full, the newest request of the least urgent class is preempted.
"""

from collections import deque

from batch import Batch, Request
from command.checks import Range, tag_number
from scheduler import SarathiServe

CLASSES = Range(-(2.0**63), 2.0**63, whole=False)


class Priority(SarathiServe):
    name, reads = "priority", {"priority": CLASSES}  # so a wrong tag is refused when it arrives

    def schedule(self, now: float) -> Batch | None:
        # sorting is stable: first come, first served in a class
        self.waiting = deque(sorted(self.waiting, key=self.rank))
        return super().schedule(now)

    def started(self) -> list[Request]:
        return sorted(super().started(), key=self.rank)

    def preempt(self, request: Request | None = None) -> Request:
        if request is None:  # of equals, max takes the first: so begin with the newest
            request = max(reversed(self.running), key=self.rank)
        return super().preempt(request)

    def rank(self, request: Request) -> float:
        return tag_number(request, "priority", CLASSES)
