"""Priority classes: of the waiting requests, those of the most urgent class are next.

A request's class is its tag `priority`, a whole number: 0, where there is no tag, is the most
urgent. If the cache is full, the newest request of the least urgent class is preempted.
"""

from collections import deque

from batch import Batch, Request
from scheduler import SarathiServe


class Priority(SarathiServe):
    name = "priority"

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

    def rank(self, request: Request) -> int:
        try:
            return int(request.tags.get("priority", 0))
        except ValueError:
            found = request.tags["priority"]
            raise self.broken(f"priority is {found!r}; it must be a whole number") from None
