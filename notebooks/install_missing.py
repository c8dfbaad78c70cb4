"""Install what this Python lacks, and keep what it has: for a machine such as Colab's.

    python notebooks/install_missing.py

requirements.txt pins every version, for an environment of our own. A machine that brings PyTorch
for its own driver, and runs a notebook already, should keep both. So a package that is there stays,
whatever its version. There is one exception: PyTorch older than 2.10 is replaced.

PyTorch from PyPI is built for CUDA 13, which needs NVIDIA's driver 580 or newer. Below an older
driver it sees no GPU. There, its build for CUDA 12.6 is taken from PyTorch's own index.
"""

import enter  # noqa: F401

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from shutil import which

from checks import UserError
from cli import ROOT, run_main
from flags import Parser

OLDEST_TORCH = (2, 10)
CUDA_13 = 580  # the oldest driver for it
OLDER = "https://download.pytorch.org/whl/cu126"  # builds for drivers from 525 on
LEFT_OUT = ("jupyter",)  # a notebook runs already


def requirements(name: str = "requirements.txt") -> list[str]:
    """The lines of a file and of those that it names, without comments. Not the project itself."""
    found = []
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found += requirements(line.removeprefix("-r ").strip())
        elif line and not line.startswith("-e"):
            found.append(line)
    return found


def package_of(line: str) -> str:
    return re.match(r"[\w.-]+", line).group()


def installed(package: str) -> str | None:
    """Its version; None: it is not here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing(lines: Sequence[str], here: Callable[[str], str | None]) -> list[str]:
    """Those that are to be installed. here: package -> its version, or None."""
    found = []
    for line in lines:
        package, own = package_of(line), here(package_of(line))
        if package in LEFT_OUT:
            continue
        old = package == "torch" and own is not None and numbers(own) < OLDEST_TORCH
        if own is None or old:
            found.append(line)
    return found


def numbers(text: str) -> tuple[int, ...]:
    """2.10.0+cu128 -> (2, 10)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def driver() -> int | None:
    """The first number of NVIDIA's driver; None: there is none."""
    if which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    first = re.match(r"\d+", done.stdout)
    return int(first.group()) if first else None


def commands(lines: Sequence[str], driver: int | None) -> list[list[str]]:
    """What follows `pip install`, one call after the other. PyTorch first: others ask for it."""
    torch = [line for line in lines if package_of(line) == "torch"]
    rest = [line for line in lines if line not in torch]
    index = ["--index-url", OLDER] if driver is not None and driver < CUDA_13 else []
    return [each for each in ([*torch, *index] if torch else [], rest) if each]


def main() -> None:
    Parser(__doc__).parse_args()
    lines, found = missing(requirements(), installed), driver()
    print(f"NVIDIA's driver: {found or 'none'}; PyTorch: {installed('torch') or 'none'}")
    for words in commands(lines, found):
        print("pip install", *words, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if subprocess.run([*pip, *words], check=False).returncode:
            raise UserError(f"pip could not install {' '.join(words)}: its last lines say why")
    print("all that the project needs is here")


if __name__ == "__main__":
    run_main(main)
