"""E6: the schedules of SARATHI (Sec 4.2 to 4.4)."""

import random

from course.check.frame import Failure
from course.check.rounds import SENTENCES, judge_record, workloads

PROPERTIES = {name: each for name, each in SENTENCES.items() if name != "K9"}


def cases(rng: random.Random) -> list[dict]:
    return workloads(rng, 200) + workloads(rng, 150, memory=True)


def judge(case: dict, answer: dict) -> Failure | None:
    return judge_record(case, answer, PROPERTIES)
