"""Attacks through the compiler, the compiled library that is kept, and the place that keeps it.

Right is that a command works without the library, or makes it anew. With --attention native, one
line says why it cannot. Nothing that a stranger has put there may run.
"""

import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fast.library import DIGITS
from tests.hostile.places import mount_private
from tests.hostile.processes import GENERATE, NATIVE, finish, start, with_environment
from tests.hostile.sandbox import Case

EVIL = 'extern "C" __attribute__((constructor)) void run() { fclose(fopen("INTRUSION", "w")); }'
CACHE = Path("cache") / "nano-sarathi"

COMPILERS = {
    "fails": "exit 1",
    "makes nothing": "exit 0",
    "makes an empty file": ': > "$target"',
    "makes text": 'echo text > "$target"',
    "makes another library": 'echo "int other;" | g++ -shared -fPIC -x c++ - -o "$target"',
    "hangs": "sleep 1000",
    "hangs with a child": "sleep 1000 & wait",
    "leaves a child with its pipes": "sleep 1000 & exit 1",
    "says a megabyte": "head -c 1000000 /dev/zero | tr '\\0' 'error ' >&2; exit 1",
    "says bytes": "printf 'error: \\377\\376\\n' >&2; exit 1",
    "is killed": "kill -9 $$",
    "makes half a library": 'g++ "$@" && truncate -s 5000 "$target"',
}
ENDLESS = re.compile("hangs|leaves a child")  # the project waits two minutes for these


def with_compiler(script: str, arguments: tuple[str, ...]) -> None:
    """A compiler that is broken: with `auto` PyTorch's operators do its work."""
    program = Path("compiler").resolve()
    find_target = 'while [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done; target="$2"\n'
    keep = 'if [ "$1" = --version ]; then exit 0; fi\n'
    body = script if "$@" in script else find_target + script
    if "$@" in script:
        body = 'for word in "$@"; do target="$word"; done\n' + script
    program.write_text(f"#!/bin/sh\n{keep}{body}\n")
    program.chmod(0o755)
    environment = {"CXX": str(program), "XDG_CACHE_HOME": str(Path("cache").resolve())}
    status = finish(start(arguments, environment), limit=150.0)
    if status not in (0, -1) and arguments is GENERATE:
        print("misjudged: a broken compiler only costs speed", file=sys.stderr)
    left = [path for path in Path("cache").rglob("*") if path.is_file()]
    if left:
        print(f"leaks: {len(left)} files stay in the cache, as {left[0].name}", file=sys.stderr)


# ------------------------------------------------------------------------------- compiled libraries


def good_cache() -> list[Path]:
    """A copy of this home's compiled library, and what stands beside it."""
    shutil.copytree(Path.home() / ".cache" / "nano-sarathi", CACHE, copy_function=shutil.copy2)
    return [path for path in CACHE.iterdir() if path.is_file()]


def evil_library(target: Path) -> None:
    """A library that shows when it is loaded. Its name has a wrong checksum."""
    marker = str(Path("INTRUSION").resolve())
    Path("evil.cpp").write_text("#include <cstdio>\n" + EVIL.replace("INTRUSION", marker))
    subprocess.run(["g++", "-shared", "-fPIC", "evil.cpp", "-o", str(target)], check=True)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros_inside(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(4096)
    path.write_bytes(bytes(content))


def another_library(path: Path) -> None:
    evil_library(Path("harmless.so"))
    Path("other.cpp").write_text("int other() { return 1; }\n")
    subprocess.run(["g++", "-shared", "-fPIC", "other.cpp", "-o", str(path)], check=True)


def planted(path: Path) -> None:
    evil_library(path)


def evil_twin(path: Path) -> Path:
    """An evil library in place of the kept one. Its name has its checksum: that cannot tell it."""
    evil_library(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
    path.chmod(0o700)
    return path.rename(path.with_stem(f"{path.stem.rpartition('-')[0]}-{digest}"))


def others_may_write(path: Path) -> None:
    evil_twin(path).chmod(0o777)


def others_may_write_the_folder(path: Path) -> None:
    evil_twin(path).parent.chmod(0o777)


def of_another_user(path: Path) -> None:
    """Only root can give a file away. A user of less rights makes one that others may write."""
    if os.getuid() == 0:
        os.chown(evil_twin(path), 65534, 65534)
    else:
        others_may_write(path)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/at/all")


LIBRARIES = (cut, empty, zeros_inside, another_library, planted, others_may_write,
             others_may_write_the_folder, of_another_user, fifo, folder,
             link_to_nothing)  # fmt: skip


def with_library(spoil: Callable[[Path], None]) -> None:
    """The kept library is spoiled: it must be made anew, or not be used, and never run."""
    for path in good_cache():
        if path.suffix == ".so":
            spoil(path)
    status = finish(start(GENERATE, {"XDG_CACHE_HOME": str(Path("cache").resolve())}))
    if status not in (0, -1):
        print("misjudged: a broken library only costs speed", file=sys.stderr)


def in_a_cache_of_everybody() -> None:
    """A stranger has put a library into a cache that all may write: its name is no secret."""
    for path in good_cache():
        evil_twin(path)
    Path("cache").chmod(0o777)
    finish(start(GENERATE, {"XDG_CACHE_HOME": str(Path("cache").resolve())}))


def with_disk(options: str, read_only: bool) -> None:
    """Home and cache are on a disk that is full, or read-only."""
    Path("disk").mkdir()
    if not mount_private(Path("disk"), options, read_only):
        Path("disk").chmod(0o555)
    place = str(Path("disk").resolve())
    status = finish(start(GENERATE, {"HOME": place, "XDG_CACHE_HOME": f"{place}/cache"}))
    if status not in (0, -1):
        print("misjudged: no place for a cache only costs speed", file=sys.stderr)


def make_cases(seed: int, quick: bool) -> list[Case]:
    rng = random.Random(f"compilers {seed}")
    found: list[tuple[str, Callable[[], None]]] = []
    for what, script in COMPILERS.items():
        arguments = rng.choice((GENERATE, NATIVE))
        found.append((f"a compiler that {what}", partial(with_compiler, script, arguments)))
    for name in ("nothing", "", "/", "/dev/null", "g++ -O2", "./compiler\n"):
        found.append((f"CXX={name!r}", partial(with_environment, NATIVE, CXX=name)))
    found += [(f"library: {spoil.__name__}", partial(with_library, spoil)) for spoil in LIBRARIES]
    found.append(("library: in a cache of everybody", in_a_cache_of_everybody))
    for name in ("relative", "/dev/null", "/nonexistent", "a\nb", "~nouser", "/proc"):
        act = partial(with_environment, GENERATE, XDG_CACHE_HOME=name)
        found.append((f"XDG_CACHE_HOME={name!r}", act))
    found.append(("HOME=''", partial(with_environment, GENERATE, HOME="")))
    found.append(("HOME=/nonexistent", partial(with_environment, GENERATE, HOME="/nonexistent")))
    found.append(("a full disk for home and cache", partial(with_disk, "size=64k", False)))
    found.append(("a read-only disk for home and cache", partial(with_disk, "", True)))
    if quick:
        found = rng.sample(found, 6)
    return [
        Case(what.partition(":")[0], what, act, limit=200.0, waits=bool(ENDLESS.search(what)))
        for what, act in found
    ]
