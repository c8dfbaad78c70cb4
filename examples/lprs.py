"""A budget that follows a target time, and prompts that age (LPRS: Liu et al., June 2026).

"Fairness-Aware and Latency-Controllable Scheduling for Chunked-Prefill LLM Serving" (arXiv
2606.09061) has no fixed C. It predicts how long a batch would take, and fills it up to a target
time. Next is the prompt with the least work left, but waiting counts, too. Only a few prompts
prefill at once, so that none is cut into crumbs. The constants are ours, from no paper.
--chunk-size is the largest budget. `scheduler.cost` says how long a batch would take.
"""

from batch import Request
from scheduler import SarathiServe

TARGET = 0.05  # s of a batch beside decodes
AGING = 0.001  # s of waiting that are worth a prompt token that is left
MOST_PROMPTS = 4  # that prefill at once


class LPRS(SarathiServe):
    name = "lprs"

    def rank(self, request: Request) -> float:
        """Work that is left less time waited. `now` is the same for all, so it may be left out."""
        left = request.prefill_length - request.prefilled
        return request.arrival + AGING * left

    def can_admit(self) -> bool:
        return len(self.started()) < MOST_PROMPTS and super().can_admit()

    def budget(self) -> int:
        """Nobody waits for the next token of a batch without decodes: it may be as large as C."""
        return self.fit(TARGET) if self.decodes() else self.chunk_size
