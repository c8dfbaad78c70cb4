"""Does the paper show on this machine? The claims that a machine should show, in what it measured.

    python experiments/shapes.py    once fig3.py, fig8.py, fig9.py, fig11.py, fig13.py have measured

A CPU has other numbers than the paper's GPUs. The shape of a curve can be the same: what rises,
what falls, where it peaks. We count how many comparisons between two measured values hold. A curve
of one point, as --quick measures some, compares nothing. `flat` is within 10 %. Noise decides
between nearly equal values, so read the values beside it.
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

Found = dict[tuple[str, str, str], list[Finding]]


def find_shapes(directory: Path) -> Found:
    """By model and machine, study and claim: what was found, if there is a comparison."""
    found: Found = {}
    for name, study in studies().items():
        rows = read_rows(directory / f"{name}.csv").newest().where(source="measured")
        where = f"{rows[0]['model']} on {rows[0]['hardware']}" if rows else ""
        for claim in study.claims:
            if claim.measured and (findings := claim.found(rows)):
                found[where, name, claim.says] = findings
    return found


def count(findings: list[Finding]) -> str:
    comparisons = [holds for each in findings for holds in each.comparisons]
    return f"{sum(comparisons)} of {len(comparisons)}"


def print_shapes(found: Found) -> None:
    """What holds on each machine, by claim; then the values."""
    for where in dict.fromkeys(where for where, *_ in found):
        rows = [[says, n, count(own)] for (at, n, says), own in found.items() if at == where]
        header = ["the paper's shape", "figure", "comparisons that hold"]
        print_table(header, rows, f"Measured: {where}")
    for (_, name, says), findings in found.items():
        print(f"\n{says} ({name})")
        for each in findings:
            print(f"  {each.where}: {each.values}: {count([each])} hold")


def main() -> None:
    out = ScriptParser(__doc__, WRITES).parse_args().out
    found = find_shapes(out)
    if not found:
        raise UserError(f"--out {out}: nothing measured to compare: first run figures --measure")
    print_shapes(found)


if __name__ == "__main__":
    run_main(main)
