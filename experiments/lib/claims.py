"""What must hold of the predicted rows of a study.

    Claim("the speedup falls with B", falls("speedup", over="B"))

A claim is a number of comparisons between two values. A test holds every study to its claims.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from experiments.lib.rows import Row, Rows, cell, name_of

FLAT = 1.1  # the largest value over the smallest


@dataclass(frozen=True)
class Finding:
    """One curve (or one place on several) and the comparisons that a claim makes of it."""

    where: str
    values: str
    comparisons: list[bool]


@dataclass(frozen=True)
class Claim:
    """says: in words. find: rows of one source -> findings."""

    says: str
    find: Callable[[Rows], list[Finding]]

    def found(self, rows: Rows) -> list[Finding]:
        """The findings that compare anything: a curve of one point does not."""
        return [finding for finding in self.find(rows) if finding.comparisons]


def curves(rows: Rows, quantity: str, over: str, **where: object) -> list[tuple[str, list[Row]]]:
    """Rows that differ in the key `over` alone, in its order, and what they have in common."""
    found: dict[tuple, list[Row]] = {}
    for row in rows.where(quantity, over, **where):
        place = row["model"], row["hardware"], name_of("", rows.case(row) | {over: ""})
        found.setdefault(place, []).append(row)
    return [
        (
            name_of("", {k: v for k, v in rows.case(curve[0]).items() if k != over}).strip(", "),
            sorted(curve, key=lambda row: row[over]),
        )
        for curve in found.values()
    ]


def listed(curve: list[Row], quantity: str, unit: str, over: str) -> str:
    """ "0.53, 0.51 ms per token at B = 1, 2" """
    values = ", ".join(f"{row[quantity]:.3g}" for row in curve)
    places = ", ".join(cell(row[over]) for row in curve)
    return f"{values} {unit} at {over} = {places}"


def compared(
    quantity: str, over: str, compare: Callable[[list[float]], list[bool]], where: dict[str, object]
) -> Callable[[Rows], list[Finding]]:
    """The findings of a comparison of each curve's values."""

    def find(rows: Rows) -> list[Finding]:
        return [
            Finding(
                place,
                listed(curve, quantity, rows.units[quantity], over),
                compare([row[quantity] for row in curve]),
            )
            for place, curve in curves(rows, quantity, over, **where)
        ]

    return find


def falls(quantity: str, over: str, **where: object) -> Callable[[Rows], list[Finding]]:
    """Each value is less than the one before it. where: of which rows."""
    return compared(quantity, over, lambda ys: [a > b for a, b in pairwise(ys)], where)


def rises(quantity: str, over: str, **where: object) -> Callable[[Rows], list[Finding]]:
    return compared(quantity, over, lambda ys: [a < b for a, b in pairwise(ys)], where)


def flat(quantity: str, over: str, **where: object) -> Callable[[Rows], list[Finding]]:
    """All values lie within 10 %."""
    return compared(quantity, over, lambda ys: [max(ys) <= FLAT * min(ys)] * (len(ys) > 1), where)


def peaks_at(
    quantity: str, over: str, place: Callable[[Row], float]
) -> Callable[[Rows], list[Finding]]:
    """Of the places of each curve, the largest value is at the one nearest to `place`."""

    def find(rows: Rows) -> list[Finding]:
        findings = []
        for name, curve in curves(rows, quantity, over):
            nearest = min(curve, key=lambda row: abs(row[over] - place(row)))
            best = max(curve, key=lambda row: row[quantity])
            where = f"{name}: expected at {over} = {place(curve[0]):.3g}"
            holds = [nearest is best] if len(curve) > 1 else []
            values = listed(curve, quantity, rows.units[quantity], over)
            findings.append(Finding(where, values, holds))
        return findings

    return find


def bounded(
    quantity: str, least: float, most: float, **where: object
) -> Callable[[Rows], list[Finding]]:
    """Every value lies between two bounds, or on one."""

    def find(rows: Rows) -> list[Finding]:
        return [
            Finding(
                name_of(quantity, rows.case(row)),
                f"{cell(row[quantity])} {rows.units[quantity]}",
                [least <= row[quantity] <= most],
            )
            for row in rows.where(quantity, **where)
        ]

    return find
