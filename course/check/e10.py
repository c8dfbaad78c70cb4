"""E10: when each stage of a pipeline starts, and its idle time by cause (SARATHI, Sec 3.2, 5.3)."""

import random

from course.check.frame import Failure
from course.reference import idle, starts

PROPERTIES = {
    "B2": "an iteration starts when its last tokens are known and the stage is free",
    "B1": "busy + idle = stages x time, each cause in its place",
}


def cases(rng: random.Random) -> list[dict]:
    found = []
    for size in (2,) * 20 + (4,) * 30 + (10,) * 50:
        stages, count = rng.randint(1, 4), rng.randint(1, 4)
        seconds = [[rng.randint(1, 8) / 4 for _ in range(stages)] for _ in range(size)]
        truth = starts(seconds, count)
        found.append({"seconds": seconds, "micro_batches": count, "starts": truth})
    return found


def judge(case: dict, answer: dict) -> Failure | None:
    seconds, count, truth = case["seconds"], case["micro_batches"], case["starts"]
    where = f"{len(seconds[0])} stages, {count} micro-batches, seconds {seconds[:4]}"
    for number, (wanted, got) in enumerate(zip(truth, answer["starts"], strict=True)):
        if wanted == got:
            continue
        back = number - count
        teaches = "A stage runs one iteration at a time, and after the stage before it."
        if back >= 0 and got[0] < truth[back][-1] + seconds[back][-1]:
            known = truth[back][-1] + seconds[back][-1]
            teaches = (
                f"Iteration {number} needs the tokens of iteration {back}: they are known at"
                f" {known}, when the last stage ends."
            )
        return Failure("B2", where, f"iteration {number} starts at {wanted}", str(got), teaches)
    wanted, got = idle(seconds, truth), answer["idle"]
    busy = sum(map(sum, seconds))
    end = truth[-1][-1] + seconds[-1][-1]
    table = [["seconds", "expected", "got"]]
    table += [[name, round(wanted[name], 4), round(got[name], 4)] for name in wanted]
    if any(abs(wanted[name] - got[name]) > 1e-9 for name in wanted):
        whole = f"{len(seconds[0])} x {end} = {busy} busy + {sum(wanted.values())} idle"
        return Failure(
            "B1", where, whole, f"{busy} + {sum(got.values())}",
            "Before its first work a stage has start-up, after its last one drain: neither is a"
            " bubble.", table,
        )  # fmt: skip
    return None
