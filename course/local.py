"""A student's code in this process: for `check` and `picture`. Nothing is protected."""

import json
import traceback
from types import ModuleType

from checks import UserError
from course.drive import DRIVERS
from course.exercises import MINE, AnswerError, Ask, Exercise, load


def asker(exercise: Exercise, mine: ModuleType) -> Ask:
    """Cases and answers pass through JSON, so that `check` and `grade` see the same."""

    def ask(case: dict) -> object:
        try:
            answer = DRIVERS[exercise.file](mine, json.loads(json.dumps(case)))
            return json.loads(json.dumps(answer))
        except NotImplementedError:
            raise AnswerError("NotImplementedError") from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (whatever a student's code does, SystemExit too)
            raise AnswerError(told(error, f"{exercise.file}.py")) from None

    return ask


def told(error: BaseException, name: str) -> str:
    """An error in a line: what, and the last line of the student's file that led to it."""
    places = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == name]
    if isinstance(error, SyntaxError) and error.filename == name:
        places = [error.lineno]
    where = f" (line {places[-1]} of {name})" if places else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


def mine_of(exercise: Exercise) -> ModuleType:
    """A student's file as a module. A UserError if it is not there, or does not load."""
    path = MINE / f"{exercise.file}.py"
    if not path.is_file():
        raise UserError(f"{path} is not there: run 'python -m course start' once")
    try:
        return load(path.read_text("utf-8-sig"), path.name)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        raise UserError(f"{path} cannot be loaded: {told(error, path.name)}") from None
