"""Shortest output first: of the waiting requests, the one with the fewest predicted tokens is next.

What is predicted is the tag `predicted_tokens`. It comes from a file, from a client, or from
serving/lengths.py, which also says how large the error is. Requests without such a number are last.
"""

import math

from batch import Batch, Request
from scheduler import SarathiServe


class ShortestOutput(SarathiServe):
    name = "shortest_output"

    def schedule(self, now: float) -> Batch | None:
        order = sorted(self.waiting, key=self.length)  # stable: of equals, first come, first served
        self.waiting.clear()  # in place: the micro-batches of a pipeline share one queue
        self.waiting.extend(order)
        return super().schedule(now)

    def length(self, request: Request) -> float:
        told = request.tags.get("predicted_tokens", "")
        return float(told) if told.isdecimal() else math.inf
