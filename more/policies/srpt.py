"""Shortest remaining output first, by predicted lengths, with limited preemption (TRAIL).

Of those that wait, the one with the fewest predicted tokens left is next. If it has no room, it
takes that of the running request with the most left. But only of a young one: who has run the share
c of its prediction keeps its place, since a large cache would be computed again (Shahout et al.,
ICLR 2025, arXiv 2410.01035). The order alone: "learning to rank" (Fu et al., NeurIPS 2024, arXiv
2408.15792).

The prediction is the tag `predicted_tokens` (more/serving/lengths.py): any number from 0 on, such
as 12, 12.0 or 1e2. It may have a fraction, as a mean has. Without the tag, a request is last. TRAIL
predicts anew after each token; a tag does not change. Long requests may starve. Where the next
tokens of decodes do not fit, the one with the most left is preempted, and of equals the newest.
"""

import math

from batch import Batch, Request
from command.checks import MOST, Range, UserError
from scheduler import SIZE, SarathiServe

PREDICTED = {"predicted_tokens": Range(0, MOST, whole=False, noun="number of tokens")}


class SRPT(SarathiServe):
    """ "srpt:80" has c = 80 %, as by default; "srpt:0" never preempts."""

    name = "srpt"
    example = "srpt:80"
    asks = "predicted_tokens"  # the tag without which it is sarathi_serve
    reads = PREDICTED
    share_run = 0.8  # c

    def configure(self, option: str) -> None:
        if not SIZE.fullmatch(option) or int(option) > 100:
            raise UserError(f"policy 'srpt:{option}': it needs 0 to 100 %, such as {self.example}")
        self.share_run = int(option) / 100

    def rank(self, request: Request) -> float:
        """Tokens of its output that are left."""
        return max(1.0, self.length(request) - len(request.output))

    def schedule(self, now: float) -> Batch | None:
        decodes = sum(not request.in_prefill for request in self.running)
        while self.waiting and not self.can_admit() and decodes < self.chunk_size:
            young = [r for r in self.running if len(r.output) < self.share_run * self.length(r)]
            longest = max(young, key=self.rank, default=None)
            if longest is None or self.rank(longest) <= self.rank(self.first()):
                break
            self.preempt(longest)
        return super().schedule(now)

    def length(self, request: Request) -> float:
        return self.number(request, "predicted_tokens", math.inf)
