"""Kills pipelines, pools of workers and compilers at random moments: nothing of them may live on.

A command is started as a user does. At a random moment it, or one of its children, gets SIGKILL,
SIGTERM, SIGHUP (its terminal is closed) or Ctrl-C. A few seconds later no process of it may be
left. If a child was killed, the command says so in one line.

And while files are written: Ctrl-C leaves each as it was or as it should be, and nothing else.
SIGKILL may leave one more, half of the new one, under another name.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from command.cli import run_main, write_file
from experiments.lib.common import write_table
from experiments.lib.look import save_figure
from loading import checkpoint
from pictures.perfetto import Tracks
from tests.conftest import tiny_model
from tests.hostile.commands import ROOT
from tests.hostile.processes import GENERATE, MARK, marked
from tests.hostile.sandbox import Case, slowness, why_unclear

PIPELINE = (
    "distributed.py",
    "--stages",
    "2",
    "--lengths",
    "64:40,30:40,20:40",
    "--repeats",
    "999",
)
POOLS = (
    ("experiments/serve_capacity.py", "--out", "out"),
    ("experiments/serve_pipelines.py", "--out", "out"),
    ("experiments/td_throughput.py", "--out", "out"),
)
PATIENCE = 6.0  # s in which all must be gone after SIGKILL
AT_ONCE = 2.0  # s in which other signals must end the command
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
KILLS = 24
START = 60.0  # s in which children must appear
USUAL_START = 3.0  # s: on a machine that takes longer, all may take longer
INTERRUPTS = 10  # of each writer


def trace(path: Path, version: int) -> None:
    tracks = Tracks()
    tracks.slice(tracks.lane(tracks.group("run", "engine", None), "one"), "x" * 2000, version, 9)
    tracks.save(path)


# What writes a file, given its path and 0 or 1: two versions.
WRITERS: dict[str, Callable[[Path, int], None]] = {
    "a page": lambda path, version: write_file(path, f"<p>{version}" * 100_000),
    "a notebook": lambda path, version: write_file(path, b'{"cells": %d}' % version),
    "a table": lambda path, version: write_table(path, ["a"], [[float(version)]] * 1000),
    "a picture": lambda path, version: save_figure(plt.figure(), path, 10 + version),
    "a trace": trace,
    "weights": lambda path, version: checkpoint.save(
        tiny_model("gpt2"), path.parent, (torch.float16, torch.bfloat16)[version]
    ),
}


def kill(command: tuple[str, ...], sign: signal.Signals, child: bool, delay: float) -> None:
    """Start, wait for children, wait for `delay` seconds, kill, and look who is left.

    If there is nothing to kill any more, that is reported: the case would show nothing.
    """
    name = f"{os.getpid()}"
    environment = os.environ | {MARK: name, "OMP_NUM_THREADS": "1"}
    with open("said", "wb") as said:
        started = subprocess.Popen(
            [sys.executable, str(ROOT / command[0]), *command[1:]], env=environment,
            stdout=subprocess.DEVNULL, stderr=said, process_group=0,
        )  # fmt: skip
    begin = time.monotonic()
    while not [pid for pid in marked(name) if pid != started.pid]:
        if started.poll() is not None or time.monotonic() > begin + slowness() * START:
            break
        time.sleep(0.02)
    slower = max(slowness(), (time.monotonic() - begin) / USUAL_START)
    time.sleep(delay)
    children = [pid for pid in marked(name) if pid != started.pid]
    nothing = started.poll() is not None or not children
    if nothing:
        print("misjudged: it had no children any more to kill:", last_line(), file=sys.stderr)
    elif sign == signal.SIGINT:
        os.killpg(started.pid, sign)  # as a terminal does
    else:
        os.kill(random.Random(delay).choice(children) if child else started.pid, sign)
    status = wait(started, slower * (PATIENCE if sign == signal.SIGKILL else AT_ONCE))
    deadline = time.monotonic() + slower * PATIENCE
    while (left := marked(name)) and time.monotonic() < deadline:
        started.poll()
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        print(f"orphans: {len(left)} processes live on", file=sys.stderr)
    if status is None:
        started.wait()
        print("hangs: it did not end at once", file=sys.stderr)
    text = Path("said").read_text(encoding="utf-8", errors="replace")
    if "Traceback" in text:
        print("tracebacks:", last_line(), file=sys.stderr)
    elif child and not nothing:
        unclear = why_unclear(text) if status in (1, 2) else "it should be 1 or 2"
        if unclear:
            print(f"unclear errors: exit status {status}: {unclear}", file=sys.stderr)


def last_line() -> str:
    lines = Path("said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no word"


def kill_compiling(sign: signal.Signals, delay: float) -> None:
    """Of a command whose compiler hangs, with a child."""
    program = Path("compiler").resolve()
    program.write_text("#!/bin/sh\nsleep 1000 &\nsleep 1000\n", encoding="utf-8")
    program.chmod(0o755)
    os.environ |= {"CXX": str(program), "XDG_CACHE_HOME": str(Path("cache").resolve())}
    kill(GENERATE, sign, False, delay)


def stop_writing(kind: str, sign: signal.Signals, delays: list[float]) -> None:
    """Write two versions of a file in turn, and stop that after each of the delays."""
    path, versions = Path("new", "model.safetensors"), []
    path.parent.mkdir()
    for version in (0, 1):
        WRITERS[kind](path, version)
        versions.append({each.name: each.read_bytes() for each in path.parent.iterdir()})
    if versions[0] == versions[1]:
        print("misjudged: both versions are the same", file=sys.stderr)
    for delay in delays:
        inner, outer = os.pipe()
        if not (writer := os.fork()):
            write_for_ever(kind, path, outer)
        os.close(outer)
        os.read(inner, 1)  # while it is forked, Python would swallow a signal
        os.close(inner)
        time.sleep(delay)
        status = stop(writer, sign)
        right = {130} if sign == signal.SIGINT else {-sign}
        if status not in right:
            line = f"exit status {status} after {sign.name}: {last_line()}"
            print(f"tracebacks: {line}", file=sys.stderr)
        found = {each.name: each.read_bytes() for each in path.parent.iterdir()}
        known = {name: found.pop(name, None) for name in versions[0]}
        if any(data not in [each[name] for each in versions] for name, data in known.items()):
            print(f"files lost: {kind} after {sign.name}", file=sys.stderr)
        if len(found) > (sign == signal.SIGKILL):
            print(f"leaks: {', '.join(found)} after {sign.name}", file=sys.stderr)
        for name in found:
            (path.parent / name).unlink()


def write_for_ever(kind: str, path: Path, begun: int) -> None:
    """In a process of its own, as a command would; it never returns."""

    def main() -> None:
        os.write(begun, b"x")
        for number in itertools.count():
            WRITERS[kind](path, number % 2)

    status = 1
    try:
        os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        run_main(main)
    except SystemExit as end:
        status = end.code
    except Exception:  # noqa: BLE001 (as Python would)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def stop(process: int, sign: signal.Signals) -> int:
    """Send a signal. matplotlib's C++ may swallow a Ctrl-C: then, another one."""
    while True:
        os.kill(process, sign)
        end = time.monotonic() + slowness() * AT_ONCE
        while time.monotonic() < end:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)


def wait(started: subprocess.Popen, seconds: float) -> int | None:
    try:
        return started.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def make_cases(seed: int, quick: bool) -> list[Case]:
    """Half of the kills hit a pipeline while its stages are being imported, where a race may be."""
    rng = random.Random(f"kills {seed}")
    cases = []
    for number in range(4 if quick else KILLS):
        command = rng.choice(POOLS) if number % 4 == 3 else PIPELINE
        child = rng.random() < 0.3 if command is PIPELINE else number % 8 == 3
        # Ctrl-C goes to all of them
        sign = rng.choice([sign for sign in SIGNALS if not (child and sign == signal.SIGINT)])
        delay = rng.choice((rng.uniform(0, 2), rng.uniform(0, 7)))
        again = (f"python {' '.join(command)}   ({sign.name} to {'a child' if child else 'it'}"
                 f" {delay:.2f} s after its children appear)")  # fmt: skip
        act = partial(kill, command, sign, child, delay)
        cases.append(Case(command[0], again, act, limit=90.0))
    for sign in SIGNALS:
        delay = rng.uniform(0, 1)
        again = f"python {' '.join(GENERATE)}   ({sign.name} {delay:.2f} s after its compiler)"
        cases.append(Case(GENERATE[0], again, partial(kill_compiling, sign, delay), limit=90.0))
    for kind in WRITERS:
        for sign in (signal.SIGINT, signal.SIGKILL):
            delays = [rng.uniform(0, 0.1) for _ in range(2 if quick else INTERRUPTS)]
            again = f"{kind} is written again and again   ({sign.name} after {max(delays):.3f} s)"
            act = partial(stop_writing, kind, sign, delays)
            cases.append(Case(kind, again, act, limit=90.0, weighs=len(delays)))
    return cases
