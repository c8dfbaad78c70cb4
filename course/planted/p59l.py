"""A table has no block for the rest that fills none."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "K6"
message = "one more for a rest"


class Blocks(Right):
    def allocate(self, tokens: Sequence[int]) -> list[int]:
        return super().allocate(tokens[: len(tokens) // self.size * self.size])
