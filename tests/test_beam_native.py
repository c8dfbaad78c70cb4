"""more/beam/native.py beside what it stands for: `two_segments`, written out in torch."""

import pytest
import torch
from shared import assert_within, attention_bound
from torch import Tensor

from attention import reference, split_heads
from configs import ModelConfig
from kvcache import KVCache
from more.beam import native as beam_native
from more.beam.attention import plain
from more.beam.memory import BeamSpan, SegmentMemory, StandardMemory
from more.fast import native

DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")
pytestmark = [
    pytest.mark.skipif(not native.compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]


class Case:
    """Searches that are on their way, on the last of two layers, and rows that are to attend.

    What nobody may read is NaN: behind each prompt in its slot, in the slots between, and behind
    the steps of each segment. The new step is NaN, too, until attention has written it.
    """

    def __init__(
        self,
        searches: list[tuple[int, int, int]],  # (beam width, prompt, steps) of each
        dtype: torch.dtype,
        n_kv_head: int = 2,
        groups: int = 1,
        head_dim: int = 32,
        seed: int = 0,
    ):
        torch.manual_seed(seed)
        n_head = n_kv_head * groups
        sizes = 2, n_head, n_head * head_dim, 64, 64, 4096
        config = ModelConfig("case", *sizes, n_kv_head=n_kv_head, head_dim=head_dim)
        longest = max(prompt for _, prompt, _ in searches)
        self.cache = KVCache(config, 2 * len(searches) + 1, longest + 3, dtype)
        self.cache.k.fill_(NAN), self.cache.v.fill_(NAN)
        self.memories: list[SegmentMemory] = []
        for i, (width, prompt, steps) in enumerate(searches):
            slot = 2 * i + 1
            for part in (self.cache.k, self.cache.v):
                part[:, :, slot, :prompt].normal_()
            self.memories.append(SegmentMemory(self.cache, slot, prompt, width))
            fill(self.memories[-1], steps)
        self.spans = spans_of(self.memories)
        rows = sum(memory.beam_width for memory in self.memories)
        self.qkv = torch.randn(rows, n_head + 2 * n_kv_head, head_dim).to(dtype)

    def new(self, which: int) -> tuple[Tensor, Tensor]:
        """The K and V that search number `which` is about to write, (BW, n_kv_head, head_dim)."""
        first = sum(memory.beam_width for memory in self.memories[:which])
        rows = self.qkv[first : first + self.memories[which].beam_width]
        return split_heads(rows, self.cache.k.shape[1])[1:]

    def exact(self, sizes: bool = False) -> Tensor:
        """What `two_segments` makes of it in float64: it writes K and V where they belong, too.

        sizes: of the values' absolute values.
        """
        cache = KVCache.__new__(KVCache)
        cache.k, cache.v = self.cache.k.double(), self.cache.v.double()
        cache.layers = list(zip(cache.k, cache.v, strict=True))
        memories = []
        for memory in self.memories:
            copy = SegmentMemory(cache, memory.slot, memory.prompt, memory.beam_width)
            copy.steps = memory.steps
            copy.table = memory.table
            copy.keys, copy.values = memory.keys.double(), memory.values.double()
            memories.append(copy)
        qkv = self.qkv.double()
        if sizes:
            values = [cache.v, split_heads(qkv, cache.k.shape[1])[2]]
            for part in (*values, *(memory.values for memory in memories)):
                part.abs_()
        return plain(reference)(spans_of(memories), cache)(1, qkv)

    def check(self, found: Tensor) -> None:
        """That attention found what it should, to rounding."""
        kv = self.cache.k.shape[1]
        q, k, _ = split_heads(self.qkv, kv)
        seen = [k, self.cache.k[1].transpose(0, 1), *(memory.keys[1] for memory in self.memories)]
        longest = max(part.double().norm(dim=-1).nan_to_num(0).max() for part in seen)
        exact, sizes = (self.exact(sizes).view(q.shape) for sizes in (False, True))
        most = max(memory.prompt + memory.steps for memory in self.memories)
        rounding = attention_bound(q, longest, exact, sizes, most)
        assert_within(found.view(q.shape), exact, rounding)


def fill(memory: SegmentMemory, steps: int) -> None:
    """Random keys and values of all steps but the last, and a random table of all of them."""
    for step in range(steps):
        if step:
            memory.reorder(torch.randint(memory.beam_width, (memory.beam_width,)).tolist())
        memory.extend()
    for part in (memory.keys, memory.values):
        part.fill_(NAN)
        part[:, : steps - 1].normal_()


def spans_of(memories: list) -> list[BeamSpan]:
    spans = []
    first = 0
    for memory in memories:
        rows = slice(first, first + memory.beam_width)
        first = rows.stop
        context = memory.prompt + memory.steps
        spans.append(BeamSpan(rows, (0,), (context,), memory))
    return spans


def attend(spans: list[BeamSpan], case: Case) -> Tensor:
    return beam_native.attention(spans, case.cache)(1, case.qkv)


def integer(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_equals_two_segments(head_dim: int, groups: int, dtype: torch.dtype) -> None:
    """Several searches in one call, of all widths and lengths."""
    for seed in range(4):
        torch.manual_seed(100 + seed)
        searches = [(integer(1, 8), integer(1, 200), integer(1, 40)) for _ in range(integer(1, 4))]
        case = Case(searches, dtype, integer(1, 3), groups, head_dim, seed)
        case.check(attend(case.spans, case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        ([(13, 70, 20)], 1, 3, 96),  # no width, group or head_dim is a power of 2
        ([(13, 64, 16), (1, 1, 1)], 2, 5, 160),
        ([(64, 65, 17)], 1, 1, 32),
        ([(3, 129, 130)], 1, 1, 64),  # more than two blocks of response
        ([(2, 40, 3)], 1, 64, 256),  # the most groups
        ([(64, 33, 2)], 1, 64, 32),  # 4,096 rows
    ],
)
def test_unusual_sizes(sizes: tuple, dtype: torch.dtype) -> None:
    searches, n_kv_head, groups, head_dim = sizes
    case = Case(searches, dtype, n_kv_head, groups, head_dim)
    case.check(attend(case.spans, case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_scores(dtype: torch.dtype) -> None:
    """The greatest score may be anywhere: each later one must shrink what is summed so far."""
    for position in (0, 63, 64, 199, 200, 210, 231):  # of prompt 200 and 31 older steps
        case = Case([(4, 200, 32)], dtype)
        memory = case.memories[0]
        if position < 200:
            case.cache.k[:, :, memory.slot, position] *= 300
        else:
            memory.keys[:, position - 200] *= 300
        case.check(attend(case.spans, case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_what_is_new_and_nothing_else(dtype: torch.dtype) -> None:
    case = Case([(4, 50, 16), (3, 7, 1), (5, 20, 17)], dtype, groups=2)
    before = [part.clone() for part in (case.cache.k, case.cache.v)]
    segments = [(memory.keys.clone(), memory.values.clone()) for memory in case.memories]
    tables = [memory.table.clone() for memory in case.memories]
    qkv = case.qkv.clone()
    attend(case.spans, case)

    def same(found: Tensor, expected: Tensor) -> bool:
        return torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))

    assert torch.equal(case.qkv, qkv)
    assert same(case.cache.k, before[0]) and same(case.cache.v, before[1])
    for i, memory in enumerate(case.memories):
        assert torch.equal(memory.table, tables[i])
        own = zip((memory.keys, memory.values), segments[i], case.new(i), strict=True)
        for found, expected, new in own:
            expected[1, memory.steps - 1] = new
            assert same(found, expected)


def test_a_nan_is_not_hidden() -> None:
    """One that a beam may read reaches its row, and no row of a beam that may not."""
    for name in ("keys", "values"):
        case = Case([(4, 70, 20)], torch.float32)
        memory = case.memories[0]
        place = int(memory.table[0, 17])  # what beam 0 reads of step 17
        getattr(memory, name)[1, 17, place, :, 5] = NAN
        reads = memory.table[:, 17] == place
        assert not reads.all()
        y = attend(case.spans, case)
        assert torch.equal(y.isnan().any(dim=1), reads)
        part = case.cache.k if name == "keys" else case.cache.v
        part[1, :, memory.slot, 69, 5] = NAN
        y = attend(case.spans, case)
        assert y.isnan().any(dim=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", ["copies", "segment and copies", "copies and segment"])
def test_standard_memory_equals_segments(kinds: str, dtype: torch.dtype) -> None:
    """The standard cache holds what the table finds. Batches may mix both."""
    case = Case([(4, 50, 18), (3, 70, 5)], dtype, groups=2)
    memories: list[SegmentMemory | StandardMemory] = list(case.memories)
    for i, memory in enumerate(case.memories):
        if kinds == "copies" or kinds.split(" and ")[i] == "copies":
            memories[i] = copies_of(memory, case.cache)
    y = attend(spans_of(memories), case)
    case.check(y)
    for i, memory in enumerate(memories):
        if isinstance(memory, StandardMemory):
            for part, new in zip(memory.layers[1], case.new(i), strict=True):
                assert part.shape[2] == memory.prompt + memory.steps
                assert torch.equal(part[:, :, -1], new.transpose(0, 1))


def copies_of(memory: SegmentMemory, cache: KVCache) -> StandardMemory:
    """The same search on the standard cache, before its last step is written."""
    copy = StandardMemory(cache, memory.slot, memory.prompt, memory.beam_width)
    for step in range(memory.steps):
        copy.extend()
        if step == memory.steps - 1:
            break
        places = memory.table[:, step]
        for layer in range(2):
            copy.append(layer, memory.keys[layer, step, places], memory.values[layer, step, places])
    return copy
