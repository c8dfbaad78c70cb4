"""Blocks, tables and shared prefixes: random plays, and rules by hand.

test_fill.py runs the worked example of docs/paged.md.
"""

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch
from shared import PlainLLM
from torch import Tensor

from attention import PLAIN, FlatBatch, Span
from batch import Chunk, Request
from command.checks import UserError
from configs import MODELS
from executor import ModelExecutor
from kvcache import KVCache
from more.apart.simulate import simulate_fleet
from more.fast import native
from more.paged import blocks
from more.paged.blocks import BlockMemory
from more.paged.cache import PagedCache
from more.paged.prompts import Parts, continuations, fresh, shared, turns
from more.policies import compared
from more.simulate import simulate
from nano_sarathi import LLM
from sampling import SamplingParams
from scheduler import SarathiServe, Scheduler, make_scheduler, next_chunk
from tests.oracle import check_blocks, perform


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What happens to memories of blocks is counted."""
    count: Counter[str] = Counter()

    class Counted(BlockMemory):
        def take(self, newcomer: Request) -> None:
            known = len(self.block_of)
            super().take(newcomer)
            hit = newcomer.prefilled
            count.update(hits=hit > 0, own=hit > 0 and newcomer.preemptions > 0)
            count.update(evictions=len(self.block_of) < known)

    preempt = Scheduler.preempt
    monkeypatch.setattr(blocks, "BlockMemory", Counted)
    monkeypatch.setattr(
        Scheduler, "preempt", lambda *who: count.update(preemptions=1) or preempt(*who)
    )
    return count


@pytest.mark.parametrize("driver", ["Loop", "LLM", "Runner"])
def test_blocks_give_the_tokens_of_slots(driver: str, seen: Counter[str]) -> None:
    for policy, seed in product(compared(), range(2 if driver == "Loop" else 1)):
        perform(driver, f"paged {seed}", policy, paged=True)
    least = dict.fromkeys(("hits", "own", "evictions", "preemptions"), 1)
    assert seen >= Counter(least), "else the plays would say little"


@pytest.mark.parametrize("cut", [None, 7])  # where a row of blocks is torn; None: all shuffled
@pytest.mark.parametrize("size", [1, 3, 8, 64])
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
    contexts = (1, 77, 200, 130, 64)
    rows = (1, 1, 50, 130, 1)
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


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """(request, start, length) of the chunks that have run."""
    batch = scheduler.schedule(0.0)
    scheduler.update(batch, [0] * len(batch.sampled))
    return [(chunk.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks]


def paged(policy: str, size: int, chunk: int, tokens: int | None, block: int) -> Scheduler:
    scheduler = make_scheduler(policy, size, chunk, tokens)
    scheduler.memory = BlockMemory(tokens, block, prefix_caching=True)
    return scheduler


# Five blocks of four tokens. Request 0 has a prompt of `prompt` tokens, and has run `steps` steps;
# `left` tokens are idle. A newcomer has `new` tokens, whose first `same` are idle, or those of
# request 0. Blocks: held + the newcomer's + the next token of request 0 + that of the newcomer.
@pytest.mark.parametrize(
    ("prompt", "steps", "left", "new", "same", "fits"),
    [
        (6, 1, 0, 8, 0, True),  # 2 + 2 + 0 + 1
        (6, 1, 0, 9, 0, True),  # 2 + 3 + 0 + 0
        (6, 1, 0, 12, 0, False),  # 2 + 3 + 0 + 1
        (6, 3, 0, 7, 0, True),  # 2 + 2 + 1 + 0: two decodes have filled its second block
        (6, 3, 0, 8, 0, False),  # 2 + 2 + 1 + 1
        (11, 0, 0, 4, 0, True),  # 3 + 1 + 0 + 1: 4 of its 11 tokens have run, and all have room
        (12, 0, 0, 4, 0, False),  # 3 + 1 + 1 + 1
        (8, 1, 0, 12, 8, True),  # 2 + 1 + 1 + 1: two blocks are a hit
        (8, 1, 0, 16, 8, False),  # 2 + 2 + 1 + 1
        (8, 1, 0, 8, 8, True),  # 2 + 1 + 1 + 1: its last token must run
        (8, 1, 0, 11, 7, True),  # 2 + 2 + 1 + 0: one block is a hit
        (8, 1, 0, 12, 7, False),  # 2 + 2 + 1 + 1
        (6, 1, 8, 9, 8, True),  # 2 + 3 + 0 + 0: a hit, but nobody holds it now
        (6, 1, 8, 12, 8, False),  # 2 + 3 + 0 + 1
    ],
)
def test_who_is_admitted_to_blocks(
    prompt: int, steps: int, left: int, new: int, same: int, fits: bool
) -> None:
    scheduler = paged("sarathi_serve", 9, 64 if steps else 4, 22, 4)
    first = range(100, 100 + prompt)
    if left:
        scheduler.add(Request(7, range(left), max_tokens=1))
        step(scheduler)
    scheduler.add(Request(0, first, max_tokens=9))
    for _ in range(max(1, steps)):
        step(scheduler)
    begin = (range(left) if left else first)[:same]
    scheduler.add(Request(1, Parts([begin, range(500, 500 + new - same)]), max_tokens=1))
    assert scheduler.can_admit() is fits
    assert scheduler.memory.capacity == 20, "the rest of a block is no room"


@pytest.mark.parametrize("policy", [*compared(), "vllm_v0:4096"])
def test_who_comes_together_shares(policy: str) -> None:
    """The first request computes what is shared, and the others nothing of it: in one batch."""
    requests = [Request(i, shared(640, 512, i), 2) for i in range(16)]
    options = {"policy": policy, "chunk_size": 2048, "max_batch_size": 16, "cache": "paged"}
    trace = simulate(requests, prefix_caching=True, **options)
    rows = [length for each in trace.iterations for _, _, length, _ in each.chunks]
    assert sum(rows) == 512 + 16 * 128
    if policy not in ("sarathi", "dynamic"):  # 640 + 11 * 128 = 2,048
        whole = policy in ("request_level", "orca", "vllm_v0", "vllm_v0:4096")
        assert trace.iterations[0].num_chunks == (16 if whole else 12)


class Drops(SarathiServe):
    """It makes chunks of a batch, and leaves the first or the last one out of the first batch."""

    which: int | None = None

    def prefills(self, decode_rows: int) -> list[Chunk]:
        chunks = super().prefills(decode_rows)
        if self.which is not None:
            chunks.pop(self.which)
            self.which = None
        return chunks


def test_a_chunk_that_is_left_out_is_no_hit() -> None:
    one = range(11)
    other = range(2**62, 2**62 + 11)
    requests = [Request(i, own, max_tokens=2) for i, own in enumerate((one, other, one, other))]
    scheduler = Drops(4, 64)
    scheduler.memory = memory = BlockMemory(80, 4, prefix_caching=True)
    for request in requests[:3]:
        scheduler.add(request)
    scheduler.which = 1
    assert step(scheduler) == [(0, 0, 11), (2, 8, 3)]
    assert sorted(memory.block_of.values()) == [0, 1]
    assert memory.prefill(requests[3]) == (12, 0), "nobody can find what request 1 lacks"
    scheduler.add(requests[3])
    assert step(scheduler) == [(1, 0, 11), (3, 8, 3)]


def test_what_is_no_hit_yet() -> None:
    """What a policy asks on trial (examples/target_tbt.py); who is preempted before it ran."""
    scheduler = paged("sarathi_serve", 4, 64, 80, 4)
    late = Request(1, range(11), max_tokens=2)
    early = Request(0, range(11), max_tokens=2)
    next_chunk(early, 64)
    scheduler.add(early)
    assert scheduler.admit() is early and scheduler.memory.prefill(late) == (12, 0)
    scheduler.schedule(0.0)
    assert scheduler.memory.prefill(late) == (4, 8)
    scheduler.preempt()
    assert scheduler.memory.prefill(late) == (12, 0) and len(scheduler.memory.free) == 3
    scheduler.add(late)
    scheduler.schedule(0.0)
    scheduler.preempt()  # late, which has shared it
    scheduler.preempt()
    assert step(scheduler) == [(0, 0, 11), (1, 8, 3)]


def test_the_last_block_is_evicted_first() -> None:
    """Of four: a prefix is of use without what follows it. What has just ended is found, too."""
    scheduler = paged("sarathi_serve", 1, 64, 16, 4)
    one = range(9)
    other = range(100, 105)
    for own, prompt in enumerate((one, other, range(200, 208))):
        scheduler.add(Request(own, prompt, max_tokens=1))
        step(scheduler)
    assert [scheduler.memory.prefill(Request(9, each, 1))[1] for each in (one, other)] == [4, 4]


def test_a_chunk_that_is_left_out_is_missed() -> None:
    scheduler = Drops(4, 64)
    scheduler.memory = memory = BlockMemory(80, 4, prefix_caching=True)
    for i in range(2):
        scheduler.add(Request(i, range(11), max_tokens=2))
    scheduler.which = 0
    with pytest.raises(UserError, match="made a chunk of request 0 .* less of it is in the batch"):
        step(scheduler)
    memory.reset()
    assert not memory.block_of and memory.free == [0, 1, 2, 3] and not memory.taken


@pytest.mark.parametrize(
    ("running", "capacity", "new", "fits"),  # (prompt, output); blocks of 8
    [
        ([(8, 2), (8, 2)], 32, (5, 4), False),  # 16 are taken, 16 to come, and 8
        ([(8, 2), (8, 2)], 40, (5, 4), True),
        ([(5, 4)], 16, (5, 4), True),  # 8 are taken, and the rest of them is enough
        ([(5, 4)], 23, (5, 5), False),
    ],
)
def test_no_evict_counts_whole_blocks(
    running: list[tuple[int, int]], capacity: int, new: tuple[int, int], fits: bool
) -> None:
    scheduler = paged("no_evict", 9, 64, capacity, 8)
    for i, (prompt, output) in enumerate(running):
        scheduler.add(Request(i, range(100 * i, 100 * i + prompt), output))
    step(scheduler)
    scheduler.add(Request(9, range(900, 900 + new[0]), new[1]))
    assert scheduler.can_admit() is fits


def test_parts_are_a_sequence() -> None:
    parts = Parts([range(3), range(0), range(10, 14), range(7, 9)])
    plain = [0, 1, 2, 10, 11, 12, 13, 7, 8]
    ends = [None, *range(-11, 12)]
    assert list(parts) == plain and [parts[i] for i in range(-9, 9)] == plain * 2
    for start, stop, by in product(ends, ends, (None, 2, -7)):
        assert parts[start:stop:by] == plain[start:stop:by], (start, stop, by)


PROMPTS = [[5, 1, 7, 2, 8, 8, 3, 4, 9, own] for own in (6, 3, 4)]


@pytest.fixture
def llm(small: str) -> LLM:
    """Blocks for two requests, at most."""
    return PlainLLM(
        small,
        cache="paged",
        block_size=4,
        prefix_caching=True,
        cache_tokens=64,
        dtype="float64",
        device="cpu",
        policy="sarathi_serve",
        max_batch_size=4,
    )


@pytest.mark.parametrize("good", [0, 2])
def test_a_batch_that_fails_has_filled_nothing(
    llm: LLM, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `good` batches, a forward fails in its last layer. Then all is as if it had not run."""
    params = SamplingParams(max_tokens=8)
    left = [good]
    forward = ModelExecutor.forward
    plain = PlainLLM("small", dtype="float64", device="cpu")
    expected = [each.token_ids for each in plain.generate(PROMPTS, params)]

    def fails(self: ModelExecutor, *batch: object) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no power")
        return forward(self, *batch)

    memory = llm.cache.memory
    llm.chunk_size = 16
    llm.cache.k[:] = llm.cache.v[:] = float("nan")  # whoever reads what is not computed shows it
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no power"):
        patch.setattr(ModelExecutor, "forward", fails)
        llm.generate(PROMPTS, params)
    hits = memory.hits
    llm.cache.reset()
    check_blocks(None, memory, [])
    assert [each.token_ids for each in llm.generate(PROMPTS, params)] == expected
    assert memory.hits - hits == (24 if good else 16), "of a failed batch, nothing is a hit"
    check_blocks(None, memory, [])
    assert len(memory.references) <= memory.most == 16 and not memory.unsure


CHAT = {"model": "llama3.1-8b", "gpu": "a100-80gb", "software": "vllm", "policy": "sarathi_serve"}
CHAT |= {"chunk_size": 2048, "max_batch_size": 8, "cache": "paged", "prefix_caching": True}


@pytest.mark.parametrize("length", [320, 327, 7])
def test_the_next_turn_of_a_chat_hits_the_answer(length: int) -> None:
    """But for its last token, which nothing was computed of, and what does not fill a block."""
    first = list(range(length))
    second = first + [9] * 160 + list(range(5000, 5160))
    other = first + [8] * 160 + list(range(6000, 6160))
    asked = [(0.0, first, 160), (1e3, second, 16), (2e3, other, 16), (3e3, [1, 2], 4)]

    def made() -> list[Request]:
        return [Request(i, prompt, n, arrival=at) for i, (at, prompt, n) in enumerate(asked)]

    assert continuations(made()) == {0: second}, "of two next turns, the first to arrive"
    run = simulate(made(), cache_tokens=10**5, **CHAT)
    cached = [run.lives[i].cached for i in range(4)]
    assert cached == [0, (length + 159) // 16 * 16, length // 16 * 16, 0]
    fleet = simulate_fleet(made(), layout="2", router="by_prefix", cache_tokens=10**5, **CHAT)
    assert [fleet.requests.lives[i].cached for i in range(4)] == cached


def test_what_is_no_next_turn() -> None:
    """A prompt with no room for the answer, another beginning, and one that came before."""
    whole = list(range(100))
    for prompt, at in ((whole + [1] * 9, 1.0), ([7, *whole] + [1] * 50, 1.0), (whole * 2, -1.0)):
        later = Request(1, prompt, 5, arrival=1.0 + at)
        assert continuations([Request(0, whole, 10, arrival=1.0), later]) == {}


def test_turns_of_chats() -> None:
    """A turn that is longer than all before it begins with it. One that was cut is new."""
    one, other, two, cut = turns([("a", 10, 5), ("b", 10, 5), ("a", 20, 5), ("a", 25, 5)])
    assert [*map(len, (one, other, two, cut))] == [10, 10, 20, 25]
    assert two[:10] == one[:] and not {*two} & {*other} and not {*cut} & {*two}
    assert not {*fresh(3)} & {*fresh(3)}
