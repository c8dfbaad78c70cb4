"""Runs one submission: cases in, answers out, a line of JSON each. Started by `grade`.

The checker, the truth and the results stay in the other process. What this one says is believed
only as an answer to a case. Nothing is unpickled on either side.

These are two processes. The first (`watch`) passes lines on between the grader and the second one,
which runs the student's code. It counts the seconds of the processor, and ends all that the code
has started when that has had its time, or when the grader is gone, even if killed.

A line for it: the seconds that an answer may take, a space, a case in JSON. A line from it: those
that it took, a space, the answer. If more than one line comes for a case, the worker ends.
"""

import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import BinaryIO

from course.sandbox import adopt_orphans, fence, isolate, kill_all

# What a student's file may import. Later, the project's files cannot be read; where root grades,
# perhaps Python's neither.
STANDARD = (
    "__future__", "cmath", "copy", "dataclasses", "enum", "heapq", "itertools", "logging", "pprint",
    "queue", "random", "statistics", "string", "typing",
)  # fmt: skip
OPEN = ("batch", "configs", "costmodel", "loop", "scheduler", "more.serving.search", "simulate")
WITH_TORCH = ("torch", "kvcache", "attention")
LONGEST_ANSWER = 4 << 20  # bytes
GLANCE = 0.1  # s between two looks at the processor's clock


def main() -> None:
    held = isolate()
    cases = os.pipe()
    answers = os.pipe()
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until we know whom to kill
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.setsid()  # in a group of its own, it cannot signal ours
        os.dup2(cases[0], 0)
        os.dup2(answers[1], 1)
        for each in (*cases, *answers):
            os.close(each)
        answer(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), held)
        return

    def leave(*_: object) -> None:  # an exception could pass by what kills them
        kill_all([pid])
        os._exit(1)

    try:
        signal.signal(signal.SIGTERM, leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.close(cases[0])
        os.close(answers[1])
        os.set_blocking(cases[1], False)
        watch(pid, cases[1], answers[0])
    except BrokenPipeError:  # the grader is gone
        pass
    finally:
        kill_all([pid])


def watch(pid: int, to: int, of: int) -> None:
    """Pass lines on until the grader is gone, or the process that answers is of no more use.

    to, of: descriptors of pipes to that process and from it.
    """
    grader = os.fdopen(0, "rb", closefd=False)
    said = os.fdopen(1, "wb", closefd=False)
    processor_seconds = processor_clock(pid)
    for line in grader:
        if select.select([of], [], [], 0)[0]:  # it has ended, or says what nobody asked for
            return
        began = processor_seconds()
        limit = float(line.partition(b" ")[0])
        got = bytearray()
        while processor_seconds() - began <= limit:
            ready, room, _ = select.select([0, of], [to] if line else [], [], GLANCE)
            if 0 in ready:  # it says nothing before it has an answer: this is its end
                return
            try:
                line = line[os.write(to, line) :] if room else line
            except BrokenPipeError:
                line = b""
            if of in ready:
                part = os.read(of, 1 << 16)
                got += part
                if not part or b"\n" in part or len(got) > LONGEST_ANSWER:
                    break
        spent = processor_seconds() - began
        one_line = got.find(b"\n") == len(got) - 1 and 0 < len(got) <= LONGEST_ANSWER
        said.write(b"%r " % spent + (got if one_line else b""))
        said.flush()
        if not one_line:
            return


def processor_clock(pid: int) -> Callable[[], float]:
    """A clock of the seconds of the processor that a process has had.

    Where that cannot be read, it is the clock on the wall.
    """
    if sys.platform == "linux":
        read = partial(time.clock_gettime, ~pid << 3 | 2)  # as clock_getcpuclockid(3) has it
        with suppress(OSError):  # WSL 1 and gVisor may refuse
            read()
            return read
    return time.monotonic


def answer(cases: BinaryIO, answers: BinaryIO, held: list[str]) -> None:
    """Answer all cases, in a fence."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(2):  # stdin and stdout: a student's print must not be an answer
        os.dup2(null, number)
    setup = json.loads(cases.readline().partition(b" ")[2])
    for name in ("numpy", *STANDARD, *OPEN, *(WITH_TORCH if setup["torch"] else ())):
        import_module(name)
    from course.drive import answer_of
    from course.exercises import load
    from course.local import failed

    os.chdir(tempfile.gettempdir())
    held += fence(setup["memory"], setup["seconds"])
    os.dup2(null, 2)  # until now, the grader could read why it did not start

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    say({"held": held})
    modules: dict = {}
    for line in cases:
        asked = json.loads(line.partition(b" ")[2])
        name = asked["file"]
        try:
            if name not in modules:
                modules[name] = load(setup["files"][name], f"{name}.py")
            say({"answer": answer_of(name, modules[name], asked["case"])})
        except BaseException as error:  # noqa: BLE001  (SystemExit, MemoryError: all is theirs)
            met = failed(error, f"{name}.py")
            say({"error": str(met), "says": met.says, "loaded": name in modules})


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
