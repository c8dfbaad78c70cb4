"""`make usb`: a folder for a USB stick, so that a class needs no network.

    START.html          one page of what to do
    serve_room.py       gives all of it to the room's laptops: Python's standard library
    site/               the course as pages, with Pyodide: `make site`
    wheels/             packages for Windows, Macs and Linux, torch for CPUs among them
    nano-sarathi.zip    the project as git has it

The pages are served, not opened with a double click: in a page from a file, browsers allow no
workers and no modules. The exercises run in a worker, and it takes files that are beside it.

`pip download --platform` asks "only on Linux?" of the machine that it runs on. For a Mac, it would
take xformers and CUDA; for Windows, it would forget pywinpty. uv resolves for the other system.
Then pip downloads exactly that, and checks each file's hash.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from command.checks import UserError
from command.cli import MARK, ROOT, write_file
from web.bundle import MANIFEST, check_folder

STICK, ARCHIVE = ROOT / "course" / "stick", "nano-sarathi.zip"
PYTHONS = ("3.11", "3.12", "3.13")
FILES = {"requirements.txt": "with torch", "requirements-figures.txt": "without torch"}
BUILD = "hatchling\neditables\n"  # for `-e .`, which pip builds with what it finds in wheels/
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
WHERE = {"PIP_INDEX_URL": "--index-url", "PIP_EXTRA_INDEX_URL": "--extra-index-url",
         "PIP_FIND_LINKS": "--find-links"}  # pip reads these by itself, uv does not  # fmt: skip
MACOS = "14.0"  # what torch asks for; uv reads it from a variable
MANYLINUX = ("2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")  # of glibc: pip adds none


@dataclass(frozen=True)
class System:
    """uv, tags: its names for uv and for pip. cuda: PyPI's torch is a CUDA build there."""

    name: str
    uv: str
    tags: tuple[str, ...]
    cuda: bool = False


SYSTEMS = (
    System("Windows, x86-64", "x86_64-pc-windows-msvc", ("win_amd64",)),
    System("Mac, M processor, macOS 14", "aarch64-apple-darwin", ("macosx_14_0_arm64",)),
    System("Linux, x86-64", "x86_64-manylinux_2_28",
           (*(f"manylinux_{each}_x86_64" for each in MANYLINUX), "manylinux2014_x86_64",
            "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"), cuda=True),
)  # fmt: skip


class Unavailable(Exception):
    """An index lacks a package, or nobody answers. The text is the tool's own."""


def run(*command: str, given: str = "") -> str:
    """What a Python module prints: pip, uv. given: its input. Raises Unavailable."""
    words, env = (sys.executable, "-m", *command), os.environ | {"MACOSX_DEPLOYMENT_TARGET": MACOS}
    done = subprocess.run(
        words, cwd=ROOT, env=env, input=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        causes = " ".join(done.stderr.split()).strip(": ").split(" cause: ")
        raise Unavailable(": ".join(dict.fromkeys((causes[0], causes[-1])))[:300])
    return done.stdout


def added(system: System, name: str) -> str:
    """What is resolved beside a file of requirements. On Linux, torch is a CPU build, or none."""
    newest = re.search(r"^torch\S*<=([\d.]+)", (ROOT / name).read_text("utf-8"), re.MULTILINE)
    return BUILD + (f"torch=={newest[1]}+cpu\n" if system.cuda and newest else "")


def fetch(system: System, python: str, name: str, index: list[str], wheels: Path) -> list[str]:
    """Download what a file of requirements needs there. Returns the names of the wheels.

    Wheels that are there with the right hash stay. index: more flags that say where to look.
    """
    own = [word for key, flag in WHERE.items() for place in os.environ.get(key, "").split()
           for word in (flag, place)]  # fmt: skip
    pins = run(
        "uv", "pip", "compile", name, "-", "--quiet", "--no-config", "--generate-hashes",
        "--only-binary", ":all:", "--no-header", "--no-annotate",
        "--no-emit-package", "nano-sarathi", "--index-strategy", "unsafe-best-match",
        "--python-platform", system.uv, "--python-version", python, *own, *index,
        given=added(system, name),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "pins.txt")
        write_file(listed, pins)
        said = run(
            "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes",
            "--only-binary", ":all:", "--implementation", "cp", "--python-version", python,
            *(word for tag in system.tags for word in ("--platform", tag)),
            "--dest", str(wheels), "--requirement", str(listed), *index,
        )  # fmt: skip
    saved = r"^\s*(?:Saved|File was already downloaded) .*?([^/\\\s]+\.whl)\s*$"
    return sorted({match[1] for match in re.finditer(saved, said, re.MULTILINE)})


def packages(system: System, python: str, kept: dict, wheels: Path) -> dict:
    """An entry of the manifest: what is there for a system and a Python. kept: of an earlier run.

    The index of CPU builds is asked where the user's own places have no such torch.
    """
    text = "".join((ROOT / name).read_text("utf-8") + added(system, name) for name in FILES)
    wanted = hashlib.sha256(text.encode()).hexdigest()
    there = all((wheels / name).is_file() for name in kept.get("files", ()))
    if kept.get("wanted") == wanted and kept.get("why") == "" and there:
        return kept
    why = ""
    for name, what in FILES.items():
        cpu = ["--extra-index-url", CPU_INDEX] if "torch==" in added(system, name) else []
        for index in ([], cpu)[: 1 + bool(cpu)]:
            try:
                files = fetch(system, python, name, index, wheels)
                return {"wanted": wanted, "what": what, "why": why, "files": files}
            except Unavailable as error:
                why = f"{error} ({CPU_INDEX})" if index else str(error)
    return {"wanted": wanted, "what": "nothing", "why": why, "files": []}


# ------------------------------------------------------------------------------------ the folder


def put(path: Path, data: bytes) -> None:
    """Write a file, unless it is there already as it should be: sticks are slow."""
    if not (path.is_file() and path.read_bytes() == data):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)


def project() -> bytes:
    """The project's files as the last commit has them, as a .zip."""
    command = ["git", "archive", "--format=zip", "--prefix=nano-sarathi/", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("git is not installed: the stick takes the project from it") from None
    if done.returncode:
        raise UserError(f"{ROOT} is no clone: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def pages(site: Path) -> list[str]:
    """The site's files. A UserError if it is not whole: in the room, nothing can be added."""
    if not (site / "index.html").is_file():
        raise UserError(f"--site {site} has no index.html: run 'make site'")
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file())
    if not any(name.endswith("pyodide.asm.wasm") for name in found):
        raise UserError(
            f"--site {site} has no Pyodide, so its exercises would need a network: run 'make site'"
            " where npm is installed"
        )
    return found


def megabytes(paths: list[Path]) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 1e6:,.0f} MB"


def usb(out: Path, site: Path, force: bool) -> None:
    """Write the stick's folder. What is there already stays, and is not downloaded again.

    Raises UserError if the folder has other things in it, unless `force`; if the site is not whole.
    """
    names, archive, out = pages(site), project(), out.resolve()
    check_folder(out, force)
    wheels, told = out / "wheels", {"mark": MARK, "site": [], "packages": {}}
    wheels.mkdir(parents=True, exist_ok=True)
    with suppress(OSError, ValueError):
        told |= json.loads((out / MANIFEST).read_text("utf-8"))
    before = {*told["site"]}, {name for each in told["packages"].values() for name in each["files"]}

    def tell() -> None:
        write_file(out / MANIFEST, json.dumps(told, indent=1) + "\n")

    told["site"] = sorted({*names, *told["site"]})
    tell()  # first: a folder that was not finished is still ours
    for name in names:
        put(out / "site" / name, (site / name).read_bytes())
    put(out / ARCHIVE, archive)
    put(out / "serve_room.py", (STICK / "serve_room.py").read_bytes())
    rows = []
    for system, python in product(SYSTEMS, PYTHONS):
        key = f"{system.name}, Python {python}"
        kept = told["packages"].get(key, {})
        found = told["packages"][key] = packages(system, python, kept, wheels)
        size = megabytes([wheels / name for name in found["files"]])
        again = " (was there)" if found is kept else ""
        print(f"{key}: {found['what']}, {len(found['files'])} wheels, {size}{again}", flush=True)
        if found["why"]:
            print(f"  because: {found['why']}")
        if found["files"]:
            rows.append(f"<tr><td>{system.name}</td><td>{python} {found['what']}</td></tr>")
        tell()
    if not rows:
        raise UserError(f"no packages for any system: {found['why']}")
    page = (STICK / "START.html").read_text("utf-8").replace("<!-- packages -->", "\n".join(rows))
    put(out / "START.html", page.encode())
    now = {*names}, {name for each in told["packages"].values() for name in each["files"]}
    for folder, old, new in zip((out / "site", wheels), before, now, strict=True):
        for path in [*folder.rglob("*")]:  # what an older site had, or older packages
            if path.relative_to(folder).as_posix() in old - new:
                path.unlink()
    told["site"] = names
    tell()
    for part in ("site", "wheels", ARCHIVE):
        inside = [path for path in (out / part).rglob("*") if path.is_file()] or [out / part]
        print(f"{part}: {megabytes(inside)}, files: {len(inside)}")
    print(f"copy {out} to the stick, and open START.html")
