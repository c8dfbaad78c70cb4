"""Commands as a user starts them, in real processes, and how they must end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.hostile.commands import ROOT
from tests.hostile.sandbox import slowness, why_unclear

MARK = "NANO_SARATHI_CASE"  # an environment variable that all processes of a case inherit
LIMIT = 60.0  # s of a command
# A short run, without a network and with little to compute.
GENERATE = ("generate.py", "def f(", "--max-tokens", "2", "--max-length", "32")


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
        status = command.wait(slowness() * limit)
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
