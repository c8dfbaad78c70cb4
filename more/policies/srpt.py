"""Shortest remaining output first, by predicted lengths, with limited preemption (TRAIL).

Of those that wait, the one with the fewest predicted tokens left is next. If it has no room, it
takes that of the running request with the most left. But only of a young one: who has run the share
c of its prediction keeps its place, since a large cache would be computed again (Shahout et al.,
ICLR 2025, arXiv 2410.01035). The order alone: "learning to rank" (Fu et al., NeurIPS 2024, arXiv
2408.15792).

The prediction is the tag `predicted_tokens` (more/serving/lengths.py): any number from 0 on, such
as 12, 12.0 or 1e2. It may have a fraction, as a mean has. Without the tag, a request is last. TRAIL
predicts anew after each token; a tag does not change. Long requests may starve. Where the next
tokens of decodes do not fit, the newest is preempted, as by all our policies.
"""

import math
from collections import deque

from batch import Batch, Request
from command.checks import MOST, Range, UserError, tag_number
from scheduler import SIZE, SarathiServe

PREDICTED = {"predicted_tokens": Range(0, MOST, whole=False, noun="number of tokens")}


class SRPT(SarathiServe):
    """ "srpt:80" has c = 80 %, as by default; "srpt:0" never preempts."""

    name, example, asks = "srpt", "srpt:80", "predicted_tokens"
    share_run, reads = 0.8, PREDICTED  # share_run: c

    def configure(self, option: str) -> None:
        if not SIZE.fullmatch(option) or int(option) > 100:
            raise UserError(f"policy 'srpt:{option}': it needs 0 to 100 %, such as {self.example}")
        self.share_run = int(option) / 100

    def schedule(self, now: float) -> Batch | None:
        self.sort_queue()
        decodes = sum(not request.in_prefill for request in self.running)
        while self.waiting and not self.can_admit() and decodes < self.chunk_size:
            young = [r for r in self.running if len(r.output) < self.share_run * length_of(r)]
            victim = max(young, key=left, default=None)
            if victim is None or left(victim) <= left(self.waiting[0]):
                break
            self.preempt(victim)  # it is first in the queue now
            self.sort_queue()
        return super().schedule(now)

    def sort_queue(self) -> None:
        self.waiting = deque(sorted(self.waiting, key=left))

    def started(self) -> list[Request]:
        return sorted(super().started(), key=left)


def left(request: Request) -> float:
    """Tokens of its output."""
    return max(1.0, length_of(request) - len(request.output))


def length_of(request: Request) -> float:
    return tag_number(request, "predicted_tokens", PREDICTED["predicted_tokens"], math.inf)
