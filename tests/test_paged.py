"""Blocks, tables and shared prefixes: the worked example of docs/paged.md, and random plays."""

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from attention import PLAIN, FlatBatch, Span
from batch import Request
from command.checks import UserError
from configs import MODELS
from fast import native
from kvcache import KVCache
from paged import blocks
from paged.blocks import BlockMemory
from paged.cache import PagedCache
from scheduler import POLICIES, Scheduler, make_scheduler
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


@pytest.mark.parametrize(
    "cut", [None, 3, 7]
)  # where a row of blocks in order is torn; None: all are shuffled
@pytest.mark.parametrize("size", [1, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_attention_reads_through_the_table(
    size: int, dtype: torch.dtype, cut: int | None
) -> None:
    """Chunks and decodes over blocks that lie anywhere, against slots. The rest is NaN."""
    config = replace(MODELS["demo"], n_layer=1, hidden=128, n_head=4, n_kv_head=2)
    try:
        native.check(torch.device("cpu"), dtype, config.head_dim, 2)
    except UserError:
        pytest.skip("needs a compiler")
    rng = random.Random(f"{size} {dtype}")
    contexts, rows = (1, 77, 200, 130, 64), (1, 1, 50, 130, 1)
    slots = KVCache(config, len(rows), 200, dtype)
    memory = BlockMemory(1400, size)
    paged = PagedCache(config, len(rows), 200, dtype, memory=memory)
    count = paged.table.numel()
    order = rng.sample(range(memory.most), count)
    if cut:
        order = [*range(count - cut, count), *range(count - cut)]
    paged.table.copy_(torch.tensor(order).view_as(paged.table))
    for each in (slots.k, slots.v, paged.k, paged.v):
        each.fill_(float("nan"))
    old = [context - count for context, count in zip(contexts, rows, strict=True)]
    owners = torch.tensor([slot for slot, count in enumerate(old) for _ in range(count)])
    places = torch.tensor([place for count in old for place in range(count)])
    k, v = torch.randn(2, len(owners), 2, config.head_dim).to(dtype)
    for cache in (slots, paged):
        cache.write(0, owners, places, k, v)
    ends = [*accumulate(rows, initial=0)]
    spans = [Span(slice(*ends[i : i + 2]), (i,), (context,)) for i, context in enumerate(contexts)]
    own = torch.tensor([slot for slot, count in enumerate(rows) for _ in range(count)])
    at = torch.tensor([p for a, b in zip(old, contexts, strict=True) for p in range(a, b)])
    batch = FlatBatch(own, own, at, spans, own[:1])
    qkv = torch.randn(len(own), 8, config.head_dim).to(dtype)
    wanted, found = (native.attention(batch, cache)(0, qkv) for cache in (slots, paged))
    plain = PLAIN["sdpa"](batch, paged)(0, qkv)  # writes and gathers
    assert found.isfinite().all() and plain.isfinite().all()
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(plain, wanted, **near)
    if dtype == torch.float32 or size % 2 == 0:  # else bfloat16 adds other pairs of products
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, **near)


def test_a_block_table_by_hand() -> None:
    """The example of docs/paged.md, step by step."""
    memory = BlockMemory(20, block_size=4, prefix_caching=True)
    scheduler = make_scheduler("sarathi_serve", 4, 64)
    scheduler.memory = memory
    a = Request(0, [5, 1, 7, 2, 8, 8, 3, 4, 9, 6], max_tokens=3)
    b = Request(1, [5, 1, 7, 2, 8, 8, 3, 4, 1, 1, 1], max_tokens=2)

    def step() -> list[tuple[int, int, int]]:
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, [0] * len(batch.sampled))
        return [(chunk.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks]

    scheduler.add(a)
    assert step() == [(0, 0, 10)]
    assert memory.tables[a].blocks == [0, 1, 2] and memory.taken == 12
    scheduler.add(b)
    assert step() == [(1, 8, 3)], "two blocks are a hit: 8 tokens do not run again"
    assert memory.tables[a].blocks == [0, 1, 2] and memory.tables[b].blocks == [0, 1, 3]
    assert memory.references == [2, 2, 1, 1] and memory.taken == 16
    assert step() == [] and not scheduler.has_work  # a decode of each, and both have ended
    assert memory.taken == 0 and memory.references == [0, 0, 0, 0]
    assert list(memory.idle) == [2, 3, 1, 0] and memory.free == []
    assert (memory.hits, memory.asked) == (8, 21)
    other = Request(2, range(50, 70), max_tokens=1)  # it needs five blocks: all are evicted
    scheduler.add(other)
    assert step() == [(2, 0, 20)] and len(memory.references) == 5
    again = Request(3, list(b.prompt), max_tokens=1)
    scheduler.add(again)
    assert step() == [(3, 0, 11)], "nothing is left of them"
