"""`python -m course doctor`: what this machine lacks for the course, one line for each thing.

It must run where nothing is right yet: on Python 3.8, without a package. So it imports the standard
library alone, and has no syntax that is newer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST = (3, 11)
TOO_OLD = sys.version_info < LEAST
DISK, MEMORY = 6, 2  # GB: the README's .venv with CUDA; a lesson with the demo model
GOOD, NOTE, MISSING = "ok", "note", "MISSING"  # MISSING: the exercises here do not run without it
WINDOWS, LINUX = sys.platform == "win32", sys.platform.startswith("linux")
X86 = platform.machine().lower() in ("x86_64", "amd64")
BROWSERS = (  # names of programs; apps of a Mac; below Windows' folders for programs
    "chromium", "chromium-browser", "google-chrome", "firefox", "microsoft-edge",
    "/Applications/Google Chrome.app", "/Applications/Firefox.app", "/Applications/Safari.app",
    "Microsoft/Edge/Application/msedge.exe", "Google/Chrome/Application/chrome.exe",
    "Mozilla Firefox/firefox.exe",
)  # fmt: skip
PIP, FIGURES, ALL = "python -m pip install -r", "requirements-figures.txt", "requirements.txt"
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
    """The packages of a file of requirements that are not as it wants them; and what is wrong."""
    found = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
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
    return GOOD, "the packages of the figures, and of all exercises but E2 to E5"


def torch() -> Found:
    needs = "E2 to E5 and all that runs a model need it; the other exercises do not"
    if sys.platform == "darwin" and X86:
        return NOTE, f"PyTorch has no package for Intel Macs. {needs}: use another machine"
    found = lacking(ALL)
    if "torch" in found:
        return NOTE, f"no torch. {needs}. To get it, run {PIP} {ALL}"
    if found:
        return NOTE, f"{told(found)}: run {PIP} {ALL}"
    return GOOD, f"torch {metadata.version('torch')}, and all that a model needs"


def compiler() -> Found:
    """Only Linux uses one by itself: fast/native.py."""
    if not LINUX:
        return GOOD, "a C++ compiler is not needed: PyTorch's own operators run here"
    name = os.environ.get("CXX", "").strip() or "g++"
    slower = "models run, only slower. On Debian or Ubuntu: sudo apt install g++"
    if not shutil.which(name):
        return NOTE, f"no {name}: {slower}"
    with tempfile.TemporaryDirectory() as folder:
        command = [name, "-fopenmp", "-x", "c++", "-", "-o", os.path.join(folder, "program")]
        source = b"#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
        done = subprocess.run(command, input=source, stderr=subprocess.DEVNULL, check=False)
    if done.returncode:
        return NOTE, f"{name} compiles nothing with OpenMP: {slower}"
    return GOOD, f"{name}, with OpenMP"


def tool(name: str, without: str) -> Found:
    return (GOOD, name) if shutil.which(name) else (NOTE, f"no {name}: {without}")


make = partial(tool, "make", "course/README.md has the same commands without it")
git = partial(tool, "git", "the course runs; only updates need it (git-scm.com)")


def disk() -> Found:
    free = shutil.disk_usage(str(ROOT)).free / 1e9
    if free < DISK and "torch" in lacking(ALL):
        return NOTE, f"{free:.1f} GB of disk free: too little for torch with CUDA, see README.md"
    return GOOD, f"{free:.0f} GB of disk free"


def free_memory() -> float | None:
    """GB that programs can still get; None where the system does not say."""
    if WINDOWS:
        numbers = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size, load; total, free, ...
        known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(numbers))
        return numbers[2] / 1e9 if known else None
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:  # a Mac
        return None
    match = re.search(r"MemAvailable:\s+(\d+)", text)
    return int(match[1]) / 1e6 if match else None


def memory() -> Found:
    free = free_memory()
    if free is None:
        return NOTE, f"free memory unknown here: lessons with a model need {MEMORY} GB"
    if free < MEMORY:
        return NOTE, f"{free:.1f} GB of memory free: close programs before lessons with a model"
    return GOOD, f"{free:.0f} GB of memory free"


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


def network() -> Found:
    if lacking(FIGURES):
        return NOTE, "pip needs a network once"
    return GOOD, "no network is needed from here on"


def system() -> Found:
    if WINDOWS:
        return NOTE, "Windows is untried by the authors: take python -m course, not make"
    if sys.platform == "darwin":
        return NOTE, "macOS is untried by the authors"
    return GOOD, platform.system()


CHECKS = (system, python, environment, figures, torch, compiler, make, git, disk, memory, browser,
          writing, network)  # fmt: skip


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
