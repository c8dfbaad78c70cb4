"""All of a prompt may be a hit: the last token does not run."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "D2"
message = "the last token is none of theirs"


class Blocks(Right):
    def hits(self, tokens: Sequence[int]) -> list[int]:
        return super().hits([*tokens, 0])
