"""E12, lesson 10: the table of a beam search. About 3 lines: two functions on plain lists.

In step t, beam b writes its key to place b. table[b][t] says from which place beam b reads step t.
"""


def reorder(table: list[list[int]], parents: list[int]) -> list[list[int]]:
    """The table after a choice: beam b now continues beam parents[b] (segment KV, Sec 3.2)."""
    raise NotImplementedError


def extend(table: list[list[int]]) -> list[list[int]]:
    """The table with one step more: each beam writes to its own place."""
    raise NotImplementedError
