"""E8: the schedules of Sarathi-Serve, with too little memory at the end."""

import random

from course.check.frame import Failure
from course.check.rounds import SENTENCES, judge_record, workloads

PROPERTIES = {name: each for name, each in SENTENCES.items() if name != "K4"}


def cases(rng: random.Random) -> list[dict]:
    return workloads(rng, 200) + workloads(rng, 200, memory=True)


def judge(case: dict, answer: dict) -> Failure | None:
    return judge_record(case, answer, PROPERTIES)
