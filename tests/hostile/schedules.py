"""Random plays of tests/oracle.py, by every driver: thousands of them, where the tests have dozens.

Requests come late, leave at any moment, and find little memory. Every token must be right, and in
the end nothing may be taken: no slot, no memory, no lane.
"""

import random
import sys
from functools import partial

from tests.conftest import TINY
from tests.hostile.sandbox import Case
from tests.oracle import DRIVERS, known, perform, random_policy

BLOCK = 25  # plays of a case
PLAYS = 3000
TURNS = ("Loop", "MicroBatches", "Loop", "LLM", "Runner")


def run_block(seed: int, first: int) -> None:
    """BLOCK plays, each from a seed of its own."""
    for number in range(first, first + BLOCK):
        driver, rng = TURNS[number % len(TURNS)], random.Random(f"policy {seed} {number}")
        policy = random_policy(rng)
        if driver == "MicroBatches" and rng.random() < 0.4:
            policy = rng.choice(("td_pipe", "td_pipe:constant=3"))
        try:
            perform(driver, f"{seed} {number}", policy)
        except AssertionError as error:
            print(f"wrong tokens: play {number} by {driver}: {error}", file=sys.stderr)
        except Exception:
            print(f"in play {number} by {driver}", file=sys.stderr)
            raise


def make_cases(seed: int, quick: bool) -> list[Case]:
    assert set(TURNS) == set(DRIVERS)
    for family in TINY:
        known(family)  # here, once, and not in each process
    cases = []
    for first in range(0, 300 if quick else PLAYS, BLOCK):
        name = f"plays {first} to {first + BLOCK - 1} of seed {seed}"
        cases.append(Case(name, name, partial(run_block, seed, first), limit=120.0, weighs=BLOCK))
    return cases
