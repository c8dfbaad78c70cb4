"""SARATHI's switch between chunk sizes: the smallest with which no chunk runs without decodes.

With B requests, a batch has B - 1 decodes and C - (B-1) prompt tokens. A prefill of P tokens takes
P / (C - (B-1)) batches, and D decodes take D / (B-1). At C = (B-1) (1 + P:D), they are equal. A
larger C leaves decodes that run alone. A smaller one makes prefills dearer for nothing: its chunks
outlast the decodes. So SARATHI, where P:D leaves the balance, "can switch" to another C (Sec 5.1.3;
the paper gives no rule, this one is ours).

P:D is that of the requests that are here. The length of an output is its tag `predicted_tokens`;
without one, max_tokens.
"""

from math import inf

from batch import Batch
from more.policies.srpt import PREDICTED
from more.policies.variants import SeveralSizes
from scheduler import Sarathi


class SarathiPD(SeveralSizes, Sarathi):
    """ "sarathi_pd:512,256,128" chooses between these sizes; by default C, C/2 and C/4."""

    name = "sarathi_pd"
    example = "sarathi_pd:512,256,128"
    reads = PREDICTED

    def schedule(self, now: float) -> Batch | None:
        self.chunk_size = self.balanced()
        return super().schedule(now)

    def balanced(self) -> int:
        here = [*self.running, *self.waiting]
        prompts = sum(len(request.prompt) for request in here)
        decodes = sum(min(self.number(r, "predicted_tokens", inf), r.max_tokens) for r in here)
        beside = self.max_batch_size - 1
        enough = [C for C in self.sizes if C * decodes >= beside * (decodes + prompts)]
        return min(enough, default=self.sizes[0])
