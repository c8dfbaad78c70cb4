"""Attacks on what starts: torchrun's variables, strangers on the network, Ctrl-C during imports, a
compiler that hangs, and no place for what it makes.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.hostile.kills import AT_ONCE, USUAL_START
from tests.hostile.places import full_disk, read_only_disk
from tests.hostile.processes import GENERATE, LIMIT, MARK, finish, marked, start
from tests.hostile.sandbox import Case, slowness
from tests.watch import STRANGER, listening

PIPELINE = ("distributed.py", "--stages", "2", "def f(", "--max-tokens", "3", "--max-length", "32")

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


LOOPBACK = re.compile("0100007F|0{24}01000000|0000000000000000FFFF00000100007F")


def stranger_at_the_door() -> None:
    """Where does a pipeline listen, and what does its store do with a stranger's bytes?

    gloo's ports are looked at, and get no bytes: PyTorch's gloo then turns round for ever, and the
    stages wait for ten minutes. Only a program of this machine can do that.
    """
    meeting = free_port()
    command = start((*PIPELINE, "--repeats", "40", "--port", str(meeting)))
    deadline, doors = time.monotonic() + LIMIT, []
    while command.poll() is None and time.monotonic() < deadline:
        for address, port in listening(marked(str(os.getpid()))):
            if (address, port) not in doors:
                doors.append((address, port))
                if port == meeting:
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
    slower = max(slowness(), (time.monotonic() - begin) / USUAL_START)
    command = start(arguments)
    time.sleep(slower * delay)
    if command.poll() is None:
        os.killpg(command.pid, signal.SIGINT)
    finish(command, limit=slower * AT_ONCE, allowed=(0, 1, 2, 130, -signal.SIGINT))


def on_a_disk(spoil: Callable[[Path], None]) -> None:
    """Home and cache are on a disk that is full, or read-only: that only costs speed."""
    spoil(disk := Path("disk").resolve())
    finish(start(GENERATE, {"HOME": str(disk), "XDG_CACHE_HOME": f"{disk}/cache"}), allowed=(0,))


def with_compiler_that_hangs() -> None:
    """The project waits two minutes for it."""
    program = Path("compiler").resolve()
    program.write_text("#!/bin/sh\n[ $1 = --version ] && exit\nsleep 1000 & wait\n")
    program.chmod(0o755)
    environment = {"CXX": str(program), "XDG_CACHE_HOME": str(Path("cache").resolve())}
    finish(start(GENERATE, environment), limit=150.0, allowed=(0,))


def make_cases(seed: int, quick: bool) -> list[Case]:
    rng = random.Random(f"faults {seed}")
    found: list[tuple[str, Callable[[], None]]] = []
    for variables in TORCHRUN:
        shown = " ".join(f"{name}={value}" for name, value in variables.items())
        found.append((f"torchrun's variables: {shown}", partial(with_torchrun, variables)))
    found.append(("a stranger at the rendezvous", stranger_at_the_door))
    found.append(("a stranger in place of stage 1", stranger_inside))
    found += [(spoil.__name__, partial(on_a_disk, spoil)) for spoil in (full_disk, read_only_disk)]
    found.append(("a compiler that hangs", with_compiler_that_hangs))
    capacity = ("experiments/serve_capacity.py", "--out", "results")
    for arguments in (GENERATE, GENERATE, ("experiments/fig9.py", "--out", "results"), capacity,
                      capacity, PIPELINE, PIPELINE):  # fmt: skip
        delay = rng.uniform(0.2, 4.0)
        act = partial(interrupted, arguments, delay)
        found.append((f"Ctrl-C {delay:.2f} s after the start of {arguments[0]}", act))
    if quick:
        # no two minutes of waiting; of all others, some
        found = rng.sample([each for each in found if "hangs" not in each[0]], 6)
    return [
        Case(what.partition(":")[0], what, act, limit=200.0, waits="hangs" in what)
        for what, act in found
    ]
