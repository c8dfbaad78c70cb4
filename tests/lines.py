"""Lines and bytes of the project, beside what they may be at most: `make lines`.

All lines count: code, docstrings, comments, blank ones. Who adds takes away: these numbers go down
with each cut, and never up. tests/test_house.py holds them.
"""

import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
OTHERS = ("toml", "js", "html", "css", "cpp", "sh")  # what is written by hand
MOST = {
    "lines of .py": 61_022,
    "bytes of .py": 2_730_300,
    "marks of .py for the formatter": 327,
    f"lines of .{', .'.join(OTHERS)}": 7_793,
}

# The core of the book: the first files of the README's map, in its order.
BOOK = (
    "batch", "scheduler", "loop", "kvcache", "attention", "model", "sampling", "executor",
    "engine",
)  # fmt: skip
MOST_LINES = 1785

# What the tests promise, and in which files: tests/NAME.py, or tests/test_NAME.py.
PROMISES = {
    "exactness: the same tokens under every policy as when each request runs alone": (
        "oracle attention engine kvcache loop paged"
    ),
    "each policy by hand": "policies policy_file scheduler",
    "transformers agrees": "beam_transformers checkpoint families nanogpt tokenizer",
    "fast operators give what the plain ones give": (
        "beam_native cpus cuda fake_cuda gpu_day graphs kernels linear native plain"
    ),
    "the other papers: pipelines, beams, halves apart": (
        "apart beam beam_cost pipeline pipeline_worker stages td_pipe"
    ),
    "the price of a batch by hand": "constants costmodel law",
    "capacity is one: planner, traces, anchors": (
        "anchor beside_benchmarks calibrate plan serving traces workload"
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
        "cli conftest device documents files fill flags generate house lines mutants readme"
        " refusals spawn watch"
    ),
}


@cache
def tracked(*kinds: str) -> list[Path]:
    """The files that git knows, by how their names end. Raises OSError without git."""
    command = ["git", "ls-files", *(f"*.{kind}" for kind in kinds)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [path for path in map(ROOT.joinpath, listed.stdout.splitlines()) if path.exists()]


def counted() -> dict[str, int]:
    """What MOST limits, as it is."""
    python = [path.read_bytes() for path in tracked("py")]
    mistakes = TESTS / "mutants.toml"  # the more, the better
    others = sum(path.read_bytes().count(b"\n") for path in tracked(*OTHERS) if path != mistakes)
    lines = sum(text.count(b"\n") for text in python)
    marks = sum(b"# fmt" in line for text in python for line in text.splitlines())
    return dict(zip(MOST, (lines, sum(map(len, python)), marks, others), strict=True))


def book() -> Counter[str]:
    """All lines of each file of the book."""
    texts = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in BOOK}
    return Counter({name: len(text.splitlines()) for name, text in texts.items()})


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
    for what, number in counted().items():
        print(f"{number:9,} {what}, of {MOST[what]:,}")
    for promise, number in by_promise().items():
        print(f"{number:9,} lines of tests: {promise}")
    print(f"{book().total():9,} lines of the book ({', '.join(BOOK)}), of {MOST_LINES:,}")


if __name__ == "__main__":
    main()
