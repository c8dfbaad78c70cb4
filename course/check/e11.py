"""E11: the window of work stealing (TD-Pipe, Sec 3.4)."""

import random

from course.check.frame import Failure, same
from course.reference import share_out

PROPERTIES = {
    "W1": "nobody is lost, and nobody is in two places",
    "W2": "a micro-batch takes at most the average, rounded up, and at most B",
    "W3": "it takes as many as it may, while some are there",
    "W4": "its own requests first, then those that were withheld first",
}


def cases(rng: random.Random) -> list[dict]:
    found = []
    for largest in (2,) * 30 + (5,) * 50 + (12,) * 80:
        own = rng.randint(0, largest)
        withheld = rng.randint(0, largest)
        names = rng.sample(range(100), own + withheld)
        groups = rng.randint(1, 5)
        total = own + withheld + rng.randint(0, groups * largest)
        found.append(
            {
                "own": names[:own],
                "withheld": names[own:],
                "total": total,
                "groups": groups,
                "most": rng.choice((1, 3, 8, 99)),
            }
        )
    return found


def judge(case: dict, answer: list) -> Failure | None:
    takes, withholds = answer
    own, withheld, total, groups = (case[name] for name in ("own", "withheld", "total", "groups"))
    wanted = share_out(own, withheld, total, groups, case["most"])
    size = min(case["most"], -(-total // groups))
    where = f"own {own}, withheld {withheld}, total {total}, groups {groups}, B {case['most']}"
    prop = ""
    teaches = ""
    if sorted([*takes, *withholds]) != sorted(own + withheld):
        prop = "W1"
        teaches = "Who does not come along is withheld, for the next micro-batch: nobody vanishes."
    elif len(takes) > size:
        prop = "W2"
        teaches = (
            f"The average of {total} requests over {groups} micro-batches, rounded up, and not"
            " above B. Who has more gives some away."
        )
    elif len(takes) < len(wanted[0]):
        prop = "W3"
        teaches = "Round up: else some are withheld for ever. Take from the withheld what is free."
    elif not same(wanted, answer):
        prop = "W4"
        teaches = (
            "The withheld wait in a queue: the first comes along first; your surplus goes last."
        )
    if not prop:
        return None
    return Failure(
        prop,
        where,
        f"takes {wanted[0]}, withholds {wanted[1]}",
        f"takes {takes}, withholds {withholds}",
        teaches,
    )
