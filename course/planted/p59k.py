"""Who shares a block does not take its own count off: the block is never free again."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "K7"
message = "`release` takes one off"


class Blocks(Right):
    def release(self, table: Sequence[int]) -> None:
        super().release([block for block in table if self.references[block] == 1])
