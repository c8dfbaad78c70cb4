"""Does the paper show on this machine?

We look for seven shapes of its figures in what --measure wrote to results/.

    python experiments/shapes.py    after --measure of fig3.py, fig8.py, fig9.py, fig11.py, fig13.py

A CPU has other numbers than the paper's GPUs. The shape of a curve can be the same: what rises,
what falls, where it peaks. A shape is a number of comparisons between two measured values (a decode
at B = 4 costs less than at B = 2), and we count how many hold. A curve of one point, as --quick
measures some, compares nothing. There is one tolerance: `flat` is within 10 %. Noise makes a
comparison of near-equal values a toss: read the values beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from cli import run_main
from configs import UserError
from experiments.lib.common import (
    SPREAD,
    Point,
    curves,
    make_parser,
    print_table,
    read_csv,
    series_options,
)

FLAT = 1.1  # the largest value over the smallest

Curves = dict[str, list[Point]]  # by series, in order of x


@dataclass(frozen=True)
class Finding:
    """One curve (or one place on several) and the comparisons that a shape makes of it."""

    where: str
    values: str
    held: int
    of: int


def listed(curve: Sequence[Point]) -> str:
    """ "0.53, 0.51 ms per token at B = 1, 2" """
    values = ", ".join(f"{point.y:.3g}" for point in curve)
    places = ", ".join(f"{point.x:.4g}" for point in curve)
    return f"{values} {curve[0].y_unit} at {curve[0].x_unit} = {places}"


def falls(curve: Sequence[Point], where: str) -> Finding:
    held = sum(left.y > right.y for left, right in pairwise(curve))
    return Finding(where, listed(curve), held, len(curve) - 1)


def prefill_is_flat(found: Curves) -> list[Finding]:
    rows = []
    for series, curve in found.items():
        if series.startswith("prefill, total") and len(curve) > 1:
            flat = max(point.y for point in curve) <= FLAT * min(point.y for point in curve)
            rows.append(
                Finding(series.removeprefix("prefill, total "), listed(curve), int(flat), 1)
            )
    return rows


def decode_falls(found: Curves) -> list[Finding]:
    return [
        falls(curve, series.removeprefix("decode, total "))
        for series, curve in found.items()
        if series.startswith("decode, total")
    ]


def speedup_falls_with_batch(found: Curves) -> list[Finding]:
    return [falls(curve, series) for series, curve in found.items() if curve[0].x_unit == "B"]


def speedup_falls_with_length(found: Curves) -> list[Finding]:
    """Fig 8 the other way round: one curve over L for each B."""
    over_length: Curves = {}
    for series, curve in found.items():
        for point in curve:
            if point.x_unit == "B":
                place = replace(point, series=series, x=series_options(series)["L"], x_unit="L")
                over_length.setdefault(f"B={point.x:g}", []).append(place)
    return [
        falls(sorted(curve, key=lambda point: point.x), where)
        for where, curve in over_length.items()
    ]


def peak_at_balance(found: Curves) -> list[Finding]:
    """Of the P:D that were measured, the largest gain is at the one nearest to C/(B-1)."""
    rows = []
    for series, curve in found.items():
        options = series_options(series)
        if series.endswith(SPREAD) or not {"B", "C"} <= options.keys() or len(curve) == 1:
            continue
        ratio = options["C"] / (options["B"] - 1)
        nearest = min(curve, key=lambda point: abs(point.x - ratio))
        best = max(curve, key=lambda point: point.y)
        where = f"{series}: C/(B-1) = {ratio:.3g}"
        rows.append(Finding(where, listed(curve), int(nearest == best), 1))
    return rows


def orca_between(found: Curves) -> list[Finding]:
    """At each P:D: baseline < best-case Orca < the better of SARATHI's chunk sizes."""
    curves_of = {
        name: [c for s, c in found.items() if s.startswith(name) and not s.endswith(SPREAD)]
        for name in ("orca best", "sarathi")
    }
    rows = []
    for orca in [point for curve in curves_of["orca best"] for point in curve]:
        ours = max(point.y for c in curves_of["sarathi"] for point in c if point.x == orca.x)
        values = f"baseline 1, orca at its best {orca.y:.3g}, sarathi {ours:.3g}"
        rows.append(Finding(f"P:D = {orca.x:.3g}", values, (orca.y > 1) + (ours > orca.y), 2))
    return rows


def small_chunks_cost(found: Curves) -> list[Finding]:
    """The prefill in chunks over the whole one falls with C."""
    wanted = [
        (series, curve)
        for series, curve in found.items()
        if series.startswith("prefill ") and not series.endswith(SPREAD)
    ]
    return [falls(curve, series.removeprefix("prefill ")) for series, curve in wanted]


SHAPES: dict[str, tuple[str, Callable[[Curves], list[Finding]]]] = {  # claim: figure, comparisons
    "a prefill token costs the same in any batch": ("fig3", prefill_is_flat),
    "a decode costs less, the larger the batch": ("fig3", decode_falls),
    "the speedup of a piggybacked decode falls with B": ("fig8", speedup_falls_with_batch),
    "... and with L": ("fig8", speedup_falls_with_length),
    "the gain peaks near P:D = C/(B-1)": ("fig9", peak_at_balance),
    "Orca's best case lies between baseline and SARATHI": ("fig11", orca_between),
    "small chunks make a prefill dearer": ("fig13", small_chunks_cost),
}


def find_shapes(directory: Path) -> dict[str, tuple[str, list[Finding]]]:
    """Claim -> where it was measured, and what was found there.

    Claims without a single comparison are left out.
    """
    found = {}
    for claim, (figure, compare) in SHAPES.items():
        measured = curves(read_csv(directory / f"{figure}.csv"), "measured")
        findings = [finding for finding in compare(measured) if finding.of]
        if findings:
            point = next(iter(measured.values()))[0]
            found[claim] = (f"{point.model} on {point.hardware}", findings)
    return found


def main() -> None:
    options = make_parser(__doc__).parse_args()
    found = find_shapes(options.out)
    if not found:
        names = ", ".join(
            f"{figure}.csv" for figure in dict.fromkeys(figure for figure, _ in SHAPES.values())
        )
        raise UserError(
            f"--out {options.out}: nothing measured to compare in {names} there: run the figures"
            " with --measure first"
        )
    for where in dict.fromkeys(where for where, _ in found.values()):
        print(f"Measured: {where}\n")
        here = {claim: findings for claim, (place, findings) in found.items() if place == where}
        rows = []
        for claim, findings in here.items():
            held, of = (sum(getattr(finding, n) for finding in findings) for n in ("held", "of"))
            rows.append([claim, SHAPES[claim][0], f"{held} of {of}"])
        print_table(["the paper's shape", "figure", "comparisons that hold"], rows)
        for claim, findings in here.items():
            print(f"\n{claim} ({SHAPES[claim][0]})")
            for finding in findings:
                print(f"  {finding.where}: {finding.values}: {finding.held} of {finding.of} hold")
        print()
    missing = [claim for claim in SHAPES if claim not in found]
    if missing:
        print(
            "not measured yet: "
            + "; ".join(f"{claim} ({SHAPES[claim][0]}.py --measure)" for claim in missing)
        )


if __name__ == "__main__":
    run_main(main)
