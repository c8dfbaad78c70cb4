"""What all checks share: a failure as a student sees it, and the loop over the cases."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from course.exercises import AnswerError, Ask, Exercise

ANSWER = "answer"  # the property that any code must have: it answers, and with what is asked for
FORM = "the function returns what its docstring says"


@dataclass(frozen=True)
class Failure:
    """The smallest case that fails. table: rows of cells, the first one the header."""

    prop: str
    where: str
    expected: str
    got: str
    teaches: str
    table: Sequence[Sequence[object]] = field(default=())


@dataclass(frozen=True)
class Verdict:
    """What a check found. failure: None if all cases hold. score: of those that have one."""

    cases: int
    seconds: float
    failure: Failure | None
    score: str = ""


def examine(exercise: Exercise, ask: Ask, seed: int) -> Verdict:
    """Run a check's cases, the smallest first, up to the first one that fails."""
    check, start, count, failure = exercise.check, time.perf_counter(), 0, None
    rng = random.Random(f"{seed} {exercise.key}")
    for case in check.cases(rng):
        count += 1
        try:
            answer = ask({name: each for name, each in case.items() if not name.startswith("_")})
        except AnswerError as error:
            failure = Failure(ANSWER, describe(case), FORM, str(error), "")
        else:
            failure = judged(check.judge, case, answer)
        if failure:
            break
    score = ""
    if failure is None and hasattr(check, "score"):  # hunt, final
        try:
            score = check.score(ask, rng, case, answer)
        except AnswerError as error:
            failure = Failure(ANSWER, "the hidden workloads", FORM, str(error), "")
    return Verdict(count, time.perf_counter() - start, failure, score)


# What a checker may meet in an answer that is not what was asked for.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def judged(judge, case: dict, answer: object) -> Failure | None:
    try:
        return judge(case, answer)
    except MALFORMED as error:
        got = f"an answer of another form ({type(error).__name__}: {str(error)[:80]})"
        return Failure(ANSWER, describe(case), FORM, got, "Read the docstring of the stub again.")


def describe(case: dict) -> str:
    """A case in a line."""
    parts = [f"{name} = {each!r}" for name, each in case.items() if not name.startswith("_")]
    text = ", ".join(parts)
    return text if len(text) < 200 else text[:200] + " ..."


def lines(exercise: Exercise, verdict: Verdict, width: int = 78) -> list[str]:
    """A verdict as a student reads it."""
    head, properties, failure = exercise.name, exercise.check.PROPERTIES, verdict.failure
    count = f"{verdict.cases} case{'s' * (verdict.cases != 1)}"
    if failure is None:
        names = ", ".join(properties)
        told = [f"{head} {exercise.title}: passed. {count}, {verdict.seconds:.1f} s. Held: {names}"]
        return told + ([f"score: {verdict.score}"] if verdict.score else [])
    if "NotImplementedError" in failure.got:
        return [f"{head} {exercise.title}: not written yet (NotImplementedError)"]
    what = properties.get(failure.prop, FORM)
    told = [f"{head} {exercise.title}: not yet. {failure.prop} fails: {what}."]
    told += ["", "the smallest case found:", f"  {failure.where}"]
    told += [f"  expected  {failure.expected}", f"  got       {failure.got}"]
    if failure.table:
        widths = [
            max(len(str(cell)) for cell in column) for column in zip(*failure.table, strict=True)
        ]
        told += [""] + [
            "  "
            + "  ".join(
                str(cell).rjust(wide) for cell, wide in zip(row, widths, strict=True)
            ).rstrip()
            for row in failure.table
        ]
    if failure.teaches:
        told += ["", failure.teaches]
    return told
