"""Lines of code of each folder, and of the book, beside their budgets: `make lines`.

Code is what counts: no blank line, no comment, no docstring. Prose has no budget. If a folder must
grow, something else in it shrinks; or its budget is raised once, in a commit that says why.
tests/test_house.py holds them.
"""

import ast
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = {
    "tests": 22565, "experiments": 13575, "course": 5225, "web": 3153, "notebooks": 2865,
    "the root": 2400, "pipeline": 1405, "loading": 1395, "serving": 1755, "fast": 1060,
    "beam": 724, "command": 632, "configs": 670, "pictures": 450, "demo": 250, "docs": 615,
    "examples": 95, "paged": 330, "apart": 680,
}  # fmt: skip

# The core of the book: the first files of the README's map, in its order. Here every line counts.
BOOK = (
    "batch", "scheduler", "loop", "kvcache", "attention", "model", "sampling", "executor",
    "engine",
)  # fmt: skip
MOST_LINES = 1750


@cache
def statements(source: str) -> list[ast.stmt]:
    """All of a program, nested ones too. No expression holds one: it need not be looked into."""
    found, left = [], [ast.parse(source)]
    while left:
        node = left.pop()
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            left += getattr(node, name, ())
        found.append(node)
    return found[1:]


def lines_of_code(source: str) -> int:
    """Lines on which something stands that Python runs."""
    lines = enumerate(source.splitlines(), 1)
    code = {number for number, line in lines if line.strip() and line.lstrip()[0] != "#"}
    for node in statements(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            code.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(code)


def counted() -> Counter[str]:
    """Of each folder that git knows; the files of the root are "the root"."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: Counter[str] = Counter()
    for name in filter(Path.exists, map(ROOT.__truediv__, listed.stdout.splitlines())):
        folder, *inside = name.relative_to(ROOT).parts
        source = name.read_text(encoding="utf-8")
        found[folder if inside else "the root"] += lines_of_code(source)
    return found


def book() -> Counter[str]:
    """All lines of each file of the book."""
    texts = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in BOOK}
    return Counter({name: len(text.splitlines()) for name, text in texts.items()})


def main() -> None:
    found = counted()
    print(f"{'folder':12}{'code':>8}{'budget':>8}")
    for folder, lines in found.most_common():
        print(f"{folder:12}{lines:8,}{BUDGET.get(folder, 0):8,}")
    print(f"{'in all':12}{found.total():8,}{sum(BUDGET.values()):8,}")
    print(f"\nthe book ({', '.join(BOOK)}): {book().total():,} lines of {MOST_LINES:,}")


if __name__ == "__main__":
    main()
