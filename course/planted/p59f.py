"""The queue of free blocks upside down: the last that was released is evicted first."""

from course.reference import Blocks as Right

exercise = "13"
caught_by = "D3"
message = "The left end was released first"


class Blocks(Right):
    def take(self) -> int:
        self.free.rotate(1)
        return super().take()
