"""Blocks, tables and shared prefixes: the worked example of docs/paged.md, and random plays."""

from collections import Counter
from dataclasses import replace

import pytest

from batch import Request
from paged import blocks
from scheduler import POLICIES, Scheduler
from tests import oracle
from tests.oracle import DRIVERS, CheckedMemory, check, draw, in_blocks

IN_BLOCKS = ["Loop", "LLM", "Runner"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """All memories of blocks are compared with a set of prefixes. What has happened is counted."""
    count: Counter[str] = Counter()

    class Counted(CheckedMemory):
        def take(self, newcomer: Request) -> int:
            known, hit = len(self.block_of), super().take(newcomer)
            count.update(hits=hit > 0, own=hit > 0 and newcomer.preemptions > 0)
            count.update(evictions=len(self.block_of) < known)
            return hit

    preempt = Scheduler.preempt
    monkeypatch.setattr(blocks, "BlockMemory", Counted)
    monkeypatch.setattr(
        Scheduler, "preempt", lambda *who: count.update(preemptions=1) or preempt(*who)
    )
    return count


def perform(driver: str, policy: str, seeds: range) -> None:
    """Each play twice, in slots and in blocks."""
    family = None if driver == "Loop" else oracle.SERVED
    for seed in seeds:
        play = replace(draw(f"paged {seed}", policy, family), blocks=None)
        for each in (play, in_blocks(play)):
            check(each, DRIVERS[driver](each))


@pytest.mark.parametrize("driver", IN_BLOCKS)
def test_blocks_give_the_tokens_of_slots(driver: str, seen: Counter[str]) -> None:
    for policy in POLICIES:
        perform(driver, policy, range(2))
    least = dict.fromkeys(("hits", "own", "evictions", "preemptions"), 1)
    assert seen >= Counter(least), "else the plays would say little"


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("driver", IN_BLOCKS)
def test_blocks_give_the_tokens_of_slots_in_a_thousand_runs(
    driver: str, policy: str, seen: Counter[str]
) -> None:
    perform(driver, policy, range(100, 121))
    assert seen["hits"]
