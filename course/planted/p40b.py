"""Beams of one parent share a list."""

exercise = "12"
caught_by = "X2"
message = "Copy the row"


def reorder(table: list[list[int]], parents: list[int]) -> list[list[int]]:
    return [table[parent] for parent in parents]


def extend(table: list[list[int]]) -> list[list[int]]:
    for beam, row in enumerate(table):
        row.append(beam)
    return table
