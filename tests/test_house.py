"""How the project is built: what is priced needs no torch, and no arrow leads back up.

An arrow is an import, wherever it stands: one inside a function counts as one at the top.
"""

import ast
import re
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from unittest import mock

import lines
import pytest

from tests import spawn

ROOT = Path(__file__).parent.parent

# From the bottom to the top. A room is a file at the root, or a folder. Each may import from the
# rows that are listed before its own, and a folder from itself.
ORDER = [
    ["more"],  # the package itself: it is empty
    ["command"],  # what all commands share; it knows nothing of the engine
    ["configs"],  # models, GPUs and constants by name
    ["batch"],
    ["scheduler", "kvcache", "costmodel", "timeline"],
    ["examples"],  # policies of a user's own
    ["attention", "loop"],
    ["paged"],  # blocks, in place of the scheduler's memory and of the slots
    ["policies"],  # those outside the book
    ["model"],
    ["sampling", "loader", "tokenizer"],
    ["executor"],
    ["engine"],  # here the book ends: nothing of more/ is below
    ["loading"],
    ["fast"],
    ["fast_forward"],  # a priced loop that knows the policies above
    ["simulate"],  # it makes the policies of more/policies/ known
    ["beam"],  # `LLM.beam_search` needs it; the loop and the policies do not
    ["nano_sarathi"],  # the door of all the rooms above
    ["pipeline"],
    ["apart"],  # several engines as one
    ["pictures", "serving"],  # pictures draw pipelines, too
    ["web"],  # the loop behind a server
    ["generate", "serve", "demo"],
    ["experiments"],
    ["plan"],  # a command that has the tables, colours and data sets of experiments/lib
    ["course"],
    ["notebooks"],
    ["docs"],  # fills the documents with numbers
    ["tests"],
]
# Folders whose files find each other without the folder's name.
BY_THEMSELVES = ("notebooks", "tests")

# Scripts that measure, and nothing else, import `command.first`. All others predict.
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if path.stem != "__init__" and "import command.first" not in path.read_text("utf-8")
)

PROMISED = tomllib.loads((ROOT / "docs" / "without_torch.toml").read_text("utf-8"))
WITHOUT_TORCH = [f"experiments.{name}" for name in SCRIPTS] + [
    name
    for group in ("targets", "commands", "libraries")
    for names in PROMISED[group].values()
    for name in names
]
WITHOUT_TORCH.append("generate")  # until its flags are read: --help is there at once
# What the browser runs. It has no package at all.
WITHOUT_NUMPY = ["more.web.explorer", "course.browser"]


@pytest.mark.parametrize(
    ("absent", "modules"), [(PROMISED["absent"], WITHOUT_TORCH), (["numpy"], WITHOUT_NUMPY)]
)
def test_what_needs_no_package_runs_without_it(absent: list[str], modules: list[str]) -> None:
    """In a fresh interpreter that has none of these packages: whatever imports one is named."""
    code = "import sys\nfrom importlib import import_module\n"
    code += f"sys.modules |= {dict.fromkeys(absent)}\n"  # None: an import of it fails
    code += f"for name in {modules}:\n    print(name, file=sys.stderr)\n    import_module(name)"
    done = spawn.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_what_is_promised_without_torch_is_what_make_installs_without_it() -> None:
    """The targets that install something, and not what runs a model."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    rules: dict[str, list[str]] = {}
    for heads, needs in re.findall(r"^([^\s#][^:=\n]*):(?!=)([^=\n]*)$", text, re.MULTILINE):
        needs = needs.replace("$(READY)", ".venv/figures.stamp").split()
        rules |= dict.fromkeys(heads.split(), needs)

    def installed(target: str) -> set[str]:
        needs = rules.get(target, ())
        return {*needs}.union(*map(installed, needs))

    stamps = {target: installed(target) for target in rules[".PHONY"]}
    light = {name for name, needs in stamps.items() if ".venv/figures.stamp" in needs}
    heavy = {name for name, needs in stamps.items() if ".venv/run.stamp" in needs}
    assert heavy >= {"install", "test"} and light - heavy == set(PROMISED["targets"])


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
    """more/pipeline/costs.py -> more.pipeline.costs; more/pipeline/__init__.py -> pipeline."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def arrows() -> dict[str, set[str]]:
    """Module -> what it imports: modules of ours, wherever the import stands."""
    files = {dotted(path): path for path in tracked()}
    found = {}
    for name, path in files.items():
        nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        asked = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                asked |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "the project has no relative imports"
                # `from a import b` leads to the module a.b, or else to a
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                asked |= {each if each in files else node.module for each in inner}
        if (folder := path.parts[0]) in BY_THEMSELVES:
            asked |= {f"{folder}.{each}" for each in asked}
        found[name] = asked & {*files} - {name}
    assert len(found) > 100, "the tests below would say nothing of an empty map"
    return found


def room(module: str) -> str:
    """What stands in `more/` has rooms of its own."""
    return module.removeprefix("more.").partition(".")[0]


def test_tokens_are_what_no_formatting_changes() -> None:
    packed = "x, y = 1, 'a'\n"
    plain = '"""What it is."""\n\n# why\nx, y = (\n    1,  # one\n    "a",\n)\n'
    assert lines.tokens(packed) == 7  # x , y = 1 , 'a'
    assert lines.tokens(plain) == 7 + 3  # ( , )
    assert lines.tokens('def f(x):\n    """Docs."""\n    return x\n') == 8  # def f(x): return x
    assert lines.tokens('say("""a text, and no docstring""")\n') == 4


def test_the_house_does_not_grow() -> None:
    """Who adds asks what becomes superfluous."""
    tracked()  # skips where git knows nothing
    assert lines.by_folder()[0].total() <= lines.CEILING


def test_every_test_has_a_promise() -> None:
    """`make lines` prints the tokens by folder, and the lines of tests by what they promise."""
    tracked()  # skips where git knows nothing
    assert lines.by_promise()
    with mock.patch.object(lines, "tokens", len):  # fast: another test counts tokens
        assert set(lines.by_folder()[0]) >= {"(root)", "more", "tests"}


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
        if room(module) != room(other) and row[room(other)] >= row[room(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_what_comes_before_torch_imports_nothing() -> None:
    assert arrows()["command.first"] == set()
    assert "import torch" not in (ROOT / "command/first.py").read_text(encoding="utf-8")


# Calls that write a file where it stands: an interrupt would leave half of it. The last line:
# with a mode that writes, over several lines and around one pair of brackets. A buffer is `data`.
IN_PLACE = re.compile(
    r"\b(write_text|write_bytes|touch|rename|copyfile|copy2|copytree|move|savefig|save_file|to_csv"
    r"|NamedTemporaryFile|mkstemp|json\.dump|nbformat\.write|shutil\.copy|(np|torch)\.save\w*)\("
    r"""|\b(open|ZipFile)\(([^()]|\([^()]*\))*?["'][rbt]*[wax+][rwaxbt+]*["']"""
)
FINE = re.compile(r"\bwrite_file\(.*|\bdef to_csv\(|\b(savefig|ZipFile)\(data\b")
MAY = {
    "command/cli.py",  # `write_file` itself
    "course/grade.py",  # what a worker says, in a folder that was made for it
    "experiments/gpu_day.py",  # row by row: what is known is on the disk when a GPU hangs
    "experiments/lib/peers.py",  # writes to /proc
}


def test_files_are_written_by_write_file_alone() -> None:
    """Anything else loses the old file to an interrupt. Tests, and other libraries, are free."""
    for path in tracked():
        if path.parts[0] != "tests" and path.as_posix() not in MAY:
            text = FINE.sub("", (ROOT / path).read_text(encoding="utf-8"))
            assert not IN_PLACE.search(text), f"{path}: cli.write_file would lose nothing"
