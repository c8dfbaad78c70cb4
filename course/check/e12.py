"""E12: the table of a beam search (segment KV, Sec 3.2), by what each beam reads through it."""

import random

from course import drive
from course.check.frame import Failure, same
from course.reference import solution

PROPERTIES = {
    "X1": "through its row, a beam reads its own history, all steps of it",
    "X2": "rows are copies: two beams of one parent go separate ways",
}


def cases(rng: random.Random) -> list[dict]:
    found = []
    for width, steps in ((1, 2), (2, 2), (2, 3), (3, 4), (4, 9)) * 20:
        found.append([[rng.randrange(width) for _ in range(width)] for _ in range(steps)])
    return [{"width": len(parents[0]), "parents": parents} for parents in found]


def judge(case: dict, answer: list) -> Failure | None:
    truth = drive.e12(solution("e12"), case)
    for step, (wanted, table) in enumerate(zip(truth, answer, strict=True)):
        if same(wanted, table):
            continue
        where = f"{case['width']} beams, parents {case['parents'][1 : step + 1]}, after step {step}"
        rows = [["beam", "its row should be", "got"]]
        rows += [[b, each, table[b]] for b, each in enumerate(wanted)]
        longer = any(len(row) > step + 1 for row in table)
        prop = "X2" if longer else "X1"
        teaches = (
            "Two rows are one list: what one beam appends, the other has, too. Copy the row."
            if longer
            else "A beam takes over its parent's whole row, not its last step alone; then it writes"
            " to its own place."
        )
        return Failure(prop, where, f"the rows {wanted}", str(table), teaches, rows)
    return None
