"""Does the paper show on this machine?

We look for the shapes of its figures in what --measure wrote to results/: the claims of the studies
that a machine should show, too.

    python experiments/shapes.py    once fig3.py, fig8.py, fig9.py, fig11.py, fig13.py have measured

A CPU has other numbers than the paper's GPUs. The shape of a curve can be the same: what rises,
what falls, where it peaks. A shape is a number of comparisons between two measured values (a decode
at B = 4 costs less than at B = 2), and we count how many hold. A curve of one point, as --quick
measures some, compares nothing. There is one tolerance: `flat` is within 10 %. Noise decides a
comparison of nearly equal values, so read the values beside it.
"""

import enter  # noqa: F401

from pathlib import Path

from command.checks import UserError
from command.cli import run_main
from experiments import studies
from experiments.lib.claims import Finding
from experiments.lib.common import print_table
from experiments.lib.flags import WRITES, ScriptParser
from experiments.lib.rows import read_rows

Found = dict[tuple[str, str], tuple[str, list[Finding]]]


def claims() -> list[tuple[str, str]]:
    """Study and words of each claim that a machine should show."""
    return [
        (name, claim.says)
        for name, study in studies().items()
        for claim in study.claims
        if claim.measured
    ]


def find_shapes(directory: Path) -> Found:
    """Study and claim -> where it was measured, and what was found there.

    Claims without a single comparison are left out.
    """
    found: Found = {}
    for name, study in studies().items():
        rows = read_rows(directory / f"{name}.csv").newest().where(source="measured")
        for claim in study.claims:
            findings = claim.found(rows) if claim.measured else []
            if findings:
                where = f"{rows[0]['model']} on {rows[0]['hardware']}"
                found[name, claim.says] = (where, findings)
    return found


def count(comparisons: list[bool]) -> str:
    return f"{sum(comparisons)} of {len(comparisons)}"


def print_findings(where: str, found: dict[tuple[str, str], list[Finding]]) -> None:
    """What holds on one machine, by claim."""
    rows = []
    for (name, says), findings in found.items():
        every = [holds for finding in findings for holds in finding.comparisons]
        rows.append([says, name, count(every)])
    header = ["the paper's shape", "figure", "comparisons that hold"]
    print_table(header, rows, f"Measured: {where}")
    for (name, says), findings in found.items():
        print(f"\n{says} ({name})")
        for each in findings:
            print(f"  {each.where}: {each.values}: {count(each.comparisons)} hold")


def main() -> None:
    options = ScriptParser(__doc__, WRITES).parse_args()
    found = find_shapes(options.out)
    if not found:
        names = ", ".join(dict.fromkeys(f"{name}.csv" for name, _ in claims()))
        raise UserError(
            f"--out {options.out}: nothing measured to compare in {names} there: run the figures"
            " with --measure first"
        )
    for where in dict.fromkeys(where for where, _ in found.values()):
        here = {claim: findings for claim, (place, findings) in found.items() if place == where}
        print_findings(where, here)
    missing = [
        f"{says} ({name}.py --measure)" for name, says in claims() if (name, says) not in found
    ]
    if missing:
        print(f"\nnot measured yet: {'; '.join(missing)}")


if __name__ == "__main__":
    run_main(main)
