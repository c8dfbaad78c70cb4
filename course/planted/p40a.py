"""A beam takes over its parent's last step alone."""

exercise = "12"
caught_by = "X1"
message = "whole row"


def reorder(table: list[list[int]], parents: list[int]) -> list[list[int]]:
    return [row[:-1] + table[parent][-1:] for row, parent in zip(table, parents, strict=True)]


def extend(table: list[list[int]]) -> list[list[int]]:
    return [[*row, beam] for beam, row in enumerate(table)]
