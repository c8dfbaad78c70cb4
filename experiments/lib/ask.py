"""Some columns of a file of results.

python -m experiments.lib.ask results/heirs.csv workload policy "P99 TTFT" counted state

A quantity is asked for without its unit; its range has "P99 TTFT lowest" and "P99 TTFT highest". A
row that lacks one of them has a "-". Rows that say the same are one line.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from command.checks import UserError
from command.cli import run_main
from experiments.lib.rows import ABOUT, Rows, base, print_rows, read_rows


def ask(path: Path, columns: Sequence[str]) -> None:
    """Print them. Raises UserError for a file without results, and for an unknown column."""
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path}: no results are there")
    every = dict.fromkeys([*rows.columns(), *ABOUT])
    known = ", ".join(dict.fromkeys(map(base, every)))
    if not columns:
        raise UserError(f"{path}: it needs names of columns: {known}")
    if unknown := [name for name in columns if name not in every]:
        raise UserError(f"{path} has no column {unknown[0]!r}; it has {known}")
    found = {tuple(row.get(name) for name in columns): row for row in rows}
    print_rows(Rows(found.values(), rows.units), columns)


def main() -> None:
    if len(sys.argv) < 2:
        raise UserError("it needs a file of results, and names of columns")
    ask(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    run_main(main)
