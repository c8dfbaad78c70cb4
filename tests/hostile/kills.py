"""Kills pipelines and pools of workers at random moments: nothing of them may live on.

A command is started as a user does. At a random moment it, or one of its children, gets SIGKILL,
SIGTERM or Ctrl-C. A few seconds later no process of it may be left.
"""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.hostile.commands import ROOT
from tests.hostile.processes import MARK, marked
from tests.hostile.sandbox import Case, slowness

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
AT_ONCE = 2.0  # s in which Ctrl-C and SIGTERM must end everything
KILLS = 24
START = 60.0  # s in which children must appear
USUAL_START = 3.0  # s: on a machine that takes longer, all may take longer


def kill(command: tuple[str, ...], sign: signal.Signals, child: bool, delay: float) -> None:
    """Start, wait for children, wait for `delay` seconds, kill, and look who is left."""
    name = f"{os.getpid()}"
    environment = os.environ | {MARK: name, "OMP_NUM_THREADS": "1"}
    with open("said", "wb") as said:
        started = subprocess.Popen(
            [sys.executable, str(ROOT / command[0]), *command[1:]], env=environment,
            stdout=said, stderr=said, process_group=0,
        )  # fmt: skip
    begin = time.monotonic()
    while not (children := [pid for pid in marked(name) if pid != started.pid]):
        if started.poll() is not None or time.monotonic() > begin + slowness() * START:
            break
        time.sleep(0.02)
    slower = max(slowness(), (time.monotonic() - begin) / USUAL_START)
    time.sleep(delay)
    children = [pid for pid in marked(name) if pid != started.pid]
    victim = random.Random(delay).choice(children) if child and children else started.pid
    if sign == signal.SIGINT:
        os.killpg(started.pid, sign)  # as a terminal does
    elif victim in marked(name):
        os.kill(victim, sign)
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
        last = text.strip().splitlines()[-1]
        print(f"tracebacks: {last}", file=sys.stderr)


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
        sign = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        child = rng.random() < 0.3 and sign != signal.SIGINT and command is PIPELINE
        delay = rng.choice((rng.uniform(0, 2), rng.uniform(0, 7)))
        again = (f"python {' '.join(command)}   ({sign.name} to {'a child' if child else 'it'}"
                 f" {delay:.2f} s after its children appear)")  # fmt: skip
        act = partial(kill, command, sign, child, delay)
        cases.append(Case(command[0], again, act, limit=90.0))
    return cases
