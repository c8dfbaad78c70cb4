"""Processes seen from outside (Linux): their children, whether they live, where they listen."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PATIENCE = 600.0  # s until a test gives up: far more than anything takes, also on a busy machine


def children_of(parent: int) -> list[int]:
    """Process ids, of all threads; none where the process has ended."""
    found, gone = [], (FileNotFoundError, ProcessLookupError)
    with suppress(*gone):  # while it is looked at
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(*gone):  # the thread has ended
                found += map(int, file.read_text(encoding="utf-8").split())
    return found


def descendants_of(parent: int) -> list[int]:
    """Its children, and theirs."""
    children = children_of(parent)
    return children + [pid for child in children for pid in descendants_of(child)]


def threads_of(pid: int) -> list[str]:
    """Their names."""
    return [
        name.read_text(encoding="utf-8").strip()
        for name in Path(f"/proc/{pid}/task").glob("*/comm")
    ]


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


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(address, port) at which processes wait for TCP connections; addresses as Linux has them."""
    owned, found = set(), set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it has closed this one
                    owned.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in owned:
                address, _, port = cells[1].partition(":")
                found.add((address, int(port, 16)))
    return found
