"""Priority classes: of the waiting requests, those of the most urgent class are next.

A request's class is its tag `priority`, a number: the smallest is the most urgent. Without a tag,
it is 0. If the cache is full, the newest request of the least urgent class is preempted.
"""

from batch import Request
from command.checks import Range
from scheduler import SarathiServe

CLASSES = {"priority": Range(-(2.0**63), 2.0**63, whole=False)}


class Priority(SarathiServe):
    name = "priority"
    reads = CLASSES  # so a wrong tag is refused when it arrives

    def rank(self, request: Request) -> float:
        return self.number(request, "priority")
