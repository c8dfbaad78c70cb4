"""Processes seen from outside (Linux): their children, and whether they live."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE = 600.0  # s until a test gives up: far more than anything takes, also on a busy machine


def children_of(parent: int) -> list[int]:
    """Process ids, of all threads; none where the process has ended."""
    found = []
    gone = (FileNotFoundError, ProcessLookupError)
    with suppress(*gone):  # while it is looked at
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(*gone):  # the thread has ended
                found += map(int, file.read_text(encoding="utf-8").split())
    return found


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended may wait for its parent to ask."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def wait_for(what: Callable[[], object]) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)
