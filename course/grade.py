"""Grades a folder of submissions, which may be hostile.

Each submission has a worker process of its own (worker.py). It gets cases and gives answers, as
lines of JSON. The checks, their truth, the seed and the results are in this process alone. So a
submission that exits, hangs, floods, or patches a checker in its own process earns nothing.

Limits are seconds of the processor: a grade does not depend on what else the machine does. The
clock ends what sleeps. On Linux and macOS, whatever ends this process, no worker outlives it (see
worker.py).
"""

import csv
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from types import FrameType

from command.checks import UserError, check_whole
from command.cli import as_cell, claim, write_file
from course.check.frame import examine, lines
from course.exercises import ENDLESS, EXERCISES, STUBS, UNLOADED, AnswerError, Exercise, read_answer
from course.feedback import Grade, harmless, rubric, write_feedback
from course.sandbox import PROTECTIONS
from course.submissions import Submission, submission, submissions
from course.worker import LONGEST_ANSWER

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parent.parent
MEMORY = 1 << 30  # bytes, beyond what Python, numpy and torch take
# s of the processor: until a worker is ready; of one answer, of an exercise's, of a submission's
START, CASE, EXERCISE, WHOLE = 60.0, 5.0, 15.0, 60.0
PATIENCE = 10  # wall-clock seconds allowed for each second of the processor
GLANCE = 0.2  # s between two looks at whether grading was interrupted
FOLDER = "nano-sarathi-grade-"  # what our folders for temporary files begin with
IMAGE = "nano-sarathi-course"
FENCE = [
    "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges",
    "--user=65534:65534", "--pids-limit=64", "--memory=3g", "--tmpfs=/tmp:size=16m",
]  # fmt: skip


class Stopped(Exception):
    """Grading was interrupted."""


class Worker:
    """A process with a student's code. Every answer has a deadline. stopped: waits for none.

    spent: seconds of answers so far. Of the processor, or PATIENCE times as many of the clock.
    """

    def __init__(
        self, files: dict[str, str], container: list[str], stopped: threading.Event, place: Path
    ):
        self.stopped, self.container, self.spent = stopped, container, 0.0
        self.home = Path(tempfile.mkdtemp(dir=place))
        self.name = f"grade-{os.getpid()}-{self.home.name}"
        command = [sys.executable, "-m", "course.worker"]
        if container:
            command = [container[0], "run", "--rm", "-i", f"--name={self.name}", *FENCE,
                       container[1], "python", "-m", "course.worker"]  # fmt: skip
        kept = ("PATH", "SYSTEMROOT", "LANG", "DOCKER_HOST", "XDG_RUNTIME_DIR")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= dict.fromkeys(("HOME", "TMPDIR", "TEMP"), str(self.home))
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        torch = any(each.torch and each.file in files for each in EXERCISES.values())
        setup = {"files": files, "torch": torch, "memory": MEMORY, "seconds": int(WHOLE)}
        with tempfile.TemporaryFile(dir=self.home) as said:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=said, start_new_session=os.name == "posix",
            )  # fmt: skip
            try:
                self.held = self.exchange(setup, START).get("held", [])
                self.spent = 0.0  # to start is not the student's fault
            except AnswerError as error:
                self.close()  # the student's code was not loaded yet: no fault of theirs
                said.seek(0)
                lines = said.read().decode("utf-8", errors="replace").split("\n")
                why = next((line for line in reversed(lines) if line.strip()), str(error))
                told = f"a worker did not start: {why} ({' '.join(command)})"
                raise UserError(told) from None
            except Stopped:
                self.close()
                raise

    def exchange(self, message: dict, seconds: float) -> dict:
        """Send a line, get a line. AnswerError if none comes, or if it is no answer.

        seconds: of the processor. The worker itself keeps to them. Where no other process watches
        it (Windows), or where a student's code can reach that one, all of a line may be forged.
        """
        seconds = max(0.1, seconds)
        began = time.monotonic()
        box: queue.Queue[bytes] = queue.Queue()

        def talk() -> None:
            try:
                self.process.stdin.write(f"{seconds!r} {json.dumps(message)}\n".encode())
                self.process.stdin.flush()
                box.put(self.process.stdout.readline(LONGEST_ANSWER + 99))
            except (OSError, ValueError):  # it has gone, or was ended
                with suppress(OSError):
                    self.process.stdin.close()  # else what it still holds is an error later
                box.put(b"")

        threading.Thread(target=talk, daemon=True).start()
        said, took = None, 0.0
        while said is None and took < PATIENCE * seconds:
            if self.stopped.is_set():
                raise Stopped
            with suppress(queue.Empty):
                said = box.get(timeout=min(PATIENCE * seconds - took, GLANCE))
            took = time.monotonic() - began
        head, _, line = (said or b"0 ").partition(b" ")
        spent = seconds_in(head)
        self.spent += max(spent or 0.0, took / PATIENCE)
        if said is None or (spent or 0.0) > seconds:
            raise AnswerError("no answer in time", ENDLESS.format(round(seconds, 1)))
        answer = read_answer(line) if spent is not None and line.endswith(b"\n") else None
        if not isinstance(answer, dict):
            raise AnswerError("no answer", "Your code ended its process, or its answer has no end.")
        return answer

    def close(self) -> None:
        """End the process and all that it has started, and remove its folder."""
        if self.container:
            subprocess.run([self.container[0], "kill", self.name], capture_output=True, check=False)
        self.process.terminate()  # then it ends the others
        try:
            self.process.wait(START)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def seconds_in(head: bytes) -> float | None:
    """What a line begins with. None if that is no time: no limit sees NaN."""
    with suppress(ValueError):
        if 0 <= (spent := float(head)) < math.inf:
            return spent
    return None


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for the workers' folders. It is locked as long as we live.

    Those that nobody holds any more are of graders that were killed: they are removed.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDER}*") if fcntl else ():
        if (lock := locked(old, fcntl.LOCK_NB)) is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    place, lock = Path(tempfile.mkdtemp(prefix=FOLDER)), None
    try:
        # another grader may just have taken it for an old one
        while fcntl and (lock := locked(place)) is None and not place.exists():
            place = Path(tempfile.mkdtemp(prefix=FOLDER))
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def locked(folder: Path, how: int = 0) -> int | None:
    """Lock a folder: a descriptor that holds the lock, or None if it cannot be had.

    how: flock's LOCK_NB does not wait for whoever holds it.
    """
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | how)
            if folder.exists():
                return lock
        os.close(lock)
    return None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that closes, are an exit like Ctrl-C.

    What is ignored when we start (under nohup) stays so.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:  # once is enough
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    ours = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {each: signal.getsignal(each) for each in ours}
    before = {each: old for each, old in before.items() if old == signal.SIG_DFL}
    for each in before:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


def container_of(image: str | None) -> list[str]:
    """[docker or podman, image] if both are there, else []. A UserError if `image` is asked for."""
    for engine in ("docker", "podman"):
        if shutil.which(engine):
            command = [engine, "image", "inspect", image or IMAGE]
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode == 0:
                return [engine, image or IMAGE]
    if image:
        raise UserError(
            f"no image {image!r}: neither docker nor podman has it; leave --image out to grade"
            " without a container"
        )
    return []


# --------------------------------------------------------------------------------- the grades


def graded(
    handed: Submission,
    keys: Iterable[str],
    seed: int,
    container: list[str],
    stopped: threading.Event,
    place: Path,
) -> Grade:
    """Some exercises of one submission. A worker that dies or hangs is replaced for the next one.

    Raises Stopped soon after `stopped` is set, and leaves no worker.
    """
    grade, began = Grade(handed, held=list(PROTECTIONS)), time.perf_counter()
    left, worker, exercises = WHOLE, None, [EXERCISES[key] for key in keys]
    # No stub is run: a worker needs no torch for those of E2 to E5.
    stubs = {each.file: (STUBS / f"{each.file}.py").read_text("utf-8") for each in exercises}
    files = {name: text for name, text in handed.files.items()
             if name in stubs and text.split() != stubs[name].split()}  # fmt: skip
    why = dict.fromkeys(handed.files, "stub") | dict.fromkeys(handed.refused, "refused")
    grade.results = {each.key: why.get(each.file, "-") for each in exercises}
    try:
        for exercise in [each for each in exercises if each.file in files]:
            if stopped.is_set():
                raise Stopped
            if left <= 0:
                grade.results[exercise.key] = "time"
                continue
            if worker is None:
                worker = Worker(files, container, stopped, place)
                grade.held = [each for each in grade.held if each in worker.held]
            before = worker.spent
            alive = one(exercise, worker, seed, grade, min(EXERCISE, left))
            left -= worker.spent - before
            if not alive:
                worker.close()
                worker = None
    finally:
        if worker:
            worker.close()
    grade.seconds = time.perf_counter() - began
    return grade


def one(exercise: Exercise, worker: Worker, seed: int, grade: Grade, seconds: float) -> bool:
    """Grade an exercise within some seconds. False if the worker cannot be used any more."""
    until, alive, unloaded = worker.spent + seconds, True, ""

    def ask(case: dict) -> object:
        nonlocal alive, unloaded
        message = {"file": exercise.file, "case": case}
        try:
            said = worker.exchange(message, min(CASE, until - worker.spent))
        except AnswerError:
            alive = False
            raise
        if "error" in said:
            what, says = str(said["error"])[:300], str(said.get("says") or "An error.")[:300]
            unloaded = "" if said.get("loaded") else UNLOADED.format(f"{exercise.file}.py", what)
            raise AnswerError(what, says)
        return said.get("answer")

    verdict = examine(exercise, ask, seed)
    grade.results[exercise.key] = verdict.failure.prop if verdict.failure else "passed"
    not_yet = f"{exercise.name} {exercise.title}: not yet. {unloaded}"  # no case is its cause
    grade.told[exercise.key] = [not_yet] if unloaded else lines(exercise, verdict)
    if verdict.score:
        grade.scores[exercise.key] = verdict.score
    return alive


def protection(grades: list[Grade], container: list[str]) -> str:
    """The first line of a report: what a submission could still do."""
    where = (
        f"in a container ({container[0]})" if container else f"without a container, {sys.platform}"
    )
    if container:
        return f"graded {where}: time, {', '.join(PROTECTIONS)} are protected"
    held = [each for each in PROTECTIONS if all(each in grade.held for grade in grades)]
    missing = [each for each in PROTECTIONS if each not in held]
    line = f"graded {where}: {', '.join(['time', *held])} are protected"
    return f"{line}; NOT PROTECTED: {', '.join(missing)}" if missing else line


def grade(
    folder: Path,
    out: Path,
    seed: int,
    workers: int,
    image: str | None,
    force: bool,
    feedback: Path | None = None,
    one: bool = False,
    only: Iterable[str] = EXERCISES,
) -> list[Grade]:
    """Grade all submissions of a folder. It prints the table, and writes it as CSV.

    feedback: a folder for a page and Gradescope's results of each student (None: beside the table).
    one: the folder is one submission. only: the keys of what was set. Raises UserError rather than
    write over a file.
    """
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is no folder: give the folder of all submissions")
    check_whole("workers", workers, 1, 64)
    if not out.name:
        raise UserError(f"--out {str(out)!r} is a folder: give the name of a file in it")
    feedback = feedback or out.with_name(f"{out.stem}_feedback")
    for path, flag in ((out, "--out"), (feedback, "--feedback")):
        if not force and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
            raise UserError(
                f"{str(path)!r} is there already: move it away, give another name with {flag}, or"
                " replace it with --force (make grade ARGS=--force)"
            )
    claim(out, force)
    points = {key: worth for key, worth in rubric().items() if key in only}
    alone = [submission(folder.name, [folder])] if one else []
    handed, left, classes, apart = (alone, [], [], []) if one else submissions(folder)
    whole = (
        "not graded, for several submissions or other zips are in it:"
        f" {some(classes, len(classes))}: unpack it into {str(folder)!r}, or into a folder there if"
        " it is one student's"
    )
    none = (
        f"{str(folder)!r} has no submissions: a folder or a .zip for each, or files as Canvas names"
        " them; --one if it is a submission itself"
    )
    if not handed:
        raise UserError(whole if classes else none)
    feedback.mkdir(exist_ok=True)  # now, and not after an hour, it may be impossible
    container, start, stopped = container_of(image), time.perf_counter(), threading.Event()
    with ended_by_signals(), workplace() as place, ThreadPoolExecutor(workers) as pool:
        try:
            one_of = partial(
                graded, keys=points, seed=seed, container=container, stopped=stopped, place=place
            )
            grades = list(pool.map(one_of, handed))
        finally:  # after Ctrl-C, nobody waits for the submissions under way
            stopped.set()
    first = protection(grades, container)
    write_file(out, table(grades, points, seed, first))
    write_feedback(feedback, grades, points, seed, first)
    print(first)
    print(f"seed {seed}, {len(grades)} submissions, {time.perf_counter() - start:.0f} s")
    wide = max(len(harmless(each.name)) for each in grades)
    print(" " * wide, *[f"{key:>7}" for key in points], " points")
    for each in grades:
        results = [f"{each.results[key]:>7}" for key in points]
        print(f"{harmless(each.name):{wide}}", *results, f"{each.points(points):7g}")
    for name in left:
        print(f"left alone, because it is no submission: {harmless(name)}")
    for names in apart:
        print(
            f"not joined, though they look like one student's: {some(names)}: two have one name or"
            " number, or are zips, which may be two students'; a folder of them is one submission"
        )
    print(f"wrote {out}\nwrote {feedback}{os.sep}")
    if classes:
        raise UserError(whole)
    return grades


def some(names: list[str], most: int = 5) -> str:
    """The first few names, and how many others there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(harmless, names[:most])) + more


def table(grades: list[Grade], points: dict[str, float], seed: int, first: str) -> str:
    """A line for each student, as CSV."""
    text = StringIO()
    rows = csv.writer(text)
    rows.writerow(["submission", *points, "passed", "points", "late", "scores", "page", "seed",
                   "protection"])  # fmt: skip
    for number, each in enumerate(grades, 1):
        passed = sum(result == "passed" for result in each.results.values())
        scores = "; ".join(f"{key}: {told}" for key, told in each.scores.items())
        late = "late" if each.handed.late else ""
        results = [each.results[key] for key in points]
        rows.writerow([as_cell(each.name), *results, passed, f"{each.points(points):g}", late,
                       scores, f"{each.page(number)}.html", seed, first])  # fmt: skip
    return text.getvalue()
