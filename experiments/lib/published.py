"""The published numbers. The browser reads them, too: no package, and no process of its own."""

import csv
from pathlib import Path

PLACE = Path(__file__).resolve().parents[1] / "paper_numbers.csv"


def paper_numbers() -> dict[str, float]:
    """Every published number by its id.

    paper_numbers.csv says which paper, which figure, what it means and in which unit.
    """
    with open(PLACE, newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["value"]) for row in csv.DictReader(file)}
