"""A block that is partly full has a hash, and is shared."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "D2"
message = "Hits are full blocks"


class Blocks(Right):
    def hashes(self, tokens: Sequence[int]) -> list[int]:
        rest = -len(tokens) % self.size
        return super().hashes([*tokens, *[0] * rest])
