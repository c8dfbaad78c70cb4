"""Commands in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.watch import PATIENCE

ROOT = Path(__file__).parent.parent
Command = subprocess.Popen


def start(*arguments: object, cwd: Path = ROOT, **environment: str) -> Command:
    """`python ARGUMENTS`, with pipes of text. environment: is added to this process's."""
    return Command(
        [sys.executable, *map(os.fspath, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    """`python ARGUMENTS`, to its end. options: of subprocess.run.

    It inherits stdin, and may print what is no UTF-8.
    """
    usual = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    usual |= {"errors": "replace", "timeout": PATIENCE, "check": False} | options
    return subprocess.run([sys.executable, *map(os.fspath, arguments)], **usual)  # noqa: PLW1510
