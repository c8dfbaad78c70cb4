"""The planted mistakes: wrong solutions, each with the property that catches it, and the words."""

import ast
from dataclasses import dataclass
from pathlib import Path

from course.exercises import PLANTED


@dataclass(frozen=True)
class Plant:
    """exercise: its key. caught_by: a property. message: part of what the student is told."""

    path: Path
    exercise: str
    caught_by: str
    message: str

    @property
    def title(self) -> str:
        """The first line of its docstring: what is wrong."""
        return ast.get_docstring(ast.parse(self.path.read_text("utf-8"))).splitlines()[0]


FIELDS = ("exercise", "caught_by", "message")


def plants() -> list[Plant]:
    """All of them. A head is read, and not run."""
    found = []
    for path in sorted(PLANTED.glob("p*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        head = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in FIELDS
        }
        found.append(Plant(path, **head))
    return found
