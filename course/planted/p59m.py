"""`fits` is its own: it refuses what would fit, because it counts no hits."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "K8"
message = "Leave `fits` and `store`"


class Blocks(Right):
    def fits(self, tokens: Sequence[int]) -> bool:
        return len(self.free) * self.size >= len(tokens)
