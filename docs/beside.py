"""Lines of another project's clone, for the table "Beside others" of the README.

    python -m docs.beside ../nano-vllm ../vidur    one line for each: commit, date, lines, tests

A clone may be bare. Code is Python, C++, CUDA and Metal, of the commit that is checked out. Empty
lines and comments count, too. What it prints stands in docs/beside.toml; `make docs` reads that.
"""

import subprocess
import tomllib
from pathlib import Path

from command.checks import UserError
from command.cli import ROOT, run_main
from command.flags import Parser

CODE = (".py", ".cpp", ".cc", ".h", ".cu", ".cuh", ".metal")
TABLE = ROOT / "docs" / "beside.toml"
COLUMNS = ("runs", "tests", "draws", "teaches")


def git(clone: Path, *command: str) -> str:
    """What git prints. Raises UserError where `clone` is no clone."""
    done = subprocess.run(["git", "-C", str(clone), *command], capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"{clone}: no clone of a git repository")
    return done.stdout.decode("utf-8", "replace")


def count(clone: Path) -> str:
    """Commit, date, lines of code, test functions: as keys of beside.toml."""
    names = git(clone, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    lines = 0
    tests = 0
    for name in names:
        if name.endswith(CODE):
            text = git(clone, "show", f"HEAD:{name}")
            lines += text.count("\n")
            tests += text.count("\ndef test_") + text.count("\n    def test_")
    commit, date = git(clone, "log", "-1", "--format=%h %cs").split()
    return f'commit = "{commit}"\ndate = "{date}"\nlines = {lines}\ntest_functions = {tests}'


def table(own_lines: int) -> str:
    """The README's table: this project first. own_lines: of all its Python, about."""
    rows = ["| | " + " | ".join(COLUMNS) + " | lines of code |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, entry in tomllib.loads(TABLE.read_text("utf-8")).items():
        if "repository" in entry:
            head = f"[{name}](https://github.com/{entry['repository']})"
            size = f"{entry['lines']:,} ({entry['commit']}, {entry['date']})"
        else:
            head = f"**{name}**"
            size = f"about {own_lines:,}, with tests, lessons and figures"
        words = [entry[column] for column in COLUMNS]
        rows.append("| " + " | ".join([head, *words, size]) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("clone", nargs="+", type=Path, help="a folder")
    for clone in parser.parse_args().clone:
        print(f"# {clone}\n{count(clone)}")


if __name__ == "__main__":
    run_main(main)
