"""The published numbers. The browser reads them, too: no package, and no process of its own."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

PLACE = Path(__file__).resolve().parents[1] / "paper_numbers.csv"


def paper_numbers() -> dict[str, float]:
    """Every published number by its id.

    paper_numbers.csv says which paper, which figure, what it means and in which unit.
    """
    with open(PLACE, newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["value"]) for row in csv.DictReader(file)}


def paper_table(
    columns: Sequence[str], lines: Iterable[Sequence], beside: str = "", **case: object
) -> dict[str, tuple]:
    """Published numbers as `Study.paper` wants them, of a table that looks like the paper's.

        paper_table(("L", "B", "gain"), [(1024, 18, "f9_c256")], model="llama-13b")

    A cell that is an id of paper_numbers.csv is a number of its column. All other cells of its line
    are its case, and so is `case`; None: the paper states nothing there. beside: a column that no
    row of ours must have; the paper states it beside the number.
    """
    known = paper_numbers()
    found = {}
    for line in lines:
        cells = dict(zip(columns, line, strict=True))
        stated = {beside: cells.pop(beside)} if beside else {}
        own = dict(case)
        for column, value in cells.items():
            if value is not None and value not in known:
                own[column] = value
        for column, value in cells.items():
            if value in known:
                found[value] = (column, own, stated)
    return found
