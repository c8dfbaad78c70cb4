"""Attacks through the machine: compilers, compiled libraries, torchrun's variables, strangers.

These cases start real processes, because what is attacked happens while they start.
"""

import ctypes.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.hostile.commands import ROOT
from tests.hostile.kills import AT_ONCE, MARK, USUAL_START, marked
from tests.hostile.places import mount_private
from tests.hostile.sandbox import Case, why_unclear

# Without text or a wish for the C++ file, so that a start is all that it takes.
GENERATE = ("generate.py", "def f(", "--max-tokens", "2", "--max-length", "32")
NATIVE = (*GENERATE, "--attention", "native", "--dtype", "float32")
PIPELINE = ("distributed.py", "--stages", "2", "def f(", "--max-tokens", "3", "--max-length", "32")
LIMIT = 60.0  # s of a command
EVIL = 'extern "C" __attribute__((constructor)) void run() { fclose(fopen("INTRUSION", "w")); }'
CACHE = Path("cache") / "nano-sarathi"


def start(
    arguments: tuple[str, ...], environment: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """A command as a user starts it; "said" gets what it prints on stderr."""
    own = os.environ | {MARK: str(os.getpid())} | dict(environment or {})
    with open("said", "wb") as said, open("out", "wb") as out:
        return subprocess.Popen(
            [sys.executable, str(ROOT / arguments[0]), *arguments[1:]], env=own, stdout=out,
            stderr=said, process_group=0,
        )  # fmt: skip


def finish(command: subprocess.Popen, limit: float = LIMIT, allowed: tuple = (0, 1, 2)) -> int:
    """Wait for its end, and say what is wrong with that. Returns the exit status."""
    try:
        status = command.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
        print(f"hangs: still there after {limit:.0f} s", file=sys.stderr)
    if status is not None:
        time.sleep(0.5)
        if left := marked(str(os.getpid())):
            left = [pid for pid in left if pid != os.getpid()]
        if left:
            print(f"orphans: {len(left)} processes live on", file=sys.stderr)
    for pid in marked(str(os.getpid())):
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    errors = Path("said").read_text(encoding="utf-8", errors="replace")
    last = (errors.strip().splitlines() or ["no word"])[-1][:300]
    if "Traceback" in errors or (status is not None and status not in allowed):
        print(f"tracebacks: exit status {status}: {last}", file=sys.stderr)
    elif status in (1, 2) and (unclear := why_unclear(errors)):
        print(f"unclear errors: exit status {status}: {unclear}: {last}", file=sys.stderr)
    if Path("INTRUSION").exists():
        print("intrusions: a stranger's code ran", file=sys.stderr)
    return -1 if status is None else status


def with_environment(arguments: tuple[str, ...], **environment: str) -> None:
    finish(start(arguments, environment))


# ---------------------------------------------------------------------------------------- compilers

COMPILERS = {
    "fails": "exit 1",
    "makes nothing": "exit 0",
    "makes an empty file": ': > "$target"',
    "makes text": 'echo text > "$target"',
    "makes another library": f'cp "{ctypes.util.find_library("z") or "nothing"}" "$target"',
    "hangs": "sleep 1000",
    "hangs with a child": "sleep 1000 & wait",
    "leaves a child with its pipes": "sleep 1000 & exit 1",
    "says a megabyte": "head -c 1000000 /dev/zero | tr '\\0' 'error ' >&2; exit 1",
    "says bytes": "printf 'error: \\377\\376\\n' >&2; exit 1",
    "is killed": "kill -9 $$",
    "makes half a library": 'g++ "$@" && truncate -s 5000 "$target"',
}


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
    """A library that shows when it is loaded."""
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


def others_may_write(path: Path) -> None:
    evil_library(path)
    path.chmod(0o777)
    path.parent.chmod(0o777)


def of_another_user(path: Path) -> None:
    evil_library(path)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/at/all")


LIBRARIES = (cut, empty, zeros_inside, another_library, planted, others_may_write, of_another_user,
             fifo, folder, link_to_nothing)  # fmt: skip


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
        others_may_write(path)
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


# ------------------------------------------------------------------ torchrun, strangers, Ctrl-C

TORCHRUN: tuple[dict[str, str], ...] = (
    {"RANK": "x"},
    {"RANK": "0"},
    {"RANK": "-1", "WORLD_SIZE": "2"},
    {"RANK": "5", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "0"},
    {"RANK": "0", "WORLD_SIZE": "x"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere.invalid"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "x"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"},
    {"RANK": "", "WORLD_SIZE": ""},
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def with_torchrun(variables: Mapping[str, str]) -> None:
    usual = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    finish(start(PIPELINE, usual | dict(variables)))


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """(address in hex, port) of each TCP socket that these processes listen on."""
    owned = set()
    for pid in pids:
        try:
            owned |= {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in owned:
                address, _, port = cells[1].partition(":")
                found.append((address, int(port, 16)))
    return found


LOOPBACK = re.compile("0100007F|0{24}01000000|0000000000000000FFFF00000100007F")


def stranger_at_the_door() -> None:
    """Where does a pipeline listen, and what does it do with a stranger's bytes?"""
    command = start((*PIPELINE, "--repeats", "40"))
    deadline, doors = time.monotonic() + LIMIT, []
    while command.poll() is None and time.monotonic() < deadline:
        for address, port in listening(marked(str(os.getpid()))):
            if (address, port) not in doors:
                doors.append((address, port))
                knock(port)
        time.sleep(0.02)
    finish(command)
    if not doors:
        print("misjudged: no listening socket was seen", file=sys.stderr)
    for address, port in doors:
        if not LOOPBACK.fullmatch(address):
            print(f"intrusions: it listens on {address}:{port}, for everybody", file=sys.stderr)


def knock(port: int) -> None:
    rng = random.Random(port)
    for message in (b"", b"GET / HTTP/1.0\r\n\r\n", rng.randbytes(64), b"\0" * 64):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=0.2) as wire:
                wire.sendall(message)
        except OSError:
            continue


STRANGER = """
import os, pickle, sys, datetime, torch, torch.distributed as dist
class Evil:
    def __reduce__(self):
        return open, (sys.argv[1], "w")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
control = dist.new_group(backend="gloo")
data = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
for _ in range(6):
    dist.isend(torch.tensor([len(data), 0]), 0, group=control).wait()
    dist.isend(data, 0, group=control).wait()
    store = dist.distributed_c10d._get_default_store()
    for key in ("0", "1", "plan", "0/1"):
        store.set(key, pickle.dumps(Evil()))
"""


def stranger_inside() -> None:
    """A stranger joins in place of stage 1, and sends a pickle that would make a file."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = start(PIPELINE, group | {"RANK": "0", "LOCAL_RANK": "0"})
    own = os.environ | group | {"RANK": "1", MARK: "stranger"}
    marker = str(Path("INTRUSION").resolve())
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, marker], env=own,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        stranger.wait(40)
    except subprocess.TimeoutExpired:
        stranger.kill()
    stranger.wait()
    finish(command)


def interrupted(arguments: tuple[str, ...], delay: float) -> None:
    """Ctrl-C while a command starts: no traceback, and the end within two seconds."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    slower = max(1.0, (time.monotonic() - begin) / USUAL_START)
    command = start(arguments)
    time.sleep(slower * delay)
    if command.poll() is None:
        os.killpg(command.pid, signal.SIGINT)
    finish(command, limit=slower * AT_ONCE, allowed=(0, 1, 2, 130, -signal.SIGINT))


def make_cases(seed: int, quick: bool) -> list[Case]:
    rng = random.Random(f"faults {seed}")
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
    for variables in TORCHRUN:
        shown = " ".join(f"{name}={value}" for name, value in variables.items())
        found.append((f"torchrun's variables: {shown}", partial(with_torchrun, variables)))
    found.append(("a stranger at the rendezvous", stranger_at_the_door))
    found.append(("a stranger in place of stage 1", stranger_inside))
    capacity = ("experiments/serve_capacity.py", "--out", "results")
    for arguments in (GENERATE, GENERATE, ("experiments/fig9.py", "--out", "results"), capacity,
                      capacity, PIPELINE, PIPELINE):  # fmt: skip
        delay = rng.uniform(0.2, 4.0)
        act = partial(interrupted, arguments, delay)
        found.append((f"Ctrl-C {delay:.2f} s after the start of {arguments[0]}", act))
    if quick:
        found = rng.sample(found, 6)
    return [Case(what.partition(":")[0], what, act, limit=200.0) for what, act in found]
