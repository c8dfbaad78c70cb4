"""A compiled library that is kept between runs, and loaded only if it is what we have made.

Loading a library runs what is in it, and ends the process if a part of it is missing. So its file
name contains the SHA-256 of its bytes. If a file has been cut short, or is another library, it does
not match and is made again. The file, its folder and all folders above must be ours (or root's),
and nobody else may write them. So nobody else can have put the file there. The file is opened once:
what we check and what we load are the same bytes.
"""

import ctypes
import errno
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from command.checks import UserError

COMPILE_SECONDS = 120  # far more than a compiler needs, and an end to one that hangs
WATCHED = Path(__file__).with_name("watched.py")
DIGITS = 16  # of a checksum, in a file's name
# To open a file, but no link, and no pipe whose writer we would wait for. Windows lacks both.
AS_IT_IS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
AS_IT_IS |= getattr(os, "O_BINARY", 0)


def cache_folder() -> Path:
    """Where compiled files are kept; made if it is not there. Raises UserError if it is unsafe."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    if not home.is_absolute():
        raise UserError(f"XDG_CACHE_HOME is {str(home)!r}; it must be an absolute path")
    folder = home / "nano-sarathi"
    for place in (*reversed(folder.parents), folder):  # parents=True would give them other modes
        place.mkdir(exist_ok=True, mode=0o700)
    folder = folder.resolve()  # from here on, nobody can lead us elsewhere with a link
    for place in (folder, *folder.parents):
        if why := unsafe(place.stat(), entries=place != folder):
            raise UserError(f"{str(place)!r} {why}: nothing that is compiled is kept there")
    remove_left(folder)
    return folder


def remove_left(folder: Path) -> None:
    """Remove the workplaces of processes that were killed as they compiled, and of no others."""
    for place in folder.glob("tmp*"):
        with suppress(OSError):  # another process removes it, too
            if time.time() > place.lstat().st_mtime + 2 * COMPILE_SECONDS:
                shutil.rmtree(place)


def unsafe(about: os.stat_result, entries: bool = False) -> str | None:
    """Why somebody else can write a file or a folder. None: nobody can.

    entries: of a folder, it is enough that nobody can replace what is ours in it. /tmp is such a
    folder: it has the sticky bit. Who owns "/" can replace all. In a user namespace that is not 0.
    """
    if not hasattr(os, "geteuid"):  # Windows says it otherwise
        return None
    owners = {0, os.geteuid()} | ({os.stat("/").st_uid} if entries else set())
    if about.st_uid not in owners:
        return f"belongs to user {about.st_uid}, and we are user {os.geteuid()}"
    sticky = entries and about.st_mode & stat.S_ISVTX
    if about.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not sticky:
        return "may be written by others (chmod go-w mends that)"
    return None


def checksum(file: int) -> str:
    """file: the descriptor of an open file."""
    with open(file, "rb", closefd=False) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:DIGITS]


def load_kept(folder: Path, stem: str) -> ctypes.CDLL | None:
    """The library `stem` of a folder, if it is there whole. What is damaged is removed."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        if library := load(path, stem):
            return library
        path.unlink(missing_ok=True)
    return None


def load(path: Path, stem: str) -> ctypes.CDLL | None:
    """The library of a file. None: it is not ours, or its name does not have its checksum.

    Raises OSError if that cannot be found out.
    """
    try:
        file = os.open(path, AS_IT_IS)
    except OSError as error:
        # a link; a socket; another process has removed it
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOENT):
            return None
        raise
    about = os.fstat(file)
    good = stat.S_ISREG(about.st_mode) and not unsafe(about)
    if not good or path.stem != f"{stem}-{checksum(file)}":
        os.close(file)
        return None
    # Only Linux loads an open file. Elsewhere its path must do: nobody else can write its folder.
    # The file stays open: the loader knows libraries by name, and its number must not come again.
    name = f"/proc/self/fd/{file}"
    return ctypes.CDLL(name if os.path.exists(name) else str(path))


def make(
    folder: Path, stem: str, build: Callable[[Path], None], functions: Sequence[str]
) -> ctypes.CDLL:
    """Build a library, keep it, and load it. Raises UserError if a part or a function is missing.

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
        made.chmod(0o700)
        with open(made, "rb") as file:
            name = f"{stem}-{checksum(file.fileno())}.so"
            # on the disk before it has its name: else a power cut could leave a part of it
            os.fsync(file.fileno())
        made.replace(folder / name)  # two processes may make it at once: the last one's stays
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
    """The exit status of a compiler, and what it said. A UserError if it takes too long.

    It ends with us, even if we are killed, and so do the programs that it starts: see watched.py.
    """
    environment = os.environ | {"LC_ALL": "C"}  # messages in English, with the word "error"
    with tempfile.TemporaryFile() as said, subprocess.Popen(
        [sys.executable, "-IS", str(WATCHED), *command], stdin=subprocess.PIPE, stderr=said,
        stdout=subprocess.DEVNULL, env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise UserError(f"{command[0]} has not ended after {seconds:g} s") from None
        finally:
            end_group(process)
        said.seek(0)
        return status, said.read().decode(errors="replace")


def end_group(process: subprocess.Popen) -> None:
    """End a process that leads a group, and all that it has started."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
