"""E9: the words of serving, as timeline.py defines them."""

import random
from itertools import pairwise
from types import SimpleNamespace

from course.check.frame import Failure, same
from course.reference import p99, stalls

PROPERTIES = {
    "T1": "TTFT + the sum of the gaps = the latency; n tokens have n - 1 gaps",
    "T3": "a stall is a gap longer than the bound, and starts at its first token",
    "T2": "the P99 is that of all gaps of all requests together",
}


def draw(rng: random.Random, count: int) -> dict:
    lives = []
    for _ in range(count):
        arrival = rng.randint(0, 40) / 4
        scheduled = arrival + rng.randint(0, 12) / 4
        tokens = [scheduled + rng.randint(1, 12) / 4]
        for _ in range(rng.randint(0, 3 + 8 * count)):
            tokens.append(tokens[-1] + rng.choice((0, 1, 1, 2, 3, 20)) / 4)
        lives.append({"arrival": arrival, "scheduled": scheduled, "tokens": tokens})
    return {"lives": lives, "bound": rng.choice((0.5, 0.75, 2.0))}


def cases(rng: random.Random) -> list[dict]:
    return [draw(rng, count) for count in (1,) * 30 + (2,) * 30 + (5,) * 40]


def judge(case: dict, answer: dict) -> Failure | None:
    for number, life in enumerate(case["lives"]):
        arrival = life["arrival"]
        tokens = life["tokens"]
        first = answer["ttft"][number]
        gaps = answer["tbts"][number]
        where = f"arrival {arrival}, scheduled {life['scheduled']}, tokens at {tokens[:8]}"
        if len(tokens) > 8:
            where += " ..."
        if len(gaps) != len(tokens) - 1:
            return Failure(
                "T1",
                where,
                f"{len(tokens) - 1} gaps",
                f"{len(gaps)}",
                "The time to the first token is no gap: n tokens have n - 1 gaps.",
            )
        latency = tokens[-1] - arrival
        true = [b - a for a, b in pairwise(tokens)]
        if not same(tokens[0] - arrival, first, 1e-9):
            return Failure(
                "T1",
                where,
                f"TTFT {tokens[0] - arrival}, latency {latency}",
                f"TTFT {first}, TTFT + gaps {first + sum(gaps)}",
                "TTFT counts from the arrival: the wait in the queue is part of it.",
            )
        if not same(true, gaps, 1e-9):
            return Failure(
                "T1",
                where,
                f"gaps {true[:8]}",
                f"{gaps[:8]}",
                "A gap is the time between one token and the next, in order.",
            )
        wanted = [list(each) for each in stalls(SimpleNamespace(**life), case["bound"])]
        if not same(wanted, answer["stalls"][number], 1e-9):
            return Failure(
                "T3",
                f"{where}, bound {case['bound']}",
                str(wanted),
                str(answer["stalls"][number])[:90],
                "A stall is (time of the token before the gap, seconds); longer than the bound.",
            )
    wanted = p99([SimpleNamespace(**life) for life in case["lives"]])
    if not same(wanted, answer["p99"], 1e-9):
        return Failure(
            "T2",
            f"requests: {len(case['lives'])}",
            f"P99 {wanted:.4f}",
            f"{answer['p99']:.4f}",
            "Pool the n gaps of all requests, then take the percentile: a mean hides the stall."
            " In order, from 0, it lies at place 0.99 * (n - 1), between its neighbours.",
        )
    return None
