"""A chunk size that follows a target for the time between tokens (TBT).

In each iteration, the chunks are as large as the target allows: large beside few short decodes,
small beside many long ones. `scheduler.cost` says how long a batch would take. "target_tbt:50" has
a target of 50 ms. --chunk-size is the largest budget that it may take.
"""

from bisect import bisect_right

from batch import Batch, Request
from command.checks import UserError
from scheduler import SIZE, SarathiServe, next_chunk

STEP = 32  # tokens between two budgets that are tried


class TargetTBT(SarathiServe):
    name = "target_tbt"
    example = "target_tbt:50"
    target = 0.05  # s
    most = None  # tokens

    def configure(self, option: str) -> None:
        if not SIZE.fullmatch(option) or int(option) < 1:
            raise UserError(f"policy 'target_tbt:{option}': it needs ms, such as {self.example}")
        self.target = int(option) / 1000

    def schedule(self, now: float) -> Batch | None:
        self.most = self.most or self.chunk_size
        decodes = self.decodes()
        budgets = range(min(STEP, self.most), self.most + 1, STEP)
        within = bisect_right(budgets, self.target, key=lambda C: self.cost(self.trial(decodes, C)))
        self.chunk_size = budgets[max(0, within - 1)]  # at least the smallest: prompts must go on
        return super().schedule(now)

    def trial(self, decodes: list[Request], budget: int) -> Batch:
        """The batch that this budget would give, if all waiting requests had room in the cache."""
        chunks = []
        room = budget - len(decodes)
        for request in (*self.started(), *self.waiting):
            if room < 1:
                break
            chunks.append(next_chunk(request, room))
            room -= chunks[-1].length
        return Batch(chunks, decodes)
