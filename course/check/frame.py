"""What all checks share: a failure as a student sees it, and the loop over the cases."""

import random
import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from course.exercises import NOTHING, UNWRITTEN, AnswerError, Ask, Exercise

ANSWER = "answer"  # the property that any code must have: it answers, and with what is asked for
HINTS = {  # to errors of the project's own code
    "changes its arguments": "A function leaves its arguments as they are: change a copy.",
    "object is not iterable": "Is a list asked for? Return one, also of a single thing: [it].",
    "JSON serializable": "Return what the stub's annotations say: plain numbers, lists, tuples.",
    "a request holds one slot": "A request in the queue must have nothing prefilled. `preempt` ends"
    " with restart(), and all preemption comes before you pick chunks.",
}


@dataclass(frozen=True)
class Failure:
    """The smallest case that fails. table: rows of cells, the first one the header.

    says: the verdict, where no property's name is one.
    """

    prop: str
    where: str
    expected: str
    got: str
    teaches: str
    table: Sequence[Sequence[object]] = field(default=())
    says: str = ""


class Broken(Exception):
    def __init__(self, failure: Failure):
        self.failure = failure


@dataclass(frozen=True)
class Verdict:
    """What a check found. failure: None if all cases hold. score: of those that have one."""

    cases: int
    seconds: float
    failure: Failure | None
    score: str = ""


def examine(exercise: Exercise, ask: Ask, seed: int) -> Verdict:
    """Run a check's cases, the smallest first, up to the first one that fails."""
    check = exercise.check
    start = time.perf_counter()
    count = 0
    failure = None
    rng = random.Random(f"{seed} {exercise.key}")
    for case in check.cases(rng):
        count += 1
        shown = {name: each for name, each in case.items() if not name.startswith("_")}
        try:
            answer = ask(shown)
        except AnswerError as error:
            known = HINTS | getattr(check, "HINTS", {})
            hints = [hint for words, hint in known.items() if words in str(error)]
            failure = unanswered(describe(case), error, "".join(hints))
        else:
            failure = judged(check.judge, case, answer)
        if failure:
            break
    score = ""
    if failure is None and hasattr(check, "score"):  # hunt, final
        try:
            score = check.score(ask, rng, case, answer)
        except AnswerError as error:
            failure = unanswered("the hidden workloads", error)
        except Broken as broken:
            failure = broken.failure
    return Verdict(count, time.perf_counter() - start, failure, score)


def unanswered(where: str, error: AnswerError, teaches: str = "") -> Failure:
    return Failure(ANSWER, where, "an answer", str(error), teaches, says=error.says)


# What a checker may meet in an answer that is not what was asked for.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def judged(judge, case: dict, answer: object) -> Failure | None:
    try:
        return judge(case, answer)
    except MALFORMED:
        got = reprlib.repr(answer)  # cut: it may be long, or deep
        says = NOTHING if answer is None else "Your answer has another form."
        teaches = "The stub's annotations and its docstring say which form."
        return Failure(ANSWER, describe(case), "what the docstring says", got, teaches, says=says)


def same(wanted: object, got: object, eps: float = 0.0) -> bool:
    """Whether an answer has the form of what is wanted, and each of its numbers is within eps.

    True and 1.0 do not count as 1: a place, a slot, a token is an int. NaN is near nothing.
    """
    if isinstance(wanted, dict):
        return (
            isinstance(got, dict)
            and wanted.keys() == got.keys()
            and all(same(each, got[name], eps) for name, each in wanted.items())
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(got, list | tuple)
            and len(wanted) == len(got)
            and all(map(same, wanted, got, [eps] * len(wanted)))
        )
    if isinstance(wanted, float):
        return type(got) in (float, int) and abs(wanted - got) <= eps
    return type(wanted) is type(got) and wanted == got


def nested(draw: Callable[[], float], *shape: int) -> list | float:
    """Drawn numbers as lists in lists."""
    return [nested(draw, *shape[1:]) for _ in range(shape[0])] if shape else draw()


def many(count: int, what: str) -> str:
    """1 row, 2 rows."""
    return f"1 {what}" if count == 1 else f"{count} {what}s"


LONGEST = 210  # letters of a case that are shown


def named(value: object) -> object:
    """Without the shapes of models and GPUs, which fill a screen: their names are enough."""
    if isinstance(value, dict):
        return value.get("name") or {key: named(each) for key, each in value.items()}
    return [named(each) for each in value[:LONGEST]] if isinstance(value, list) else value


def describe(case: dict) -> str:
    """A case in a line. Of requests it says their sizes: nobody reads the tokens."""
    parts = []
    for name, each in case.items():
        if name == "requests":
            parts.append(f"requests (prompt + output tokens): {sizes(each)}")
        elif each is not None and not name.startswith("_"):  # None: no limit
            parts.append(f"{name} = {named(each)}")
    text = ", ".join(parts)
    return text if len(text) < LONGEST else text[:LONGEST] + " ..."


def sizes(requests: list[list]) -> str:
    """[prompt, output tokens, stop ids, arrival] of each: 3 + 6, 10 + 2 at time 7."""
    found = []
    for prompt, most, _, arrival in requests:
        length = prompt if isinstance(prompt, int) else len(prompt)
        found.append(f"{length} + {most}" + (f" at time {arrival:g}" if arrival else ""))
    return ", ".join(found)


def lines(exercise: Exercise, verdict: Verdict) -> list[str]:
    """A verdict as a student reads it."""
    head = exercise.name
    properties = exercise.check.PROPERTIES
    failure = verdict.failure
    count = many(verdict.cases, "case")
    if failure is None:
        names = ", ".join(properties)
        told = [f"{head} {exercise.title}: passed. {count}, {verdict.seconds:.1f} s. Held: {names}"]
        return told + ([f"score: {verdict.score}"] if verdict.score else [])
    if failure.says == UNWRITTEN:
        return [f"{head} {exercise.title}: {UNWRITTEN}"]
    what = failure.says or f"{failure.prop} fails: {properties[failure.prop]}."
    told = [f"{head} {exercise.title}: not yet. {what}"]
    told += ["", "the smallest case found:", f"  {failure.where}"]
    if failure.table:
        columns = zip(*failure.table, strict=True)
        widths = [max(len(str(cell)) for cell in column) for column in columns]
        told.append("")
        for row in failure.table:
            cells = [str(cell).rjust(wide) for cell, wide in zip(row, widths, strict=True)]
            told.append(f"  {'  '.join(cells)}".rstrip())
        told.append("")
    told += [f"  expected  {failure.expected}", f"  got       {failure.got}"]
    if failure.teaches:
        told += ["", failure.teaches]
    return told
