"""Processes seen from outside (Linux): their children, whether they live, where they listen. And
two strangers who join a pipeline.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PATIENCE = 600.0  # s until a test gives up: far more than anything takes, also on a busy machine

# He takes a stage's place, and sends the other pickles that would make the file that he is given.
STRANGER = """
import datetime, pickle, sys
import torch
import torch.distributed as dist

class Bomb:
    def __reduce__(self):
        return open, (sys.argv[1], "w")

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
control = dist.new_group(backend="gloo")
data = torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8)
for _ in range(6):
    dist.isend(torch.tensor([len(data), 0]), 1 - dist.get_rank(), group=control).wait()
    dist.isend(data, 1 - dist.get_rank(), group=control).wait()
    store = dist.distributed_c10d._get_default_store()
    for key in ("0", "1", "plan", "0/1"):
        store.set(key, pickle.dumps(Bomb()))
"""

# He joins the store of a launcher's stages, and writes such pickles until it is gone. His
# arguments: the file that they would make, the port, and the keys.
STRANGER_IN_STORE = """
import pickle, socket, sys, time
import torch.distributed as dist

class Bomb:
    def __reduce__(self):
        return open, (sys.argv[1], "w")

end = time.monotonic() + 100
while time.monotonic() < end:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[2]))).close()
        break
    except OSError:
        time.sleep(0.01)
written = False
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False, wait_for_workers=False)
try:
    while time.monotonic() < end:
        for key in sys.argv[3:]:
            store.set(key, pickle.dumps(Bomb()))
        written = True
        time.sleep(0.005)
except dist.DistError:
    print("written" if written else "nothing")
"""


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
