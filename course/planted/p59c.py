"""The hash is of a block's own tokens: it forgets the parent."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "K10"
message = "shared with another prefix"


class Blocks(Right):
    def hashes(self, tokens: Sequence[int]) -> list[int]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [hash(tuple(tokens[end - self.size : end])) for end in ends]
