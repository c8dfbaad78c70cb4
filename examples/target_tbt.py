"""A chunk size that follows a target for the time between tokens (TBT).

In each iteration, the chunks are as large as the target allows: large beside few short decodes,
small beside many long ones. `scheduler.cost` says how long a batch would take. "target_tbt:50" has
a target of 50 ms. --chunk-size is the largest budget that it may take.
"""

from command.checks import UserError
from scheduler import SIZE, SarathiServe

STEP = 32  # tokens between two budgets that are tried


class TargetTBT(SarathiServe):
    name = "target_tbt"
    example = "target_tbt:50"
    target = 0.05  # s

    def configure(self, option: str) -> None:
        if not SIZE.fullmatch(option) or int(option) < 1:
            raise UserError(f"policy 'target_tbt:{option}': it needs ms, such as {self.example}")
        self.target = int(option) / 1000

    def budget(self) -> int:
        return self.fit(self.target, STEP)
