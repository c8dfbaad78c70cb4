"""What is evicted stays known: it is shared with its new content."""

from course.reference import Blocks as Right

exercise = "13"
caught_by = "K10"
message = "holds what other tokens left"


class Blocks(Right):
    def take(self) -> int:
        block = self.free.popleft()
        self.references[block] = 1
        return block
