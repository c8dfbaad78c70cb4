"""`python -m course doctor`: what this machine lacks for the course, one line for each thing.

It must run where nothing is right yet: on Python 3.8, without a package. So it imports the standard
library alone, and has no syntax that is newer.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST = (3, 11)
TOO_OLD = sys.version_info < LEAST
GOOD, NOTE, MISSING = "ok", "note", "MISSING"  # MISSING: the exercises here do not run without it
WINDOWS, LINUX = sys.platform == "win32", sys.platform.startswith("linux")
X86 = platform.machine().lower() in ("x86_64", "amd64")
BROWSERS = (  # names of programs; apps of a Mac; below Windows' folders for programs
    "chromium", "chromium-browser", "google-chrome", "firefox", "microsoft-edge",
    "/Applications/Google Chrome.app", "/Applications/Firefox.app", "/Applications/Safari.app",
    "Microsoft/Edge/Application/msedge.exe", "Google/Chrome/Application/chrome.exe",
    "Mozilla Firefox/firefox.exe",
)  # fmt: skip
PIP, FIGURES, ALL = "python -m pip install", "-e .", "-r requirements.txt"
Found = "tuple[str, str]"  # a state, and a sentence


def python() -> Found:
    wanted = ".".join(map(str, LEAST))
    if sys.version_info < LEAST or sys.maxsize < 2**32:
        bits = 64 if sys.maxsize > 2**32 else 32
        return MISSING, (
            f"this is Python {platform.python_version()}, {bits} bits: install a 64-bit Python"
            f" {wanted} or newer, from python.org or with your system's packages"
        )
    return GOOD, f"Python {platform.python_version()}"


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


def lacking(name: str) -> dict:
    """The packages that are not as we want them; and what is wrong. name: FIGURES or ALL."""
    found = {}
    file = "pyproject.toml" if name == FIGURES else "requirements.txt"
    text = (ROOT / file).read_text(encoding="utf-8")
    ours = re.search(r"^dependencies = (.*)$", text, re.MULTILINE)
    for line in re.findall(r'"(.*?)"', ours[1]) if ours else text.splitlines():
        match = re.match(r"([\w-]+)(==|>=)([\w.]+)[^;#]*(;[^#]*)?", line)
        if not match or (match[4] and not (LINUX and X86)):  # markers: xformers, on Linux alone
            continue
        try:
            here = metadata.version(match[1])
        except metadata.PackageNotFoundError:
            found[match[1]] = "not there"
        else:
            if match[2] == "==" and here.partition("+")[0] != match[3]:
                found[match[1]] = f"{here}, not {match[3]}"
    return found


def told(found: dict) -> str:
    return ", ".join(f"{name} ({what})" for name, what in found.items())


def figures() -> Found:
    if found := lacking(FIGURES):
        return MISSING, f"{told(found)}: run {PIP} {FIGURES}"
    return GOOD, "the packages of the figures, and of all exercises but E2 to E4"


def torch() -> Found:
    needs = "E2 to E4 and all that runs a model need it; the other exercises do not"
    if sys.platform == "darwin" and X86:
        return NOTE, f"PyTorch has no package for Intel Macs. {needs}: use another machine"
    found = lacking(ALL)
    if "torch" in found:
        return NOTE, f"no torch. {needs}. To get it, run {PIP} {ALL}"
    if found:
        return NOTE, f"{told(found)}: run {PIP} {ALL}"
    return GOOD, f"torch {metadata.version('torch')}, and all that a model needs"


def browser() -> Found:
    below = [os.environ.get(name, "") for name in ("ProgramFiles", "ProgramFiles(x86)")]
    for name in BROWSERS:
        if shutil.which(name) or any(os.path.exists(os.path.join(each, name)) for each in below):
            return GOOD, f"a browser that runs the pages: {Path(name).stem}"
    return NOTE, "no Chrome, Edge, Firefox or Safari found: the exercises in pages need one"


def writing() -> Found:
    for folder in (ROOT, ROOT / "course", ROOT / "course" / "mine"):
        if folder.is_dir() and not os.access(str(folder), os.W_OK):
            return MISSING, f"no permission to write in {folder}: copy the project to your folder"
    return GOOD, "permission to write in course/mine"


CHECKS = (python, environment, figures, torch, browser, writing)


def doctor() -> bool:
    """Print a line for each thing. Returns whether nothing is missing."""
    found = [check() for check in CHECKS]
    for state, said in found:
        print(f"{state:8}{said}")
    missing = sum(state == MISSING for state, _ in found)
    ready = "\nready: python -m course start"
    print(
        f"\n{missing} missing: do what these lines say, then run this again" if missing else ready
    )
    return not missing
