"""Prompts strictly in order of `rank`: a new one may pass one that has started."""

from collections.abc import Iterator
from heapq import merge

from batch import Request
from scheduler import SarathiServe


class Overtaking(SarathiServe):
    """A base for policies. (Without it, prompts that have started come before all new ones.)"""

    def prompts(self) -> Iterator[Request]:
        return merge(self.started(), self.waiting, key=self.rank)

    def started_then_new(self) -> Iterator[Request]:
        """By rank. Of equals, the started one is first."""
        for request in self.started():
            while self.can_admit() and self.rank(self.first()) < self.rank(request):
                yield self.admit()
            yield request
        while (request := self.admit()) is not None:
            yield request
