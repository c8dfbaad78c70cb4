"""A hit stays in the queue of free blocks: it is evicted while it is held."""

from collections.abc import Sequence

from course.reference import Blocks as Right

exercise = "13"
caught_by = "D1"
message = "what is held is not"


class Blocks(Right):
    def allocate(self, tokens: Sequence[int]) -> list[int]:
        table = self.hits(tokens)
        for block in table:
            self.references[block] += 1
        rest = len(tokens) - len(table) * self.size
        return table + [self.take() for _ in range(0, rest, self.size)]
