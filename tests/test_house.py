"""How the project is built: what is priced needs no torch, and no arrow leads back up.

An arrow is an import, wherever it stands: one inside a function counts as one at the top.
"""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import lines
import pytest

from tests import warm

ROOT = Path(__file__).parent.parent

# From the bottom to the top. A room is a file at the root, or a folder. Each may import from the
# rows that are listed before its own, and a folder from itself.
ORDER = [
    ["command"],  # what all commands share; it knows nothing of the engine
    ["configs"],  # models, GPUs and constants by name
    ["batch"],
    ["scheduler", "kvcache", "costmodel", "timeline"],
    ["examples"],  # policies of a user's own
    ["attention", "loop"],
    ["paged"],  # today's policies; blocks, in place of the scheduler's memory and of the slots
    ["model"],
    ["sampling"],
    ["loading"],
    ["executor"],
    ["fast"],
    ["simulate"],  # it makes the policies of paged/ known
    ["beam"],  # `LLM.beam_search` needs it; the loop and the policies do not
    ["engine"],
    ["pipeline"],
    ["apart"],  # several engines as one
    ["pictures", "serving"],  # pictures draw pipelines, too
    ["web"],  # the loop behind a server
    ["generate", "distributed", "serve", "demo"],
    ["experiments"],
    ["plan"],  # a command that has the tables, colours and data sets of experiments/lib
    ["course"],
    ["notebooks"],
    ["docs"],  # fills the documents with numbers
    ["tests"],
]
# Folders whose files find each other without the folder's name.
BY_THEMSELVES = ("notebooks", "tests")
# `import fast.first` sets what PyTorch reads as it is loaded: it comes before all else, and imports
# nothing itself.
BEFORE_ALL = "fast.first"

# Scripts that measure, and nothing else, import `fast.first`. All others predict.
SCRIPTS = sorted(
    path.stem for path in (ROOT / "experiments").glob("*.py")
    if path.stem != "__init__" and "import fast.first" not in path.read_text("utf-8")
)  # fmt: skip

WITHOUT_TORCH = [
    *(f"import experiments.{name}" for name in SCRIPTS),
    "import simulate, loading.policyfile, loading.requests, plan",
    "import pipeline",
    "import paged.blocks, paged.prompts, apart.simulate",
    "import beam.request",
    "import web.runner, web.priced",
    "import course.__main__, course.grade, course.selftest, course.picture",
    "import scheduler, loop, batch, costmodel, timeline, configs",
]
# What the browser runs. It has no package at all.
WITHOUT_NUMPY = ["import web.explorer", "import course.browser"]


@pytest.mark.parametrize(("package", "lines"), [("torch", WITHOUT_TORCH), ("numpy", WITHOUT_NUMPY)])
def test_what_needs_no_package_imports_none(package: str, lines: list[str]) -> None:
    """In a fresh interpreter: whatever imports it is named."""
    code = "import sys\n"
    for line in lines:
        code += f"{line}\nif {package!r} in sys.modules: sys.exit({line!r})\n"
    done = warm.fresh("-c", code)
    assert done.returncode == 0, done.stderr


def tracked() -> list[Path]:
    """The project's .py files, relative to its root."""
    try:
        paths = lines.tracked("py")
    except FileNotFoundError:
        pytest.skip("needs git")
    if not paths:
        pytest.skip("needs a clone: git knows no file here")
    return [path.relative_to(ROOT) for path in paths]


def dotted(path: Path) -> str:
    """pipeline/costs.py -> pipeline.costs; pipeline/__init__.py -> pipeline."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """A file's imports, at the top or nested."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path) -> set[str]:
    """All that a file asks for: `from a import b` is a and a.b."""
    names = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, "the project has no relative imports"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@cache
def arrows() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports."""
    files = {dotted(path): path for path in tracked()}
    found = {}
    for name, path in files.items():
        names = imported(path)
        folder = path.parts[0]
        beside = {f"{folder}.{each}" for each in names} if folder in BY_THEMSELVES else set()
        ours = {each for each in names | beside if each in files} - {name}
        # `from a import b`, where b is a module: no arrow to what else is in a
        whole = {each for each in ours if any(other.startswith(each + ".") for other in ours)}
        found[name] = ours - {each for each in whole if not asked_of(path, each, files)}
    return found


def asked_of(path: Path, package: str, files: dict[str, Path]) -> bool:
    """Whether a file takes a name out of a package that is no module of it."""
    for node in imports(path):
        if isinstance(node, ast.Import) and package in [alias.name for alias in node.names]:
            return True
        names = node.names if isinstance(node, ast.ImportFrom) and node.module == package else []
        if any(f"{package}.{alias.name}" not in files for alias in names):
            return True
    return False


def room(module: str) -> str:
    return module.partition(".")[0]


def test_the_book_is_short() -> None:
    """Its core takes an evening to read. What a reader may skip lies elsewhere."""
    assert lines.book().total() <= lines.MOST_LINES, lines.book()


def test_the_house_does_not_grow() -> None:
    """`make lines` prints the numbers, and what they may be at most."""
    tracked()  # skips where git knows nothing
    found = lines.counted()
    over = [f"{found[what]:,} {what}" for what, most in lines.MOST.items() if found[what] > most]
    assert not over, f"more than {lines.MOST}: take away as much as you add"


def test_the_root_is_short() -> None:
    names = [path.name for path in ROOT.glob("*.py")]
    assert len(names) <= 16, "a newcomer needs each of these names"


def test_the_arrows_are_found() -> None:
    """The tests below would say nothing of a map that is empty."""
    assert arrows()["loop"] == {"batch", "scheduler", "timeline"}
    assert {"pipeline.costs", "pipeline.micro_batches", "simulate"} <= arrows()["pipeline.simulate"]
    assert {"fast.cpu", "fast.native"} <= arrows()["fast.backends"], "`from fast import cpu, ...`"
    assert "fast" not in arrows()["fast.backends"]
    assert "pipeline" in arrows()["distributed"], "`from pipeline import BUBBLES`"
    assert {"tests.conftest", "loop"} <= arrows()["tests.test_beam"]
    assert len(arrows()) > 100


def test_every_file_has_a_room() -> None:
    rooms = [each for row in ORDER for each in row]
    assert sorted({room(module) for module in arrows()} - set(rooms)) == []
    assert len(set(rooms)) == len(rooms)


def test_no_module_imports_itself_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(reversed(error.args[1]))}")


def test_no_arrow_leads_back_up() -> None:
    row = {each: number for number, rooms in enumerate(ORDER) for each in rooms}
    wrong = [
        f"{module} -> {other}"
        for module, others in sorted(arrows().items())
        for other in sorted(others)
        if other != BEFORE_ALL
        and room(module) != room(other)
        and row[room(other)] >= row[room(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_what_comes_before_torch_imports_nothing() -> None:
    assert arrows()[BEFORE_ALL] == arrows()["fast"] == set()
    assert not any("torch" in name for name in imported(Path("fast/first.py")))


# Calls that write a file where it stands: an interrupt would leave half of it. The last line:
# with a mode that writes, over several lines and around one pair of brackets.
IN_PLACE = re.compile(
    r"\b(write_text|write_bytes|touch|rename|copyfile|copy2|copytree|move|savefig|save_file|to_csv"
    r"|NamedTemporaryFile|mkstemp|json\.dump|nbformat\.write|shutil\.copy|(np|torch)\.save\w*)\("
    r"""|\b(open|ZipFile)\(([^()]|\([^()]*\))*?["'][rbt]*[wax+][rwaxbt+]*["']"""
)
FINE = re.compile(
    r"\bwrite_file\(.*|\bdef to_csv\(|\b(savefig|ZipFile)\(data\b"
)  # a buffer is called data
MAY = {
    "command/cli.py",  # `write_file` itself
    "course/grade.py",  # what a worker says, in a folder that was made for it
    "experiments/gpu_day.py",  # row by row: what is known is on the disk when a GPU hangs
    "experiments/lib/peers.py",  # writes to /proc
}


def written_in_place(text: str) -> list[str]:
    """The calls of a program that write a file, except those of FINE.

    It does not see a call under another name, a mode in a variable, nor what other libraries write
    by a method that is not in IN_PLACE, such as an image's `save`.
    """
    rest = FINE.sub("", text)
    return [rest[each.start() : each.end() + 40] for each in IN_PLACE.finditer(rest)]


def test_files_are_written_by_write_file_alone() -> None:
    """Anything else loses the old file to an interrupt. Tests, and other libraries, are free."""
    for wrong in ("open(\n    at(1),\n    mode='r+b',\n)", 'ZipFile(a, "w")', "p.write_text(data)"):
        assert written_in_place(wrong), wrong
    for fine in ("open(a)", 'open(a, "rb")', "savefig(data)", "write_file(a, lambda b: move(b))"):
        assert not written_in_place(fine), fine
    paths = [path for path in tracked() if path.parts[0] != "tests" and path.as_posix() not in MAY]
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}
    found = [(f"{path}", line) for path in paths for line in written_in_place(texts[path])]
    assert found == [], "cli.write_file would lose nothing"
