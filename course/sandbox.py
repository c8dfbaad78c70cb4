"""What a worker gives up before it loads a student's code. Linux does most; others do less.

`fence()` says what is protected. The rest is said in the first line of a report (`grade`).
"""

import ctypes
import os
import resource
import signal
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

PROTECTIONS = ("memory", "processes", "files", "network", "signals")
# of unshare(2)
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000
NEW_IPC = 0x08000000
# Landlock's calls, on all architectures
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
# of prctl(2)
PARENT_DEATH_SIGNAL = 1
CHILD_SUBREAPER = 36
NO_NEW_PRIVILEGES = 38
READ = 0b1100  # Landlock: read a file, list a folder
NOBODY = 65534


def isolate() -> list[str]:
    """Give this process a network with nothing in it. The process that it starts next sees no
    other process: it can signal none, and all that it starts ends with it. Returns names of
    PROTECTIONS.

    Call it before any thread starts, so before torch is imported.
    """
    if sys.platform != "linux":
        return []
    user = 0 if os.geteuid() == 0 else NEW_USER
    done = ctypes.CDLL(None).unshare(user | NEW_PIDS | NEW_NETWORK | NEW_IPC) == 0
    return ["network", "signals"] if done else []


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def adopt_orphans() -> None:
    """Whatever the processes that we start leave behind becomes our child."""
    if sys.platform == "linux":
        prctl(CHILD_SUBREAPER, 1)


def kill_all(children: list[int]) -> None:
    """Kill our children, and all that they have started."""
    while children:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        try:  # what they have left to us
            children = [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
        except OSError:  # no Linux
            children = []


def fence(memory: int, seconds: int) -> list[str]:
    """Give up all that an answer does not need. Returns names of PROTECTIONS.

    memory: bytes that the code may take on top. seconds: of the processor, from now on.
    """
    ruleset, abi = landlock() if sys.platform == "linux" else (-1, 0)
    held = limit(memory, seconds)
    if abi and restrict(ruleset):
        held.append("files")
        if abi >= 6:  # Linux 6.12: in a domain of its own, a process can signal no other
            held.append("signals")
    if sys.platform == "linux":
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)  # a process that changes its user loses it
    return held


def limit(memory: int, seconds: int) -> list[str]:
    held = []
    seconds += int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    if sys.platform == "linux":  # macOS takes the call, and does not keep to it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        held.append("memory")
    if os.geteuid() == 0:  # root may start processes whatever the limit
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return [*held, "processes"]


def system(number: int, *arguments: object) -> int:
    return ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)


def landlock() -> tuple[int, int]:
    """Rules that allow to read Python's own files; Landlock's version, or 0: see landlock.h."""
    none = ctypes.c_uint32(0)
    abi = system(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        return -1, 0
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)  # bits for what can be done to files
    fields = [(1 << rights) - 1]  # files
    if abi >= 4:
        fields.append(0b11)  # TCP
    if abi >= 6:
        fields.append(0b11)  # abstract sockets, signals
    attributes = (ctypes.c_uint64 * len(fields))(*fields)
    ruleset = system(CREATE_RULESET, attributes, ctypes.c_size_t(ctypes.sizeof(attributes)), none)
    for path in readable():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = READ if os.path.isdir(path) else READ & 0b0100
        rule = allowed.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        system(ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), none)
        os.close(place)
    return ruleset, abi if ruleset >= 0 else 0


def restrict(ruleset: int) -> bool:
    prctl(NO_NEW_PRIVILEGES, 1)
    done = system(RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) == 0
    os.close(ruleset)
    return done


def readable() -> list[str]:
    """Python's library, packages, and the system's: a module may be imported late."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_paths()[name] for name in names}
    paths |= {"/usr/lib", "/lib", "/lib64", "/dev/null", "/dev/urandom", "/etc/ld.so.cache"}
    return [path for path in sorted(paths) if os.path.exists(path)]
