"""The course checks itself: right answers pass; stubs and planted mistakes fail."""

import inspect
import operator
import os
import time
from functools import partial

from course.check.frame import examine, lines
from course.exercises import EXERCISES, STUBS, UNWRITTEN, Exercise, load
from course.local import asker
from course.plants import plants, right, unwritten
from course.reference import solution
from experiments.lib.common import run_jobs


def stub_source(exercise: Exercise) -> str:
    return (STUBS / f"{exercise.file}.py").read_text("utf-8")


def signatures(exercise: Exercise) -> list[str]:
    """Where the stub's functions and the reference's differ in their parameters.

    A stub may leave out parameters that have defaults.
    """
    stub, truth, wrong = load(stub_source(exercise), "stub.py"), solution(exercise.file), []
    for name in unwritten(stub_source(exercise)):
        find = operator.attrgetter(name)
        mine, theirs = (inspect.signature(find(each)).parameters for each in (stub, truth))
        optional = {key for key, each in theirs.items() if each.default is not each.empty}
        needed = [key for key in theirs if key in mine or key not in optional]
        if list(mine) != needed:
            wrong.append(f"{exercise.file}: {name}{tuple(mine)} where the reference has {needed}")
    return wrong


def examined(key: str, seed: int) -> tuple[str, list[str]]:
    """A line on an exercise, and what is wrong."""
    exercise, wrong, start = EXERCISES[key], [], time.perf_counter()
    filled = load(right(exercise.file), f"{exercise.file}.py")
    for name, module in (("reference", solution(exercise.file)), ("filled stub", filled)):
        verdict = examine(exercise, asker(exercise, module), seed)
        if verdict.failure:
            wrong += [f"{exercise.file}: the {name} fails", *lines(exercise, verdict)]
    took = time.perf_counter() - start
    stub = load(stub_source(exercise), f"{exercise.file}.py")
    failure = examine(exercise, asker(exercise, stub), seed).failure
    if failure is None or failure.says != UNWRITTEN:
        wrong.append(f"{exercise.file}: the stub does not fail as a stub")
    wrong += signatures(exercise)
    own = [plant for plant in plants() if plant.exercise == key]
    for plant in own:
        verdict = examine(exercise, asker(exercise, plant.load()), seed)
        said = "\n".join(lines(exercise, verdict))
        found = verdict.failure.prop if verdict.failure else "nothing"
        if found != plant.caught_by or plant.message not in said:
            wrong.append(f"{plant.name}: {plant.caught_by} should catch it; told: {said}")
    done = f"{exercise.file:6} right answers pass in {took:.1f} s, {len(own)} mistakes caught"
    return done, wrong


def selftest(seed: int = 0) -> list[str]:
    """What is wrong, a line each. Prints one line for each exercise."""
    processes = min(os.cpu_count() or 1, len(EXERCISES))
    found = run_jobs(partial(examined, seed=seed), list(EXERCISES), processes, "exercises")
    print(*(done for done, _ in found.values()), sep="\n")
    return [each for _, wrong in found.values() for each in wrong]
