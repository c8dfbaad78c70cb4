"""Install what this Python lacks, and the PyTorch that fits NVIDIA's driver. All else stays.

    python notebooks/install_missing.py

It is for a machine that has packages of its own, such as Colab's, and for an older driver. A
package that is here stays, whatever its version. PyTorch alone is replaced: if it is older than the
oldest in requirements.txt, or if its CUDA needs a newer driver.

    driver                   PyTorch
    580 or newer, or none    the newest in requirements.txt, for CUDA 13
    525 to 579               the oldest in requirements.txt, for CUDA 12
    older                    none: one line says so

pip gets one command, which names PyTorch's version. So no other package can replace it.
"""

import enter  # noqa: F401

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from shutil import which

from command.checks import UserError
from command.cli import ROOT, run_main
from command.flags import Parser

OLDEST_DRIVER = {"12": 525, "13": 580}  # by CUDA's major version, as in loading/device.py
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


def cuda_of_torch() -> str:
    """The major version of CUDA that the PyTorch here is built with; "": it has none."""
    command = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition(".")[0]


def torch_for(line: str, own: str | None, cuda: str, driver: int | None) -> str:
    """What pip is asked for: the version that is here, if it may stay. line: of requirements.txt.

    own: the version that is here, or None. cuda: see `cuda_of_torch`.
    """
    oldest = re.search(r">=([\d.]+)", line)[1]
    old_driver = driver is not None and driver < OLDEST_DRIVER["13"]
    if driver is not None and driver < OLDEST_DRIVER["12"]:
        raise UserError(
            f"NVIDIA's driver is {driver}: it must be {OLDEST_DRIVER['12']} or newer for PyTorch"
            f" {oldest}, the oldest that the project runs with"
        )
    fits = not old_driver or OLDEST_DRIVER.get(cuda, 0) <= driver
    if own and numbers(own) >= numbers(oldest) and fits:
        return f"torch=={own}"
    return f"torch=={oldest}" if old_driver else line


def wanted(lines: Sequence[str], here: Callable[[str], str | None], torch: str) -> list[str]:
    """What follows `pip install`; nothing if all is here.

    here: package -> its version, or None. torch: see `torch_for`.
    """
    packages = [package_of(line) for line in lines]
    found = [
        line
        for line, package in zip(lines, packages, strict=True)
        if package not in ("torch", *LEFT_OUT) and here(package) is None
    ]
    stays = torch == f"torch=={here('torch')}"
    return [] if stays and not found else [torch, *found]


def main() -> None:
    Parser(__doc__).parse_args()
    lines, found, own = requirements(), driver(), installed("torch")
    print(f"NVIDIA's driver: {found or 'none'}; PyTorch: {own or 'none'}")
    (line,) = [line for line in lines if package_of(line) == "torch"]
    words = wanted(lines, installed, torch_for(line, own, cuda_of_torch() if own else "", found))
    if words:
        print("pip install", shlex.join(words), flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        if subprocess.run([*pip, *words], check=False).returncode:
            raise UserError(f"pip could not install {' '.join(words)}: its last lines say why")
    print("all that the project needs is here")


if __name__ == "__main__":
    run_main(main)
