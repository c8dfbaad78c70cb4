"""A block that somebody else still holds is given back; then it is free twice."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "D1"
message = "what is held is not"


class Blocks(Right):
    def release(self, table: Sequence[int]) -> None:
        for block in reversed(table):
            self.references[block] -= 1
            if self.references[block] < 2:
                self.free.append(block)
