"""Solutions as a student may write them, where the project's own code has another form.

`course.reference` has that one, behind an adapter. `course.plants.right` puts these into the stubs.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING

from batch import Batch
from course.stubs.e05 import Rows
from serving.search import percentile

if TYPE_CHECKING:  # torch is heavy; where these methods run, the stub of E2 has imported both
    from torch import Tensor

    from kvcache import CacheError  # noqa: TC004


class Slots:
    def allocate(self) -> int:
        if None not in self.used:
            raise CacheError("no slot is free")
        slot = self.used.index(None)
        self.used[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        if self.used[slot] is None:
            raise CacheError("it is free")
        self.used[slot] = None

    def extend(self, slot: int, tokens: int) -> int:
        start = self.used[slot]
        if start is None or start + tokens > self.length:
            raise CacheError("they do not fit")
        self.used[slot] = start + tokens
        return start

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        for cache, new in ((self.k, k), (self.v, v)):
            cache[layer][:, slots, positions] = new.transpose(0, 1)


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int | None]) -> Rows:
    tokens, slots, positions, logit_rows = [], [], [], []
    for chunk in batch.chunks:
        request, end = chunk.request, chunk.start + chunk.length
        if chunk.start == 0:
            slot_of[request.request_id] = used.index(None)
            used[slot_of[request.request_id]] = 0
        slot = slot_of[request.request_id]
        tokens += request.tokens(chunk.start, end)
        slots += [slot] * chunk.length
        positions += range(chunk.start, end)
        used[slot] += chunk.length
        if chunk.is_last:
            logit_rows.append(len(tokens) - 1)
    for request in batch.decodes:
        slot = slot_of[request.request_id]
        logit_rows.append(len(tokens))
        tokens.append(request.output[-1])
        slots.append(slot)
        positions.append(used[slot])
        used[slot] += 1
    return Rows(tokens, slots, positions, logit_rows)


def ttft(times: SimpleNamespace) -> float:
    return times.tokens[0] - times.arrival


def tbts(times: SimpleNamespace) -> list[float]:
    return [b - a for a, b in pairwise(times.tokens)]


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    return [(a, b - a) for a, b in pairwise(times.tokens) if b - a > bound]


def p99(requests: list[SimpleNamespace]) -> float:
    return percentile([gap for times in requests for gap in tbts(times)], 99)


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    ends = [start + work for start, work in zip(starts[-1], seconds[-1], strict=True)]
    early, late = sum(starts[0]), sum(max(ends) - end for end in ends)
    whole = len(ends) * max(ends) - sum(map(sum, seconds))
    return {"start-up": early, "drain": late, "bubble": whole - early - late}


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    size = min(most, -(-total // groups))
    keep = own[:size]
    more = max(0, size - len(keep))
    return keep + withheld[:more], withheld[more:] + own[len(keep) :]
