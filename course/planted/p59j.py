"""A chain goes on behind a block that is not known."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "K10"
message = "holds what other tokens left"


class Blocks(Right):
    def hits(self, tokens: Sequence[int]) -> list[int]:
        return [self.block_of[key] for key in self.hashes(tokens[:-1]) if key in self.block_of]
