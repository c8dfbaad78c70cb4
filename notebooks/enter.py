"""Imported first by every script and lesson of this folder: see command/enter.py.

Python looks for modules in this folder, then in its environment. That may have none of ours, or
belong to another clone. So the root comes first.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command.enter import cli


class WrongKernel(ModuleNotFoundError):
    """Jupyter shows this line, and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"error: {self}"]


for name in ("torch", "matplotlib"):
    if find_spec(name) is None:
        raise WrongKernel(
            f"this kernel's Python has no {name}: in the project's folder,"
            f" {cli.to_run('install')} '.venv/bin/jupyter lab notebooks'; in VS Code, select the"
            " kernel .venv",
            name=name,
        )

import command.first  # before torch  # noqa: F401
