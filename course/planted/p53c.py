"""The table is a generator, and used up after one look."""

from collections.abc import Iterable, Iterator

from course.reference import reorder  # noqa: F401

exercise = "12"
caught_by = "answer"
message = "'generator' object"


def extend(table: Iterable[list[int]]) -> Iterator[list[int]]:
    return ([*row, beam] for beam, row in enumerate(table))
