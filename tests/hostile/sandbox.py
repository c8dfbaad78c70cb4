"""Runs each case in a forked process of its own, under limits, and judges how it ended.

Python with torch takes seconds to start, and a fork of this process takes milliseconds. So this
process imports everything once, and must never have a second thread.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.warm import outcome

LIMIT = 40.0  # s of a case
MEMORY = 4 << 30  # bytes that a case may take beyond what this process has
FILE_SIZE = 1 << 30  # bytes of a file that a case may write
LONGEST_LINE = 1000  # characters of an error
SWALLOWED = 5.0  # s after which there is another Ctrl-C: matplotlib's C++ may swallow one
NO_READER, BY_HAND = 141, 130  # exit statuses of cli.run_main
# What a run may find. Each must be 0 in the end.
KINDS = (
    "tracebacks", "unclear errors", "hangs", "orphans", "wrong tokens", "files lost",
    "misjudged",
)  # fmt: skip
# A user's own files, in the folder of every command: nothing may change them without --force.
OWN_FILES = {
    "mine.txt": b"my own notes\n",
    "mine.json": b'{"my": "own"}\n',
    "mine.csv": b"my,own\n1,2\n",
    "mine.png": b"\x89PNG my own\n",
    "mine.html": b"<p>my own</p>\n",
}


@dataclass(frozen=True)
class Case:
    """One attack. It may also print what it found itself, as "wrong tokens: ..." on stderr.

    what: what is attacked. again: a line that shows it again, as far as one line can. act: runs in
    the forked process, in an empty folder of its own. enough: seconds of work after which an
    interrupt (Ctrl-C) must end it with status 130; None: it must end by itself within `limit`.
    own_files: OWN_FILES are in its folder. silent: it has no stderr. weighs: how many
    inputs it tries.
    """

    what: str
    again: str
    act: Callable[[], None]
    enough: float | None = None
    limit: float = LIMIT
    own_files: bool = False
    silent: bool = False
    weighs: int = 1


@dataclass(frozen=True)
class Failure:
    """What a case has found: one of KINDS, and the last words of the process."""

    kind: str
    part: str
    number: int
    case: Case
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.part} {self.number}: {self.case.again}\n    {self.detail}"


@dataclass
class Tally:
    """What all parts together have tried and found."""

    inputs: Counter = field(default_factory=Counter)  # by part
    failures: list[Failure] = field(default_factory=list)
    slowness: float = 1.0  # the largest

    def count(self, kind: str) -> int:
        return sum(failure.kind == kind for failure in self.failures)


@dataclass
class Running:
    """A case whose process is alive."""

    number: int
    case: Case
    folder: Path
    started: float
    interrupted: float | None = None  # when
    signals: int = 0  # Ctrl-C so far
    imported: bool = True  # before that; else it may end by the signal itself (cli.die_quietly)


def run_cases(part: str, cases: Sequence[Case], tally: Tally, jobs: int, only: int | None) -> None:
    """Run all cases of a part, `jobs` at a time, or only one, and print what it printed."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would copy only one of them"
    tally.inputs[part] += sum(case.weighs for case in cases) if only is None else 1
    waiting = list(enumerate(cases)) if only is None else [(only, cases[only])]
    waiting.reverse()
    alive: dict[int, Running] = {}
    begin, shown = time.monotonic(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"hostile-{part}-") as place:
        try:
            while waiting or alive:
                while waiting and len(alive) < jobs:
                    number, case = waiting.pop()
                    pid, running = start(number, case, Path(place) / str(number))
                    alive[pid] = running
                for pid, running in list(alive.items()):
                    if (status := ended(pid, running)) is not None:
                        del alive[pid]
                        report(part, pid, running, status, tally, verbose=only is not None)
                tally.slowness = max(tally.slowness, slowness())
                if time.monotonic() > shown + 30:
                    shown = time.monotonic()
                    done = len(cases) - len(waiting) - len(alive)
                    print(f"  {part}: {done} of {len(cases)} in {shown - begin:.0f} s", flush=True)
                time.sleep(0.002)
        finally:  # Ctrl-C ends this test, and all that it has started
            for pid in alive:
                end_session(pid)
    print(f"{part}: {tally.inputs[part]} inputs in {time.monotonic() - begin:.0f} s", flush=True)


def report(part: str, pid: int, running: Running, status: int, tally: Tally, verbose: bool) -> None:
    """Judge a case that has ended, print what is wrong with it, and forget its folder."""
    for kind, detail in judge(pid, running, status):
        failure = Failure(kind, part, running.number, running.case, detail)
        tally.failures.append(failure)
        print(failure, flush=True)
    if verbose:
        print(running.case.again, f"exit status {status}", sep="\n")
        print(*(read(running.folder, name) for name in ("stdout", "stderr")), sep="\n")
    shutil.rmtree(running.folder, ignore_errors=True)


def start(number: int, case: Case, folder: Path) -> tuple[int, Running]:
    """Fork a process for a case."""
    (folder / "work").mkdir(parents=True)
    if case.own_files:
        for name, content in OWN_FILES.items():
            (folder / "work" / name).write_bytes(content)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = perform(case, folder)
        finally:
            os._exit(status)
    return pid, Running(number, case, folder, time.monotonic())


def perform(case: Case, folder: Path) -> int:
    """Run a case in this process, which was forked for it. Returns the exit status."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    own = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (own + MEMORY, own + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder / "work")

    def act() -> None:
        try:
            case.act()
        except Exception:
            told = traceback.format_exc()  # there may be no stderr
            (folder / "crash").write_text(told, encoding="utf-8", errors="replace")
            raise

    return outcome(act) & 255


def ended(pid: int, running: Running) -> int | None:
    """The exit status of a process (minus the signal's number), or None while it is alive."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        return os.waitstatus_to_exitcode(status)
    now, case = time.monotonic(), running.case
    since = now - (running.interrupted or running.started)
    if case.enough is not None and since > case.enough + running.signals * SWALLOWED:
        if running.interrupted is None:
            running.interrupted, running.imported = now, catches(pid, signal.SIGINT)
        running.signals += 1
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGINT)  # as a terminal does: its workers get it, too
    elif since > slowness() * case.limit:
        end_session(pid)
        os.waitpid(pid, 0)
        return -signal.SIGALRM
    return None


def catches(pid: int, sign: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (sign - 1) & 1)


def slowness() -> float:
    """How much longer all may take here: programs that want a core in the last minute, per core.

    Else a busy machine would seem to hang. This test's own jobs count, too. So the end of a run
    says how large it was: the larger, the less a run without a hang says.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def judge(pid: int, running: Running, status: int) -> Iterator[tuple[str, str]]:
    """What is wrong with how a case ended: kinds of KINDS, and details."""
    errors = read(running.folder, "stderr") or read(running.folder, "crash")
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")[:300]
    if survivors := outlived(pid):
        yield "orphans", f"{len(survivors)} processes outlive it"
        end_session(pid)
    marked = re.findall(rf"^({'|'.join(KINDS)}): (.*)", errors, re.MULTILINE)
    yield from marked
    if status == -signal.SIGALRM:
        after = "after Ctrl-C" if running.interrupted else "by itself"
        yield "hangs", f"did not end {after} within {running.case.limit:.0f} s or more; {last}"
    elif "Traceback (most recent call last)" in errors or "Exception ignored" in errors:
        yield "tracebacks", f"exit status {status}: {last}"
    elif status not in (0, 1, 2) and not by_hand(running, status):
        if not (status == NO_READER and not errors):
            yield "tracebacks", f"exit status {status}: {last}"
    elif status in (1, 2) and not (marked or running.case.silent) and why_unclear(errors):
        yield "unclear errors", f"exit status {status}: {why_unclear(errors)}: {last}"
    if running.case.own_files:
        for name, content in OWN_FILES.items():
            path = running.folder / "work" / name
            if not path.is_file() or path.read_bytes() != content:
                yield "files lost", f"{name} was changed"


def by_hand(running: Running, status: int) -> bool:
    """Whether a case that got Ctrl-C has ended as it should."""
    right = (BY_HAND,) if running.imported else (BY_HAND, -signal.SIGINT)
    return running.interrupted is not None and status in right


def why_unclear(errors: str) -> str:
    """What is wrong with an error, which should be one line; "" if nothing is."""
    bars = re.compile(r"\d+%\||\d+(it|s)/(s|it)|^compiling native")
    lines = [line.rpartition("\r")[2] for line in errors.splitlines()]
    lines = [line for line in lines if line.strip() and not bars.search(line)]
    if len(lines) != 1:
        return f"{len(lines)} lines in place of one"
    if not lines[0].startswith("error: "):
        return "it does not begin with 'error: '"
    if len(lines[0]) > LONGEST_LINE:
        return f"a line of {len(lines[0])} characters"
    return ""


def read(folder: Path, name: str) -> str:
    """What a case has printed, at most its last 200,000 bytes."""
    path = folder / name
    return path.read_bytes()[-200_000:].decode(errors="replace") if path.exists() else ""


def outlived(session: int) -> list[int]:
    """Processes of a session whose first process has ended. They get two seconds to end, too."""
    deadline = time.monotonic() + 2
    while found := members(session):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.05)
    return []


def members(session: int) -> list[int]:
    """All living processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(entry))
    return found


def end_session(session: int) -> None:
    for pid in members(session):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
