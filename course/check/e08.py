"""E8: the schedules of Sarathi-Serve, with too little memory at the end."""

import random

from course import drive
from course.check.frame import Failure, same
from course.check.rounds import SENTENCES, judge_record, workloads
from course.reference import solution

PROPERTIES = {name: each for name, each in SENTENCES.items() if name != "K4"}
PROPERTIES |= {"P1": "`preempt` takes the request that it is given, and all that it held"}


def direct(rng: random.Random) -> dict:
    """Some iterations, and then `preempt` with an argument."""
    requests = [[rng.randint(1, 9), 9, [], 0.0] for _ in range(4)]
    iterations = rng.choice((0, 3, 4, 5, 6))  # from 3 on at least two run, and none has ended
    which = rng.choice((0, 1)) if iterations else 0
    return {"B": 3, "C": 16, "requests": requests, "iterations": iterations, "preempt": which}


def cases(rng: random.Random) -> list[dict]:
    rounds = workloads(rng, 200) + workloads(rng, 200, memory=True)
    return rounds + [direct(rng) for _ in range(20)]


def judge(case: dict, answer: dict) -> Failure | None:
    if "preempt" not in case:
        return judge_record(case, answer, PROPERTIES)
    wanted = drive.e08(solution("e08"), case)
    wrong = [name for name in wanted if not same(wanted[name], answer[name])]
    if not wrong:
        return None
    where = (
        f"{case['iterations']} iterations, admit(), preempt(running[{case['preempt']}]): {wrong[0]}"
    )
    teaches = "The caller may name the request. Only without an argument it is the newest."
    if not case["iterations"]:
        teaches = "Nothing of it is cached yet: no preemption to count, and no slot to free."
    return Failure("P1", where, str(wanted[wrong[0]]), str(answer[wrong[0]]), teaches)
