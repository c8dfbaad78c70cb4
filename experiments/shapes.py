"""Does the paper show on this machine?

We look for seven shapes of its figures in what --measure wrote to results/.

    python experiments/shapes.py    once fig3.py, fig8.py, fig9.py, fig11.py, fig13.py have measured

A CPU has other numbers than the paper's GPUs. The shape of a curve can be the same: what rises,
what falls, where it peaks. A shape is a number of comparisons between two measured values (a decode
at B = 4 costs less than at B = 2), and we count how many hold. A curve of one point, as --quick
measures some, compares nothing. There is one tolerance: `flat` is within 10 %. Noise decides a
comparison of nearly equal values, so read the values beside it.
"""

import enter  # noqa: F401

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from command.checks import UserError
from command.cli import run_main
from experiments.lib.common import SPREAD, Point, curves, print_table, read_csv, series_options
from experiments.lib.flags import WRITES, ScriptParser

FLAT = 1.1  # the largest value over the smallest

Curves = dict[str, list[Point]]  # by series, in order of x


@dataclass(frozen=True)
class Finding:
    """One curve (or one place on several) and the comparisons that a shape makes of it."""

    where: str
    values: str
    comparisons: list[bool]


def listed(curve: Sequence[Point]) -> str:
    """ "0.53, 0.51 ms per token at B = 1, 2" """
    values = ", ".join(f"{point.y:.3g}" for point in curve)
    places = ", ".join(f"{point.x:.4g}" for point in curve)
    return f"{values} {curve[0].y_unit} at {curve[0].x_unit} = {places}"


def starting(found: Curves, start: str) -> Curves:
    """The curves whose series begins with `start`, by the rest of the series' name."""
    return {
        series.removeprefix(start): curve
        for series, curve in found.items()
        if series.startswith(start) and not series.endswith(SPREAD)
    }


def falls(found: Curves) -> list[Finding]:
    return [
        Finding(where, listed(curve), [left.y > right.y for left, right in pairwise(curve)])
        for where, curve in found.items()
    ]


def prefill_is_flat(found: Curves) -> list[Finding]:
    findings = []
    for where, curve in starting(found, "prefill, total ").items():
        values = [point.y for point in curve]
        flat = [max(values) <= FLAT * min(values)] if len(values) > 1 else []
        findings.append(Finding(where, listed(curve), flat))
    return findings


def speedup_falls_with_length(found: Curves) -> list[Finding]:
    """Fig 8 the other way round: one curve over L for each B."""
    over_length: Curves = {}
    for series, curve in found.items():
        for point in curve:
            place = replace(point, x=series_options(series)["L"], x_unit="L")
            over_length.setdefault(f"B={point.x:g}", []).append(place)
    for curve in over_length.values():
        curve.sort(key=lambda point: point.x)
    return falls(over_length)


def peak_at_balance(found: Curves) -> list[Finding]:
    """Of the P:D that were measured, the largest gain is at the one nearest to C/(B-1)."""
    findings = []
    for series, curve in starting(found, "").items():
        options = series_options(series)
        if {"B", "C"} <= options.keys() and len(curve) > 1:
            ratio = options["C"] / (options["B"] - 1)
            nearest = min(curve, key=lambda point: abs(point.x - ratio))
            best = max(curve, key=lambda point: point.y)
            where = f"{series}: C/(B-1) = {ratio:.3g}"
            findings.append(Finding(where, listed(curve), [nearest == best]))
    return findings


def orca_between(found: Curves) -> list[Finding]:
    """At each P:D: baseline < best-case Orca < the better of SARATHI's chunk sizes."""
    sarathi = [point for curve in starting(found, "sarathi").values() for point in curve]
    findings = []
    for orca in [point for curve in starting(found, "orca best").values() for point in curve]:
        best = max(point.y for point in sarathi if point.x == orca.x)
        values = f"baseline 1, orca at its best {orca.y:.3g}, sarathi {best:.3g}"
        findings.append(Finding(f"P:D = {orca.x:.3g}", values, [orca.y > 1, best > orca.y]))
    return findings


SHAPES: dict[str, tuple[str, Callable[[Curves], list[Finding]]]] = {  # claim: figure, comparisons
    "a prefill token costs the same in any batch": ("fig3", prefill_is_flat),
    "a decode costs less, the larger the batch": (
        "fig3",
        lambda found: falls(starting(found, "decode, total ")),
    ),
    "the speedup of a piggybacked decode falls with B": ("fig8", falls),
    "... and with L": ("fig8", speedup_falls_with_length),
    "the gain peaks near P:D = C/(B-1)": ("fig9", peak_at_balance),
    "Orca's best case lies between baseline and SARATHI": ("fig11", orca_between),
    "small chunks make a prefill dearer": (
        "fig13",
        lambda found: falls(starting(found, "prefill ")),
    ),
}


def find_shapes(directory: Path) -> dict[str, tuple[str, list[Finding]]]:
    """Claim -> where it was measured, and what was found there.

    Claims without a single comparison are left out.
    """
    found = {}
    for claim, (figure, compare) in SHAPES.items():
        measured = curves(read_csv(directory / f"{figure}.csv"), "measured")
        findings = [finding for finding in compare(measured) if finding.comparisons]
        if findings:
            point = next(iter(measured.values()))[0]
            found[claim] = (f"{point.model} on {point.hardware}", findings)
    return found


def count(comparisons: list[bool]) -> str:
    return f"{sum(comparisons)} of {len(comparisons)}"


def print_findings(where: str, found: dict[str, list[Finding]]) -> None:
    """What holds on one machine, by claim."""
    rows = []
    for claim, findings in found.items():
        every = [holds for finding in findings for holds in finding.comparisons]
        rows.append([claim, SHAPES[claim][0], count(every)])
    header = ["the paper's shape", "figure", "comparisons that hold"]
    print_table(header, rows, f"Measured: {where}")
    for claim, findings in found.items():
        print(f"\n{claim} ({SHAPES[claim][0]})")
        for each in findings:
            print(f"  {each.where}: {each.values}: {count(each.comparisons)} hold")


def main() -> None:
    options = ScriptParser(__doc__, WRITES).parse_args()
    found = find_shapes(options.out)
    if not found:
        names = ", ".join(dict.fromkeys(f"{figure}.csv" for figure, _ in SHAPES.values()))
        raise UserError(
            f"--out {options.out}: nothing measured to compare in {names} there: run the figures"
            " with --measure first"
        )
    for where in dict.fromkeys(where for where, _ in found.values()):
        here = {claim: findings for claim, (place, findings) in found.items() if place == where}
        print_findings(where, here)
    missing = [claim for claim in SHAPES if claim not in found]
    if missing:
        names = [f"{claim} ({SHAPES[claim][0]}.py --measure)" for claim in missing]
        print(f"\nnot measured yet: {'; '.join(names)}")


if __name__ == "__main__":
    run_main(main)
