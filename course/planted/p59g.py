"""A hit is not counted: its first holder gives it back while the second still reads it."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "D1"
message = "a hit adds one"


class Blocks(Right):
    def allocate(self, tokens: Sequence[int]) -> list[int]:
        table = super().allocate(tokens)
        for block in table:
            self.references[block] = 1
        return table
