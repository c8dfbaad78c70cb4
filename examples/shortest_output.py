"""Shortest output first: of the waiting requests, the one with the fewest predicted tokens is next.

What is predicted is the tag `predicted_tokens`. It comes from a file, from a client, or from
more/serving/lengths.py, which also says how large the error is. Requests without such a number are
last.
"""

import math
from collections import deque

from batch import Batch, Request
from scheduler import SarathiServe


class ShortestOutput(SarathiServe):
    name = "shortest_output"

    def schedule(self, now: float) -> Batch | None:
        # sorting is stable: of equals, first come, first served
        self.waiting = deque(sorted(self.waiting, key=self.length))
        return super().schedule(now)

    def length(self, request: Request) -> float:
        told = request.tags.get("predicted_tokens", "")
        return float(told) if told.isdecimal() else math.inf
