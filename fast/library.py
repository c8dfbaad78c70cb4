"""A compiled library that is kept between runs: ~/.cache/nano-sarathi/NAME.so.

The name tells all that it is made of (`native.stem_of`), so a changed source or compiler makes
another file. The file gets its name only once it is whole and has been loaded.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from command.checks import UserError

COMPILE_SECONDS = 120  # far more than a compiler needs, and an end to one that hangs


def cache_folder() -> Path:
    """Where compiled files are kept; made if it is not there, for us alone."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = home / "nano-sarathi"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def load_kept(folder: Path, stem: str) -> ctypes.CDLL | None:
    path = folder / f"{stem}.so"
    return ctypes.CDLL(str(path)) if path.exists() and is_whole(path) else None


def make(
    folder: Path, stem: str, build: Callable[[Path], None], functions: Sequence[str]
) -> ctypes.CDLL:
    """Build a library, load it, and keep it. Raises UserError if a function is missing.

    build: makes the file that it is given.
    """
    with tempfile.TemporaryDirectory(dir=folder) as workplace:
        made = Path(workplace) / f"{stem}.so"
        build(made)
        if not is_whole(made):
            raise UserError("what was compiled is cut short")
        library = ctypes.CDLL(str(made))  # only what can be loaded is kept
        missing = [name for name in functions if not hasattr(library, name)]
        if missing:
            raise UserError(f"what was compiled has no function {missing[0]}")
        made.replace(folder / made.name)  # two processes may make it at once: the last one's stays
    return library


def is_whole(library: Path) -> bool:
    """Whether a library of Linux has its end, a table. To load half a library ends the process."""
    head = library.read_bytes()[:64]
    if head[:6] != b"\x7fELF\2\1":  # of another system; or none, and the loader says so
        return True
    start, size, count = (
        int.from_bytes(head[place : place + width], "little")
        for place, width in ((0x28, 8), (0x3A, 2), (0x3C, 2))
    )
    return len(head) == 64 and library.stat().st_size >= start + size * count


def run_compiler(command: Sequence[str], seconds: float = COMPILE_SECONDS) -> tuple[int, str]:
    """The exit status of a compiler, and what it said. A UserError if it takes too long."""
    environment = os.environ | {"LC_ALL": "C"}  # messages in English, with the word "error"
    try:
        done = subprocess.run(
            command, env=environment, timeout=seconds, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} has not ended after {seconds:g} s") from None
    return done.returncode, done.stderr.decode(errors="replace")
