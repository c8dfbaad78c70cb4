"""A student's code in this process: for `check` and `picture`. Nothing is protected."""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from command.checks import UserError
from command.cli import to_run
from course.drive import answer_of
from course.exercises import (
    ENDLESS,
    HERE,
    MINE,
    NOTHING,
    UNLOADED,
    UNWRITTEN,
    AnswerError,
    Ask,
    Exercise,
    load,
    read_answer,
)

# they pass cases and answers on, and look at neither
WRAPPERS = {HERE / name for name in ("local.py", "worker.py", "exercises.py")}
LONGEST = 10.0  # s of computing for one case. A wait at a debugger's prompt does not count.


def asker(exercise: Exercise, mine: ModuleType) -> Ask:
    """Cases and answers pass through JSON, so that `check` and `grade` see the same."""
    name = f"{exercise.file}.py"

    def ask(case: dict) -> object:
        try:
            case = json.loads(json.dumps(case))
            answer = limited(lambda: answer_of(exercise.file, mine, case), name)
            return read_answer(json.dumps(answer))
        except (KeyboardInterrupt, AnswerError):
            raise
        except BaseException as error:  # noqa: BLE001  (whatever a student's code does, SystemExit too)
            raise failed(error, name) from None

    return ask


def failed(error: BaseException, name: str) -> AnswerError:
    """What an error says of a student's code. name: of the file."""
    if isinstance(error, NotImplementedError):
        return AnswerError("NotImplementedError", UNWRITTEN)
    if not lines_in(error, name) and "NoneType" in str(error):  # we met it, not their code
        return AnswerError(told(error, name), NOTHING)
    return AnswerError(told(error, name))


def limited(work: Callable[[], object], name: str) -> object:
    """Do a student's work in a thread, so that a loop without end, or Ctrl-C, can be left.

    Returns and raises what the work does. AnswerError after LONGEST; the thread runs on until the
    process ends. name: of the student's file.
    """
    if sys.platform == "emscripten":  # it has no threads: the page ends what takes too long
        return work()
    done: list[tuple[object, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:  # noqa: BLE001  (raised again below)
            done.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    start = time.process_time()
    thread.start()
    while not done:
        thread.join(0.2)  # in pieces: on Windows, Ctrl-C cannot end a longer one
        if not done and time.process_time() - start > LONGEST:
            stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
            places = [frame.lineno for frame in stack if frame.filename == name]
            says = ENDLESS.format(LONGEST) + line_of(places, name)
            raise AnswerError(f"none in {LONGEST:g} s", says)
    answer, error = done[0]
    if error:
        raise error
    return answer


def lines_in(error: BaseException, name: str) -> list[int]:
    """The lines of the student's file that led to an error, the innermost last."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return [error.lineno]
    return [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]


def line_of(places: list[int], name: str) -> str:
    return f" (line {places[-1]} of {name})" if places else ""


def told(error: BaseException, name: str) -> str:
    """An error in a line: what, and the last line of the student's file that led to it.

    Without such a line, the project's own code met what the student's had returned or stored: then
    the name of that file.
    """
    places = lines_in(error, name)
    where = line_of(places, name)
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file.name for file in files if HERE.parent in file.parents and file not in WRAPPERS]
    if not places and ours:
        where = f" (in {ours[-1]}, which takes what your code has returned or stored)"
    what = str(error.msg if isinstance(error, SyntaxError) else error)
    return f"{type(error).__name__}: {what[:300]}{where}"


def mine_of(exercise: Exercise) -> ModuleType:
    """A student's file as a module. A UserError if it, or torch for it, is not there; if it does
    not load."""
    if exercise.torch and find_spec("torch") is None:
        raise UserError(
            f"{exercise.name} needs torch: {to_run('install')} .venv/bin/python -m course"
        )
    path = MINE / f"{exercise.file}.py"
    if not path.is_file():
        raise UserError(f"{path} is not there: run 'python -m course start' once")
    return loaded(path.read_bytes(), path)


def loaded(source: bytes, path: Path) -> ModuleType:
    """A student's text as a module. A UserError if it does not load. path: what it is called."""
    name = path.name
    try:
        return limited(lambda: load(source.decode("utf-8-sig"), name), name)
    except AnswerError as error:
        raise UserError(UNLOADED.format(path, error.says)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001
        raise UserError(UNLOADED.format(path, told(error, name))) from None
