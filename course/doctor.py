"""`python -m course doctor`: what this machine lacks for the course, one line for each thing.

It must run where nothing is right yet: on Python 3.8, without a package. So it imports the standard
library alone, and has no syntax that is newer.
"""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOO_OLD = sys.version_info < (3, 11) or sys.maxsize < 2**32
# MISSING: the exercises here do not run without it
GOOD = "ok"
NOTE = "note"
MISSING = "MISSING"
WINDOWS = sys.platform == "win32"
PIP = "run python -m pip install"
Found = "tuple[str, str]"  # a state, and a sentence


def python() -> Found:
    here = f"Python {platform.python_version()}"
    if TOO_OLD:
        return MISSING, (
            f"this is {here}: install a 64-bit Python 3.11 or newer, from python.org or with your"
            " system's packages"
        )
    return GOOD, here


def environment() -> Found:
    activate = r".venv\Scripts\activate" if WINDOWS else "source .venv/bin/activate"
    if sys.prefix != sys.base_prefix:
        return GOOD, f"an environment of its own: {sys.prefix}"
    if (ROOT / ".venv").is_dir():
        return MISSING, f"not in the environment: in {ROOT}, run {activate}"
    return MISSING, (
        f"no environment: in {ROOT}, run {'py' if WINDOWS else 'python3'} -m venv .venv, then"
        f" {activate}"
    )


def lacking(file: str) -> str:
    """The packages that this file names, and that are not there."""
    found = []
    text = (ROOT / file).read_text(encoding="utf-8")
    ours = re.search(r"^dependencies = (.*)$", text, re.MULTILINE)
    for line in re.findall(r'"(.*?)"', ours.group(1)) if ours else text.splitlines():
        if match := re.match(r"([\w-]+)[=>]=[^;]*$", line):  # no marker: for all systems
            try:
                metadata.version(match.group(1))
            except metadata.PackageNotFoundError:
                found.append(match.group(1))
    return ", ".join(found)


def figures() -> Found:
    if found := lacking("pyproject.toml"):
        return MISSING, f"no {found}: {PIP} -e ."
    return GOOD, "the packages of the figures, and of all exercises but E2 to E4"


def torch() -> Found:
    if found := lacking("requirements.txt"):
        needs = "E2 to E4 and running a model need them (Intel Macs: no torch is made for them)"
        return NOTE, f"no {found}: {PIP} -r requirements.txt. {needs}"
    return GOOD, "torch, and all that E2 to E4 need"


CHECKS = (python, environment, figures, torch)


def doctor() -> bool:
    """Print a line for each thing. Returns whether nothing is missing."""
    found = [check() for check in CHECKS]
    for state, said in found:
        print(f"{state:8}{said}")
    missing = sum(state == MISSING for state, _ in found)
    lacks = f"\n{missing} missing: do what these lines say, then run this again"
    print(lacks if missing else "\nready: python -m course start")
    return not missing
