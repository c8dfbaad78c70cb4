"""Grades a folder of submissions, which may be hostile.

Each submission has a worker process of its own (worker.py). It gets cases and gives answers, as
lines of JSON. The checks, their truth, the seed and the results are in this process alone. So a
submission that exits, hangs, floods, or patches a checker in its own process earns nothing.

Limits are seconds of the processor: a grade does not depend on what else the machine does. Code
that sleeps uses no processor, so the clock ends it. Whatever ends this process, no worker outlives
it (worker.py).
"""

import csv
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import StringIO
from pathlib import Path

from command.checks import UserError
from command.cli import ROOT, as_cell, claim, cores, interrupted, write_file
from course.check.frame import Failure, examine, lines
from course.exercises import ENDLESS, EXERCISES, STUBS, UNLOADED, AnswerError, Exercise, read_answer
from course.feedback import WHY, Grade, harmless, results_json, rubric, write_feedback
from course.handed import DAMAGED
from course.sandbox import PROTECTIONS
from course.submissions import Submission, files_of, submission, submissions
from course.worker import LONGEST_ANSWER

MEMORY = 1 << 30  # bytes, beyond what Python, numpy and torch take
# s of the processor: until a worker is ready; of one answer, of an exercise's, of a submission's
START = 60.0
CASE = 5.0
EXERCISE = 15.0
WHOLE = 60.0
PATIENCE = 10  # wall-clock seconds allowed for each second of the processor
WORKERS = min(cores(), 8)  # submissions at a time


class Worker:
    """A process with a student's code. Every answer has a deadline.

    spent: seconds of answers so far. Of the processor, or PATIENCE times as many of the clock.
    """

    def __init__(self, files: dict[str, str], place: Path):
        self.spent = 0.0
        self.home = Path(tempfile.mkdtemp(dir=place))
        environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environment |= dict.fromkeys(("HOME", "TMPDIR"), str(self.home))
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        torch = any(each.torch and each.file in files for each in EXERCISES.values())
        setup = {"files": files, "torch": torch, "memory": MEMORY, "seconds": int(WHOLE)}
        with tempfile.TemporaryFile(dir=self.home) as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "course.worker"],
                cwd=ROOT,
                env=environment,
                stderr=said,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            try:
                self.held = self.exchange(setup, START).get("held", [])
                self.spent = 0.0  # to start is not the student's fault
            except AnswerError as error:
                self.close()  # the student's code was not loaded yet: no fault of theirs
                said.seek(0)
                lines = said.read().decode("utf-8", errors="replace").split("\n")
                why = next((line for line in reversed(lines) if line.strip()), str(error))
                raise UserError(f"a worker did not start: {why}") from None

    def exchange(self, message: dict, seconds: float) -> dict:
        """Send a line, get a line. AnswerError if none comes, or if it is no answer.

        seconds: of the processor. The worker itself keeps to them. Where a student's code can reach
        the process that watches it, all of a line may be forged.
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
        try:
            said = box.get(timeout=PATIENCE * seconds)
        except queue.Empty:
            said = None
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


def graded(handed: Submission, keys: Iterable[str], seed: int, place: Path) -> Grade:
    """Some exercises of one submission. A worker that dies or hangs is replaced for the next."""
    grade = Grade(handed, held=list(PROTECTIONS))
    left = WHOLE
    worker = None
    exercises = [EXERCISES[key] for key in keys]
    # No stub is run: a worker needs no torch for those of E2 to E4.
    stubs = {each.file: (STUBS / f"{each.file}.py").read_text("utf-8") for each in exercises}
    files = {
        name: text
        for name, text in handed.files.items()
        if name in stubs and text.split() != stubs[name].split()
    }
    why = dict.fromkeys(handed.files, "stub") | dict.fromkeys(handed.refused, "refused")
    for name in [name for name, text in files.items() if not text.strip()]:
        why[name] = "empty"
        del files[name]
    grade.results = {each.key: why.get(each.file, "-") for each in exercises}
    try:
        for exercise in [each for each in exercises if each.file in files]:
            if left <= 0:
                grade.results[exercise.key] = "time"
                continue
            if worker is None:
                worker = Worker(files, place)
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
    return grade


def one(exercise: Exercise, worker: Worker, seed: int, grade: Grade, seconds: float) -> bool:
    """Grade an exercise within some seconds. False if the worker cannot be used any more."""
    until = worker.spent + seconds
    alive = True
    unloaded = ""

    def ask(case: dict) -> object:
        nonlocal alive, unloaded
        message = {"file": exercise.file, "case": case}
        try:
            said = worker.exchange(message, min(CASE, until - worker.spent))
        except AnswerError:
            alive = False
            raise
        if "error" in said:
            what = str(said["error"])[:300]
            says = str(said.get("says") or "An error.")[:300]
            unloaded = "" if said.get("loaded") else UNLOADED.format(f"{exercise.file}.py", what)
            raise AnswerError(what, says)
        return said.get("answer")

    verdict = examine(exercise, ask, seed)
    grade.results[exercise.key] = result_of(verdict.failure, unloaded)
    not_yet = f"{exercise.name} {exercise.title}: not yet. {unloaded}"  # no case is its cause
    grade.told[exercise.key] = [not_yet] if unloaded else lines(exercise, verdict)
    if verdict.score:
        grade.scores[exercise.key] = verdict.score
    return alive


def result_of(failure: Failure | None, unloaded: str) -> str:
    """What the table says of an exercise. unloaded: why its file could not be loaded, if so."""
    if failure is None:
        return "passed"
    if "SyntaxError" in unloaded or "IndentationError" in unloaded:
        return "syntax"
    if unloaded:
        return "load"
    if failure.says.startswith(ENDLESS.partition("{")[0]):
        return "endless"
    return failure.prop


def most_failed(grades: list[Grade], points: dict[str, float]) -> str:
    """What a class may talk about: the result that most students have in common, but passed."""
    counts = Counter(
        (key, each.results[key])
        for each in grades
        for key in points
        if key in each.told and each.results[key] != "passed"
    )
    if not counts:
        return ""
    (key, result), count = counts.most_common(1)[0]
    why = EXERCISES[key].check.PROPERTIES.get(result) or WHY.get(result, "")
    name = EXERCISES[key].name
    return f"most often: {name} {result}, {count} of {len(grades)} submissions: {why}"


def protection(grades: list[Grade]) -> str:
    """The first line of a report: what a submission could still do."""
    held = [each for each in PROTECTIONS if all(each in grade.held for grade in grades)]
    missing = [each for each in PROTECTIONS if each not in held]
    line = f"graded on {sys.platform}: {', '.join(['time', *held])} are protected"
    return f"{line}; NOT PROTECTED: {', '.join(missing)}" if missing else line


def grade(
    place: Path,
    out: Path,
    seed: int,
    force: bool = False,
    one: bool = False,
    only: Iterable[str] = EXERCISES,
) -> list[Grade]:
    """Grade all submissions of a folder or a zip. It prints the table, and writes it as CSV.

    Beside the table, a folder gets a page for each student. one: the folder is one submission.
    only: the keys of what was set. Raises UserError rather than write over a file.
    """
    feedback = check_places(place, out, force)
    points = {key: worth for key, worth in rubric().items() if key in only}
    handed, left = read_all(place, one)
    feedback.mkdir(exist_ok=True)  # now, and not after an hour, it may be impossible
    start = time.perf_counter()
    grades = grade_all(handed, points, seed)
    first = protection(grades)
    write_file(out, table(grades, points, seed, first))
    write_feedback(feedback, grades, points, seed)
    if one:
        told = json.dumps(results_json(grades[0], points, seed, first), indent=1)
        write_file(feedback / "results.json", told + "\n")
    print(first)
    print(f"seed {seed}, {len(grades)} submissions, {time.perf_counter() - start:.0f} s")
    report(grades, points)
    for name in left:
        print(f"left alone, because it is no submission: {harmless(name)}")
    print(f"wrote {out}\nwrote {feedback}{os.sep}")
    return grades


def check_places(place: Path, out: Path, force: bool) -> Path:
    """Where the pages go. A UserError if nothing can be read, or something is written over."""
    if not (place.is_dir() or (place.is_file() and place.suffix.lower() == ".zip")):
        raise UserError(f"{str(place)!r} is no folder and no zip: give all submissions in one")
    if not out.name:
        raise UserError(f"--out {str(out)!r} is a folder: give the name of a file in it")
    feedback = out.with_name(f"{out.stem}_feedback")
    for path in (out, feedback):
        if not force and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
            raise UserError(
                f"{str(path)!r} is there already: move it away, give another name with --out, or"
                " replace it with --force (make grade ARGS=--force)"
            )
    claim(out, force)
    return feedback


def read_all(place: Path, one: bool) -> tuple[list[Submission], list[str]]:
    """The submissions, at least one, and the names of what is none."""
    try:
        if one:
            return [submission(place.name, files_of(place))], []
        handed, left = submissions(place)
    except DAMAGED as error:
        raise UserError(f"{str(place)!r} cannot be read: {error}") from None
    if not handed:
        raise UserError(
            f"{str(place)!r} has no submissions: a folder or a .zip for each student; --one"
            " if it is a submission itself"
        )
    return handed, left


def grade_all(handed: list[Submission], points: dict[str, float], seed: int) -> list[Grade]:
    """WORKERS submissions at a time. It says how far it is."""
    homes = Path(tempfile.mkdtemp(prefix="nano-sarathi-grade-"))
    pool = ThreadPoolExecutor(WORKERS)
    total = len(handed)
    try:
        done = pool.map(partial(graded, keys=points, seed=seed, place=homes), handed)
        grades = []
        for number, each in enumerate(done, 1):
            told = f"graded {number} of {total}: {harmless(each.name)}, {each.points(points):g}"
            print(told, file=sys.stderr, flush=True)
            grades.append(each)
    except KeyboardInterrupt:  # nobody waits for the submissions under way: they end with us
        shutil.rmtree(homes, ignore_errors=True)
        os._exit(interrupted())
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(homes, ignore_errors=True)
    return grades


def report(grades: list[Grade], points: dict[str, float]) -> None:
    """Print a line for each student; below, what the class may talk about, and notes."""
    wide = max(len(harmless(each.name)) for each in grades)
    most = sum(points.values())
    print(" " * wide, *[f"{key:>7}" for key in points], f" points of {most:g}")
    for each in grades:
        results = [f"{each.results[key]:>7}" for key in points]
        print(f"{harmless(each.name):{wide}}", *results, f"{each.points(points):7g}")
    mean = sum(each.points(points) for each in grades) / len(grades)
    print(f"mean: {mean:.1f} of {most:g} points")
    if said := most_failed(grades, points):
        print(said)
    for each in grades:
        for note in each.handed.notes:
            print(harmless(f"{each.name}: {note}"))


def table(grades: list[Grade], points: dict[str, float], seed: int, first: str) -> str:
    """A line for each student, as CSV."""
    text = StringIO()
    rows = csv.writer(text)
    rows.writerow(
        ["submission", *points, "passed", "points", "of", "scores", "page", "seed", "protection"]
    )
    for number, each in enumerate(grades, 1):
        passed = sum(result == "passed" for result in each.results.values())
        scores = "; ".join(f"{key}: {told}" for key, told in each.scores.items())
        results = [each.results[key] for key in points]
        rows.writerow(
            [
                as_cell(each.name),
                *results,
                passed,
                f"{each.points(points):g}",
                f"{sum(points.values()):g}",
                scores,
                f"{each.page(number)}.html",
                seed,
                first,
            ]
        )
    return text.getvalue()
