"""What must hold of the predicted rows of a study, as comparisons between two values.

    def claims(rows: Rows) -> Claims:
        return {"the speedup falls with B": falls(rows, "speedup", over="B")}

A claim is a sentence. Each of its comparisons says in words which curve and values it compares, and
whether it holds. A test holds every study to its claims, and shows what is broken.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import gt, lt

from experiments.lib.rows import Row, Rows, cell, name_of

FLAT = 1.1  # the largest value over the smallest
Comparisons = dict[str, bool]  # in words -> whether it holds
Claims = dict[str, Comparisons]  # a sentence -> its comparisons


def curves(rows: Rows, quantity: str, over: str, **where: object) -> dict[str, Rows]:
    """Rows that differ in the key `over` alone, in its order, by what they have in common."""
    found: dict[str, Rows] = {}
    for row in rows.where(quantity, over, **where):
        found.setdefault(curve_of(rows, row, over), rows.part(())).append(row)
    for curve in found.values():
        curve.sort(key=lambda row: row[over])
    return found


def curve_of(rows: Rows, row: Row, over: str = "") -> str:
    """Where a row belongs: "llama-13b on a6000, L=1024". over: the key that it leaves out."""
    common = {key: value for key, value in rows.case(row).items() if key != over}
    return name_of(f"{row['model']} on {row['hardware']}", common)


def in_words(curve: Sequence[Row], quantity: str, over: str) -> str:
    """ "speedup 9.6, 8.8 at B = 2, 4" """
    values = ", ".join(f"{row[quantity]:.3g}" for row in curve)
    places = ", ".join(cell(row[over]) for row in curve)
    return f"{quantity} {values} at {over} = {places}"


def steps(
    rows: Rows, quantity: str, over: str, holds: Callable[[float, float], bool], where: dict
) -> Comparisons:
    """Each value of each curve, and the next. where: of which rows."""
    found = {}
    for name, curve in curves(rows, quantity, over, **where).items():
        for both in pairwise(curve):
            before, after = both
            said = f"{name}: {in_words(both, quantity, over)}"
            found[said] = holds(before[quantity], after[quantity])
    return found


def falls(rows: Rows, quantity: str, over: str, **where: object) -> Comparisons:
    """Each value is less than the one before it. where: of which rows."""
    return steps(rows, quantity, over, gt, where)


def rises(rows: Rows, quantity: str, over: str, **where: object) -> Comparisons:
    """Each value is more than the one before it."""
    return steps(rows, quantity, over, lt, where)


def flat(rows: Rows, quantity: str, over: str, **where: object) -> Comparisons:
    """All values of a curve lie within 10 %. One value alone compares nothing."""
    found = {}
    for name, curve in curves(rows, quantity, over, **where).items():
        values = curve.column(quantity)
        if len(values) > 1:
            said = f"{name}: {in_words(curve, quantity, over)}"
            found[said] = max(values) <= FLAT * min(values)
    return found


def peaks_at(rows: Rows, quantity: str, over: str, place: Callable[[Row], float]) -> Comparisons:
    """Of the places of each curve, the largest value is at the one nearest to `place`."""
    found = {}
    for name, curve in curves(rows, quantity, over).items():
        expected = place(curve[0])
        nearest = min(curve, key=lambda row: abs(row[over] - expected))
        best = max(curve, key=lambda row: row[quantity])
        if len(curve) > 1:
            said = f"{name}, expected at {over} = {expected:.3g}"
            found[f"{said}: {in_words(curve, quantity, over)}"] = nearest is best
    return found


def bounded(rows: Rows, quantity: str, least: float, most: float, **where: object) -> Comparisons:
    """Every value lies between two bounds, or on one."""
    found = {}
    for row in rows.where(quantity, **where):
        value = row[quantity]
        said = f"{curve_of(rows, row)}: {quantity} {cell(value)}, from {least:g} to {most:g}"
        found[said] = least <= value <= most
    return found
