"""Kills pipelines and pools of workers at random moments: nothing of them may live on.

A command is started as a user does. At a random moment it, or one of its children, gets SIGKILL,
SIGTERM, SIGHUP (its terminal is closed) or Ctrl-C. A few seconds later no process of it may be
left. If a child was killed, the command says so in one line.
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
from tests.hostile.sandbox import Case, slowness, why_unclear

MARK = "NANO_SARATHI_CASE"  # an environment variable that all processes of a case inherit

PIPELINE = (
    "distributed.py", "--stages", "2", "--lengths", "64:40,30:40,20:40", "--repeats", "999",
)  # fmt: skip
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


def marked(name: str) -> list[int]:
    """Living processes whose environment has the mark."""
    found, wanted = [], f"{MARK}={name}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if wanted in environment and state not in "ZX":
                found.append(int(entry))
    return found


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
    return cases
