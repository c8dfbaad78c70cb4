"""E10: when each stage of a pipeline starts, and its idle time by cause (SARATHI, Sec 3.2, 5.3)."""

import random

from course.check.frame import Failure, same
from course.reference import idle, starts

PROPERTIES = {
    "B2": "an iteration starts when its last tokens are known and the stage is free",
    "B1": "busy + idle = stages x time, each cause in its place",
}


def cases(rng: random.Random) -> list[dict]:
    found = []
    for size in (2,) * 20 + (4,) * 30 + (10,) * 50:
        stages = rng.randint(1, 4)
        count = rng.randint(1, 4)
        # s, and of 1 ms, as on a GPU
        unit = rng.choice((0.25, 0.001))
        late = rng.choice((0, 2))
        seconds = [[rng.randint(1, 8) * unit for _ in range(stages)] for _ in range(size)]
        slower = [[each + rng.randint(0, late) * unit for each in row] for row in seconds]
        given = starts(slower, count)  # for `idle`: perhaps later than the earliest
        found.append({"seconds": seconds, "micro_batches": count, "starts": given})
    return found


def judge(case: dict, answer: dict) -> Failure | None:
    seconds = case["seconds"]
    count = case["micro_batches"]
    given = case["starts"]
    earliest = starts(seconds, count)
    where = f"{len(seconds[0])} stages, {count} micro-batches, seconds {seconds[:4]}"
    for number, (wanted, got) in enumerate(zip(earliest, answer["starts"], strict=True)):
        if same(wanted, got, 1e-9):
            continue
        back = number - count
        known = earliest[back][-1] + seconds[back][-1] if back >= 0 else 0.0
        wanted = [round(each, 6) for each in wanted]  # s
        got = [round(each, 6) for each in got]
        teaches = "A stage runs one iteration at a time, and after the stage before it."
        if sum(got) > sum(wanted):
            teaches = "It could start earlier: it waits for its stage and its tokens, and no more."
        elif got[0] < known - 1e-9:
            teaches = (
                f"Iteration {number} needs the tokens of iteration {back}: they are known at"
                f" {known}, when the last stage ends."
            )
        return Failure("B2", where, f"iteration {number} starts at {wanted}", str(got), teaches)
    wanted = idle(seconds, given)
    got = answer["idle"]
    busy = sum(map(sum, seconds))
    end = given[-1][-1] + seconds[-1][-1]
    table = [["seconds", "expected", "got"]]
    table += [[name, round(wanted[name], 4), round(got[name], 4)] for name in wanted]
    if not same(wanted, {name: got[name] for name in wanted}, 1e-9):
        whole = f"{len(seconds[0])} x {end:g} = {busy:g} busy + {sum(wanted.values()):g} idle"
        return Failure(
            "B1",
            where,
            whole,
            f"{busy:g} + {sum(got.values()):g}",
            "Before its first work a stage has start-up, after its last one drain: neither is a"
            " bubble.",
            table,
        )
    return None
