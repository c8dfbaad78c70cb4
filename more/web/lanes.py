"""An iteration in JSON, as both pages draw it."""

import heapq
from collections.abc import Iterable


class Lanes:
    """The lane of each request in the picture: the lowest one free when its prefill starts."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}  # request id -> its lane
        self.free: list[int] = []  # lanes that were given back: a heap

    def leave(self, own: int) -> None:
        """A request has ended, or was preempted. Nothing happens if it has no lane."""
        if own in self.of:
            heapq.heappush(self.free, self.of.pop(own))

    def rows(self, chunks: Iterable[tuple], decodes: Iterable[int]) -> dict[str, list]:
        """The `timeline.contents` of a batch for JSON. Newcomers get a lane.

        chunks: [request id, lane, first token, tokens, whether it is the last of its prefill] of
        each. decodes: [request id, lane] of each.
        """
        of = self.of
        for own, *_ in chunks:
            if own not in of:
                of[own] = heapq.heappop(self.free) if self.free else len(of)
        shown = [[own, of[own], first, n, first + n == whole] for own, first, n, whole in chunks]
        return {"chunks": shown, "decodes": [[own, of[own]] for own in decodes]}
