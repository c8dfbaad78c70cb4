"""The exercises by name, and how a student's file becomes a module. No torch."""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from command.checks import UserError, did_you_mean

HERE = Path(__file__).resolve().parent
STUBS, MINE, HINTS = (HERE / name for name in ("stubs", "mine", "hints"))
NOTEBOOKS = HERE.parent / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))  # 01_..., 02_..., no gap

BASE = 1  # seed of the cases of `check`: the same each time, so that a failure stays


@dataclass(frozen=True)
class Exercise:
    """key: what a student types. lines: about how many the reference has. torch: it needs torch."""

    key: str
    title: str
    lesson: int
    lines: int
    torch: bool = False

    @property
    def file(self) -> str:
        """The name of its files, without .py: e06, hunt."""
        return f"e{int(self.key):02d}" if self.key.isdecimal() else self.key

    @property
    def name(self) -> str:
        """As it is printed: E6, Hunt."""
        return f"E{self.key}" if self.key.isdecimal() else self.key.capitalize()

    @property
    def check(self) -> ModuleType:
        """course/check/FILE.py: PROPERTIES, cases(rng) and judge(case, answer)."""
        return import_module(f"course.check.{self.file}")


EXERCISES = {
    each.key: each
    for each in (
        Exercise("1", "the floor of an iteration", 1, 6),
        Exercise("2", "slots of the KV cache", 2, 15, torch=True),
        Exercise("3", "the mask of a chunk", 3, 3, torch=True),
        Exercise("4", "attention over the cache", 3, 9, torch=True),
        Exercise("5", "a hybrid batch as rows", 4, 15),
        Exercise("6", "SARATHI's chunk", 4, 7),
        Exercise("7", "the cost of a batch", 5, 14),
        Exercise("8", "Sarathi-Serve, and preemption", 6, 16),
        Exercise("9", "TTFT, TBT, stalls", 7, 8),
        Exercise("10", "bubbles of a pipeline", 8, 12),
        Exercise("11", "the window of work stealing", 9, 5),
        Exercise("12", "the table of a beam search", 10, 3),
        Exercise("13", "blocks, shared by a hash of the prefix", 6, 20),
        Exercise("hunt", "a property that finds mistakes", 6, 10),
        Exercise("final", "a policy of your own", 7, 30),
    )
}


def find(key: str) -> Exercise:
    """The exercise that a user names: 6, 06, e06, E6, hunt. A UserError if there is none."""
    name = key.strip().lower()
    digits = name.removeprefix("e")
    name = digits.lstrip("0") if digits.isascii() and digits.isdecimal() else name
    if name not in EXERCISES:
        near = "" if digits.isdecimal() else did_you_mean(name, EXERCISES)
        raise UserError(f"unknown exercise {key[:60]!r}: choose 1 to 13, hunt or final{near}")
    return EXERCISES[name]


def hints(exercise: Exercise) -> list[str]:
    """Three, each says more than the one before."""
    text = (HINTS / f"{exercise.file}.md").read_text("utf-8")
    return [part.strip() for part in re.split(r"^## \d\n", text, flags=re.MULTILINE)[1:]]


def load(source: str, name: str) -> ModuleType:
    """A module from its text. name: what tracebacks call it, e06.py."""
    module = ModuleType(f"course_{Path(name).stem}")
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102  (it is what this is for)
    return module


UNWRITTEN = "not written yet (NotImplementedError)"
UNLOADED = "{} cannot be loaded: {}"
ENDLESS = "Your code has run {:g} s: does a loop never end?"
NOTHING = "Your function returned None: is `return` missing? Or does a list hold None?"


class AnswerError(Exception):
    """What a student's code did instead of answering, in one line. says: the verdict on it."""

    def __init__(self, got: str, says: str = "Your code raised an error."):
        super().__init__(got)
        self.says = says


def read_answer(text: str | bytes) -> object:
    """Plain data of JSON. AnswerError if it is none, or has NaN or infinity: no limit sees those,
    because each comparison with NaN is false."""

    def number(digits: str) -> float:
        found = float(digits)  # 1e999 is infinity, too
        if not math.isfinite(found):
            raise AnswerError(str(found), "Your answer has NaN or infinity in it.")
        return found

    try:
        return json.loads(text, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError):
        raise AnswerError("no JSON") from None


Ask = Callable[[dict], object]
"""A case without its hidden fields -> the answer, plain data. It raises AnswerError."""
