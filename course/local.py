"""A student's code in this process: for `check` and `picture`. Nothing is protected."""

import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType

from command.checks import UserError, moved
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
SELDOM = 64  # jumps between two looks at the clock, which is slow in a browser
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
    if sys.platform == "emscripten":
        return watched(work, name)
    done: list[tuple[object, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:  # noqa: BLE001  (raised again below)
            done.append((None, error))

    thread, start = threading.Thread(target=run, daemon=True), time.process_time()
    thread.start()
    while not done:
        thread.join(0.2)  # in pieces: on Windows, Ctrl-C cannot end a longer one
        if not done and time.process_time() - start > LONGEST:
            stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
            raise endless([frame.lineno for frame in stack if frame.filename == name], name)
    answer, error = done[0]
    if error:
        raise error
    return answer


def endless(places: list[int], name: str) -> AnswerError:
    """places: lines of the student's file, the innermost last."""
    where = f" (line {places[-1]} of {name})" if places else ""
    return AnswerError(f"none in {LONGEST:g} s", ENDLESS.format(LONGEST) + where)


def watched(work: Callable[[], object], name: str) -> object:
    """`limited` in a browser, which has no threads: each jump and each call in the student's file
    looks at the clock. A loop inside one of Python's own functions is ended by the page alone."""
    monitor, start, count = sys.monitoring, time.process_time(), itertools.count()  # Python 3.12

    def look(code: CodeType, *_: object) -> object:
        if code.co_filename != name:
            return monitor.DISABLE
        if next(count) % SELDOM == 0 and time.process_time() - start > LONGEST:
            raise endless([sys._getframe(1).f_lineno], name)

    monitor.use_tool_id(monitor.DEBUGGER_ID, name)
    try:
        for event in (monitor.events.JUMP, monitor.events.PY_START):
            monitor.register_callback(monitor.DEBUGGER_ID, event, look)
        monitor.set_events(monitor.DEBUGGER_ID, monitor.events.JUMP | monitor.events.PY_START)
        return work()
    finally:
        monitor.set_events(monitor.DEBUGGER_ID, 0)
        monitor.free_tool_id(monitor.DEBUGGER_ID)


def lines_in(error: BaseException, name: str) -> list[int]:
    """The lines of the student's file that led to an error, the innermost last."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return [error.lineno]
    return [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]


def told(error: BaseException, name: str) -> str:
    """An error in a line: what, and the last line of the student's file that led to it.

    Without such a line, the project's own code met what the student's had returned or stored: then
    the name of that file.
    """
    places = lines_in(error, name)
    where = f" (line {places[-1]} of {name})" if places else ""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [file.name for file in files if HERE.parent in file.parents and file not in WRAPPERS]
    if not places and ours:
        where = f" (in {ours[-1]}, which takes what your code has returned or stored)"
    what = str(error.msg if isinstance(error, SyntaxError) else error) + moved(error)
    return f"{type(error).__name__}: {what[:300]}{where}"


def mine_of(exercise: Exercise) -> ModuleType:
    """A student's file as a module. A UserError if it is not there, or does not load."""
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
