"""What the page of the exercises asks (course/page.py). The browser runs this file: no package.

A question has the name of a call; texts are a student's. zip: a submission.zip as base64.

    check       exercise, code, seed       `python -m course check`
    picture     exercise, code             `python -m course picture`, as SVG
    pack        files: name -> text        `python -m course submit`
    unpack      zip                        the files of a submission.zip
"""

import base64
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from command.checks import UserError, lookup
from course import handed
from course import picture as pictures
from course.check.frame import ANSWER, examine, lines
from course.exercises import BASE, Exercise, find
from course.local import asker, loaded
from course.sketch import svg

OFTEN = 0.5  # s between two signs of life

Tell = Callable[[str], None]


def student(question: dict) -> tuple[Exercise, ModuleType]:
    exercise = find(question["exercise"])
    return exercise, loaded(question["code"].encode(), Path(f"{exercise.file}.py"))


def check(question: dict, tell: Tell) -> dict:
    """lines: as the command prints it. failure: as a `Failure`. It tells how many were asked."""
    exercise, mine = student(question)
    ask = asker(exercise, mine)
    told = time.monotonic()
    count = 0

    def telling(case: dict) -> object:
        nonlocal told, count
        count += 1
        if time.monotonic() - told > OFTEN:
            told = time.monotonic()
            tell(f"{count} cases so far")
        return ask(case)

    verdict = examine(exercise, telling, question.get("seed", BASE))
    failure = verdict.failure
    return {
        "passed": failure is None,
        "draw": exercise.file in pictures.PICTURES and not (failure and failure.prop == ANSWER),
        "lines": lines(exercise, verdict),
        "failure": asdict(failure) if failure else None,
        "score": verdict.score,
    }


def picture(question: dict, tell: Tell) -> dict:
    """svg: of two panels."""
    return {"svg": [svg(each) for each in pictures.picture(*student(question))]}


def pack(question: dict, tell: Tell) -> dict:
    files = {name: text.encode() for name, text in question["files"].items()}
    return {"zip": base64.b64encode(handed.pack(files)).decode()}


def unpack(question: dict, tell: Tell) -> dict:
    files = handed.unpack(base64.b64decode(question["zip"]))
    return {"files": {name: data.decode("utf-8-sig") for name, data in files.items()}}


CALLS = {each.__name__: each for each in (check, picture, pack, unpack)}


def in_browser(text: str, tell: Tell) -> str:
    """A question and its answer as JSON. A user's mistake gives {"error": one sentence}."""
    try:
        question = json.loads(text)
        found = lookup(CALLS, question["call"], "call")(question, tell)
    except UserError as error:
        found = {"error": str(error)}
    except UnicodeDecodeError:
        found = {"error": "a file of this zip is no text"}
    return json.dumps(found)
