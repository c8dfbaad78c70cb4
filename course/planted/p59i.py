"""Parents are released before their children, and evicted first."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "D3"
message = "without its parents"


class Blocks(Right):
    def release(self, table: Sequence[int]) -> None:
        super().release(table[::-1])
