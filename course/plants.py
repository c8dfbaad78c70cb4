"""The planted mistakes: wrong solutions, each with the property that catches it, and the words.

They are rows of planted.toml. A mistake is the right answer with some of its text changed, or with
code below it that gives a name another meaning.
"""

import ast
import inspect
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from types import ModuleType, SimpleNamespace

from command.checks import UserError
from course.exercises import EXERCISES, HERE, STUBS, load
from course.reference import Slots, solution

PLANTED = HERE / "planted.toml"
# What a stub must have besides, so that the project's own code runs in it: its imports, the base
# class that its solution calls, the hook `share` of it.
FIT = {
    "e07": [["ModelConfig\n", "ModelConfig\nfrom costmodel import padded as padded_rows\n"]],
    "e08": [['_serve"\n', '_serve"\n\n    def share(self, request, room):\n        return room\n']],
    "e09": [["from types", "from itertools import pairwise\nfrom types"]],
    "e13": [["import Sequence\n", "import Sequence\nfrom itertools import takewhile\n"]],
    "final": [
        ["import Scheduler", "import SarathiServe"],
        ["Mine(Scheduler)", "Mine(SarathiServe)"],
        ["raise NotImplementedError", "return super().schedule(now)"],
    ],
}


@dataclass(frozen=True)
class Plant:
    """exercise: its key. caught_by: a property. message: part of what the student is told.

    title: what is wrong. change: pairs of texts, one in the right answer and one for its place.
    code: stands below that. Both are how the mistake is written; `source` is what comes out.
    """

    name: str
    exercise: str
    title: str
    caught_by: str
    message: str
    change: Iterable[list[str]] = ()
    code: str = ""

    @cached_property
    def source(self) -> str:
        """All of the wrong solution. A UserError if a change does not fit the right answer."""
        answer = right(EXERCISES[self.exercise].file)
        text = changed(answer, self.change, f"{PLANTED.name}, {self.name}")
        if self.code:
            text += f"\n\n{self.code}"
        return f"# Planted mistake {self.name}: {self.title}\n{text}"

    def load(self) -> ModuleType:
        return load(self.source, f"{self.name}.py")


def plants() -> list[Plant]:
    """All of them. None is put together before its `source` is asked for."""
    table = tomllib.loads(PLANTED.read_text("utf-8"))
    return [Plant(name, key, **row) for key, own in table.items() for name, row in own.items()]


def changed(text: str, change: Iterable[list[str]], name: str) -> str:
    """A text with its changes. A UserError unless each old text stands there once."""
    for old, new in change:
        if (times := text.count(old)) != 1:
            raise UserError(f"{name}: {old!r} stands there {times} times, and must once")
        text = text.replace(old, new)
    return text


def unwritten(stub: str) -> dict[str, ast.FunctionDef]:
    """The functions that a stub leaves to the student, by name: chunk_mask, Sarathi.prefills."""
    found = {}
    for node in ast.parse(stub).body:
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef) and isinstance(each.body[-1], ast.Raise):
                found[each.name if each is node else f"{node.name}.{each.name}"] = each
    return found


@cache
def right(file: str) -> str:
    """A right answer that stands alone, e06: the stub, and in it the project's own code.

    (Not the adapters of `reference`: they need more of the project than a worker may read.)
    """
    path = STUBS / f"{file}.py"
    stub = changed(path.read_text("utf-8"), FIT.get(file, ()), path.name)
    lines = stub.splitlines(keepends=True)
    known = vars(solution(file)) | {"Slots": Slots}
    for name, node in reversed(unwritten(stub).items()):
        own = inspect.getsource(attrgetter(name)(SimpleNamespace(**known)))
        head = " " * node.col_offset + f"def {node.name}"  # without a decorator
        text = re.sub(r"(?s)^.*?def \w+", head, own, count=1)
        lines[node.lineno - 1 : node.end_lineno] = [text]
    return "".join(lines)


def named(text: str) -> Plant:
    """The mistake that a lecturer names: 12, p12, 13a. A UserError if there is none."""
    known = {each.name: each for each in plants()}
    parts = re.fullmatch(r"p?0*(\d{1,2})([a-z]?)", text.strip().lower(), re.ASCII)
    name = f"p{parts[1]:0>2}{parts[2]}" if parts else "none"
    if name not in known:
        near = ", ".join(each for each in known if each.startswith(name))
        said = f"choose one of {near}" if near else "see course/planted.toml"
        raise UserError(f"unknown mistake {text[:60]!r}: {said}")
    return known[name]
