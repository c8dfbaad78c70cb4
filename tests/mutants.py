"""Plants a mistake in a copy of the project, and looks which test finds it: once for each mistake.

The mistakes are in mutants.toml, one room (a file) after the other. `python -m tests.mutants` runs
them all, and prints the first test that fails. If none fails, a test is missing. A file of tests
that cannot be imported has found nothing. mutants.csv says what found each mistake when it was
written: that file runs first, then those that found others in the same folder. A new folder needs
--tests.

This process imports torch and the like once. A fork of it, in the copy, imports the project.
"""

import argparse
import contextlib
import csv
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests"
LIMIT = 3600  # s of a mistake. Whoever finds it later has not found it
CPU_LIMIT = 30  # s of the CPU, of one test under it
IDLE, LEAST = 90, 1.0  # a test hangs if it takes less than LEAST s of the CPU in IDLE s
MEMORY = 8 << 30  # bytes beyond what this process has
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
COLUMNS = ("room", "mistake", "caught_by")
NO_START = "no test begins"


@dataclass(frozen=True)
class Mutant:
    """A mistake in a file: `old`, which stands there once, becomes `new`."""

    room: str
    what: str
    old: str
    new: str


def mutants() -> list[Mutant]:
    table = tomllib.loads((HERE / "mutants.toml").read_text(encoding="utf-8"))
    return [
        Mutant(room, what, *texts) for room, own in table.items() for what, texts in own.items()
    ]


class Watcher:
    """A plugin of pytest: writes which test runs, and which has failed, and ends one that does not
    end. It counts the CPU's seconds: other programs may be busy, too.
    """

    def __init__(self, out: Path):
        self.out, self.used = out, 0.0
        signal.signal(signal.SIGPROF, too_long)
        signal.signal(signal.SIGALRM, self.look)

    def pytest_runtest_setup(self, item: object) -> None:
        self.note("begins", item.nodeid)
        self.used = time.process_time()
        signal.alarm(IDLE)
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT)

    def pytest_runtest_teardown(self) -> None:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed:
            self.note("failed", report.nodeid)

    pytest_collectreport = pytest_runtest_logreport

    def look(self, *_: object) -> None:
        before, self.used = self.used, time.process_time()
        if self.used - before < LEAST:
            too_long()
        signal.alarm(IDLE)

    def note(self, *words: str) -> None:
        with self.out.open("a", encoding="utf-8") as file:
            print(*words, file=file)


def name_of(test: str) -> str:
    """Of "tests/test_x.py::test_y[case 1]": "test_x::test_y"."""
    return test.removeprefix("tests/").replace(".py", "").partition("[")[0]


def too_long(*_: object) -> None:
    raise TimeoutError("a test takes too long")


def run_tests(copy: Path, files: list[str], chosen: str, out: Path) -> None:
    """In the fork."""
    os.setsid()
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *[each for each in sys.path if each not in ("", str(ROOT))]]
    sys.dont_write_bytecode = False  # pytest compiles each test file once, not for each mistake
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    if (own := Path("/proc/self/statm")).exists():  # on Linux
        room = int(own.read_text(encoding="ascii").split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    import hypothesis
    import pytest

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", derandomize=True, phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-x", "-m", chosen, "--tb=no"]
    paths = [f"tests/{name}.py" for name in files]
    status = pytest.main([*options, *paths], plugins=[Watcher(out)])
    os._exit(int(status))


def caught_by(copy: Path, files: list[str], chosen: str) -> str:
    """The first test that fails or hangs; "" if none does in time."""
    out = copy.parent / "found.txt"
    out.write_text("")
    child = os.fork()
    if not child:
        try:
            run_tests(copy, files, chosen, out)
        finally:
            os._exit(99)
    end = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with all that it has started
    if ended == (0, 0):
        os.waitpid(child, 0)
    if ended == (0, 0) or not ended[1]:
        return ""
    notes = [line.split(" ", 1) for line in out.read_text(encoding="utf-8").splitlines()]
    failed = [test for word, test in notes if word == "failed"] or [test for _, test in notes[-1:]]
    return name_of(failed[0]) if failed and "::" in failed[0] else NO_START


def copied(place: Path) -> Path:
    """The files that git knows, and those that it will."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if (ROOT / name).is_file():
            target = place / "copy" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    return place / "copy"


def found_before() -> dict[tuple[str, str], str]:
    """The file of tests that found each mistake, by room and mistake, as mutants.csv says."""
    with (HERE / "mutants.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row["room"], row["mistake"], row["caught_by"]) for row in csv.DictReader(file)]
    return {(room, mistake): test.partition("::")[0] for room, mistake, test in rows}


def tests_of(mutant: Mutant, before: dict[tuple[str, str], str]) -> list[str]:
    folder = Path(mutant.room).parent
    others = [file for (room, _), file in before.items() if Path(room).parent == folder]
    first = before.get((mutant.room, mutant.what))
    return list(dict.fromkeys([*([first] if first else []), *others]))


def planted(
    copy: Path, files: Sequence[str], chosen: str, room: str
) -> Iterator[tuple[Mutant, str]]:
    before = found_before()
    for mutant in mutants():
        if not room or room in (mutant.room, mutant.what):
            path = copy / mutant.room
            text = path.read_text(encoding="utf-8")
            assert text.count(mutant.old) == 1, f"{mutant}: {text.count(mutant.old)} times"
            write(path, text.replace(mutant.old, mutant.new))
            yield mutant, caught_by(copy, list(files) or tests_of(mutant, before), chosen)
            write(path, text)


def write(path: Path, text: str) -> None:
    """Python takes compiled code for up to date if size and second are the same: so it goes."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tests", nargs="+", default=(), metavar="FILE", help="such as test_loop")
    add("--only", default="", metavar="ROOM", help="a file, or one mistake")
    add("--marks", default="not browser", help="of tests (pytest's -m; default: not browser)")
    add("--out", type=Path, metavar="CSV", help="write the table, such as tests/mutants.csv")
    args = parser.parse_args()
    os.environ |= THREADS
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    rows, missed = [], 0
    with tempfile.TemporaryDirectory(prefix="nano-sarathi-mutants-") as place:
        copy = copied(Path(place))
        files = sorted(args.tests or set(found_before().values()))
        if not args.only and (failing := caught_by(copy, files, args.marks)):
            sys.exit(f"without a mistake, {failing} fails")
        for mutant, found in planted(copy, args.tests, args.marks, args.only):
            rows.append((mutant.room, mutant.what, found))
            missed += found in ("", NO_START)
            print(*rows[-1], sep=" | ", flush=True)
            if args.out:
                with args.out.open("w", encoding="utf-8", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"{len(rows)} mistakes, {missed} that no test finds")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
