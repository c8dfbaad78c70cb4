"""Tokens of the project's Python, by folder, and lines of what is read: `make lines`.

A token is a name, an operator, a number or a string. No comment, docstring, line end or indent
counts. So a comment, a blank line, a longer name or a statement on a line of its own costs nothing.
"""

import io
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

# Tokens of all Python, at most. It goes down when something goes, and never up.
CEILING = 524_300

# The core of the book: the first files of the README's map, in its order.
BOOK = (
    "batch", "scheduler", "loop", "kvcache", "attention", "model", "sampling", "executor",
    "engine",
)  # fmt: skip

# What stands beside the nine: with these, they run alone (`make book`).
BESIDE = (
    "loader.py", "tokenizer.py", "timeline.py", "costmodel.py", "simulate.py",
    "command/__init__.py", "command/checks.py", "configs",
    "demo/config.json", "demo/model.safetensors", "demo/merges.tiktoken",
)  # fmt: skip

# What the tests promise, and in which files: tests/NAME.py, or tests/test_NAME.py.
PROMISES = {
    "exactness: the same tokens under every policy as when each request runs alone": (
        "oracle attention book engine kvcache loop paged"
    ),
    "each policy by hand": "policies policy_file scheduler",
    "transformers agrees": "beam_transformers checkpoint families nanogpt tokenizer",
    "fast operators give what the plain ones give": (
        "beam_native cpus cuda fake_cuda gpu_day graphs kernels linear native plain step"
    ),
    "the other papers: pipelines, beams, halves apart": (
        "apart beam beam_cost pipeline pipeline_worker stages td_pipe"
    ),
    "the price of a batch by hand": "constants costmodel law",
    "capacity is one: planner, traces, anchors": (
        "anchor beside_benchmarks calibrate fast_forward plan serving traces windows workload"
    ),
    "server and pages": (
        "browser_explorer browser_live browser_site explorer live runner serve serve_pipelines"
        " serve_policies served"
    ),
    "a class gets what it must": "browser_exercises course grading notebooks",
    "each figure keeps its claims": (
        "bench choose_chunk fig9 figures gallery gantt perfetto policies_picture segment_figures"
        " study td_figures train_demo"
    ),
    "the house: one line for an error, true documents, imports one way": (
        "cli conftest device documents files fill flags generate house lines readme shared"
        " refusals spawn watch"
    ),
}


@cache
def tracked(*kinds: str) -> list[Path]:
    """The files that git knows, by how their names end. Raises OSError without git."""
    command = ["git", "ls-files", *(f"*.{kind}" for kind in kinds)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [path for path in map(ROOT.joinpath, listed.stdout.splitlines()) if path.exists()]


def tokens(text: str) -> int:
    """The tokens of a Python file's text."""
    count = 0
    begins = True  # a statement begins here: a string is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            continue
        if token.type in SILENT:
            begins = True
            continue
        is_text = token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""')
        if not (begins and is_text):
            count += 1
            begins = False
    return count


def by_folder() -> tuple[Counter[str], Counter[str]]:
    """Tokens and lines of the Python files in each folder; those at the root are "(root)"."""
    found = Counter()
    lines = Counter()
    for path in tracked("py"):
        parts = path.relative_to(ROOT).parts
        folder = parts[0] if len(parts) > 1 else "(root)"
        text = path.read_text(encoding="utf-8")
        found[folder] += tokens(text)
        lines[folder] += text.count("\n")
    return found, lines


def book() -> Counter[str]:
    """All lines of each file of the book."""
    texts = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in BOOK}
    return Counter({name: len(text.splitlines()) for name, text in texts.items()})


def copy_book(folder: Path) -> None:
    """Copy the nine files, and what stands beside them, into a folder."""
    for name in (*(f"{name}.py" for name in BOOK), *BESIDE):
        source = ROOT / name
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def by_promise() -> dict[str, int]:
    """Lines of the tests of each promise. Raises ValueError if a file has none, or two."""
    files: dict[str, int] = {}
    for path in tracked("py"):
        if path.parent == TESTS:
            name = path.stem.removeprefix("test_")
            files[name] = files.get(name, 0) + path.read_bytes().count(b"\n")
    lines = {
        promise: sum(files.pop(name) for name in own.split()) for promise, own in PROMISES.items()
    }
    if files:
        raise ValueError(f"PROMISES of tests/lines.py has no row for {', '.join(files)}")
    return lines


def main() -> None:
    if sys.argv[1:]:
        copy_book(Path(sys.argv[1]))
        return
    found, lines = by_folder()
    found["all"] = found.total()
    lines["all"] = lines.total()
    for folder, count in found.most_common():
        print(f"{count:9,} tokens, {lines[folder]:7,} lines of Python: {folder}")
    for promise, number in by_promise().items():
        print(f"{number:9,} lines of tests: {promise}")
    print(f"{book().total():9,} lines of the book ({', '.join(BOOK)})")


if __name__ == "__main__":
    main()
