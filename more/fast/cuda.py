"""Attention on a GPU. What all layers share is made once for a batch. None waits for the GPU.

    padded      PyTorch's fused attention: a chunk reads the cache in place, decodes read a copy
    rows        PyTorch's FlashAttention, on Ampere and newer: a whole batch in one launch
    xformers    the paper's back end (SARATHI, Sec 4.5): the same, on older GPUs too

`rows` and `gathered`, which copies the keys of chunks, too, can be recorded in a CUDA graph
(more/fast/graphs.py): all that differs between two batches of one shape is in a tensor of
`numbers`. more/fast/kernels.py tells what runs where.
"""

from collections.abc import Callable
from functools import cache as remember
from itertools import accumulate
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import AttendLayer, FlatBatch, Span, span_by_span, split_heads
from configs import OPERATORS
from executor import TIMERS, OperatorTimer
from kvcache import KVCache
from more.fast.kernels import FLASH, HALF

ALIGNED = 8  # elements: a fused kernel wants the rows of a mask to begin at multiples of that
HEAD_START = 2 * 10**8  # cycles of a GPU, some 100 ms: launching an iteration takes less
EMPTY = 8  # marks with next to nothing between them
STEP = 256  # tokens: a copy of keys is made up to the next multiple

Plan = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, keys, values) -> y of one span, in any layer. The shapes are those of attention.py."""
Recordable = Callable[[FlatBatch, KVCache, Tensor, int], AttendLayer]
"""A back end that takes `numbers_of` a batch, on the GPU, and at least the largest context."""


@remember
def small_operators(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """fused.py, where Triton runs: it comes with PyTorch for CUDA, and wants a C compiler."""
    if device.type != "cuda" or dtype not in HALF:
        return None
    try:
        from more.fast import fused  # here: it imports Triton

        fused.try_out(device, dtype)
    except Exception:  # noqa: BLE001  Triton and the compiler have kinds of their own
        return None
    return fused


class EventTimer(OperatorTimer):
    """A timer of operators that does not wait after each of them, but marks its end on the GPU.

    The GPU sleeps first, so that the host is ahead of it: launching takes no operator's time. A
    mark takes time of its own, which is measured and left out. In a virtual machine that is 30 us,
    give or take 10: there, small operators have no times to rely on.
    """

    def __init__(self, device: torch.device):
        self.names: list[str] = []
        tiny = torch.zeros(1, device=device)
        self.marks = [self.mark()]
        torch.cuda._sleep(HEAD_START)
        self.marks.append(self.mark())
        for _ in range(EMPTY):
            tiny.zero_()
            self.marks.append(self.mark())

    @staticmethod
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, name: str, operator: Callable, *args: object) -> object:
        result = operator(*args)
        self.names.append(name)
        self.marks.append(self.mark())
        return result

    def gaps(self) -> tuple[float, list[float]]:
        """Seconds of a mark, and between two marks, once the device has done them."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        found = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return min(found[1 : 1 + EMPTY]), found

    @property
    def slept(self) -> float:
        mark, gaps = self.gaps()
        return gaps[0] + mark * len(gaps)

    @property
    def seconds(self) -> dict[str, float]:
        mark, gaps = self.gaps()
        found = dict.fromkeys(OPERATORS, 0.0)
        for name, seconds in zip(self.names, gaps[1 + EMPTY :], strict=True):
            found[name] += max(0.0, seconds - mark)
        return found


TIMERS["cuda"] = EventTimer


def rows_of(batch: FlatBatch) -> list[int]:
    """How many rows each request of a batch has, in order."""
    spans = [(len(s.slots), s.rows.stop - s.rows.start) for s in batch.spans]
    return [rows // requests for requests, rows in spans for _ in range(requests)]


def numbers_of(batch: FlatBatch) -> Tensor:
    """What differs between two batches of one shape: int32 (3, n + 1), for n requests.

    The first row of each and, last, the end; its slot; its context. On the CPU: one copy brings
    all of them to the GPU.
    """
    slots = [slot for span in batch.spans for slot in span.slots]
    contexts = [context for span in batch.spans for context in span.contexts]
    starts = accumulate(rows_of(batch), initial=0)
    return torch.tensor([[*starts], [*slots, 0], [*contexts, 0]], dtype=torch.int32)


def longest_of(batch: FlatBatch) -> int:
    return max(context for span in batch.spans for context in span.contexts)


def planned(batch: FlatBatch, cache: KVCache, plans: list[Plan]) -> AttendLayer:
    """Attend each span by its plan."""
    plan_of = dict(zip([span.slots for span in batch.spans], plans, strict=True))
    return span_by_span(lambda q, k, v, slots, _: plan_of[slots](q, k, v))(batch, cache)


def padded(batch: FlatBatch, cache: KVCache) -> AttendLayer:
    """A back end: a chunk reads the cache in place. Decodes share a launch, on a padded copy.

    On a GPU, launching many kernels costs more than that copy.
    """
    numbers = None
    if any(len(span.slots) > 1 for span in batch.spans):
        numbers = numbers_of(batch).to(cache.k.device)
    return planned(batch, cache, plans_of(batch, cache, numbers, None))


def gathered(batch: FlatBatch, cache: KVCache, numbers: Tensor, longest: int) -> AttendLayer:
    """`padded`, for a CUDA graph: chunks read a copy, too, of `longest` keys."""
    return planned(batch, cache, plans_of(batch, cache, numbers, longest))


def plans_of(
    batch: FlatBatch, cache: KVCache, numbers: Tensor | None, longest: int | None
) -> list[Plan]:
    plans = []
    first = 0
    for span in batch.spans:
        own = slice(first, first + len(span.slots))
        first = own.stop
        if longest is None and len(span.slots) == 1:
            plans.append(in_place(span, cache))
            continue
        rows = (span.rows.stop - span.rows.start) // len(span.slots)
        slots, contexts = numbers[1:, own].long()
        # rounded up: PyTorch keeps the memory of each size that it was asked for
        most = longest or min(-(-max(span.contexts) // STEP) * STEP, cache.length)
        plans.append(in_copy(cache, rows, slots, contexts, most))
    return plans


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, else -inf: (..., keys). Its rows are aligned, as fused kernels want.

    From a Boolean mask, PyTorch makes such a mask again in each layer.
    """
    keys = seen.shape[-1]
    room = -(-keys // ALIGNED) * ALIGNED
    mask = torch.zeros(*seen.shape[:-1], room, dtype=dtype, device=seen.device)[..., :keys]
    return mask.masked_fill_(~seen, float("-inf"))


def in_place(span: Span, cache: KVCache) -> Plan:
    """For one request: its slot's keys are read where they are, by all heads of a group."""
    [slot] = span.slots
    [context] = span.contexts
    device = cache.k.device
    rows = span.rows.stop - span.rows.start
    whole = rows == context > 1  # a whole prompt: its lower triangle needs no mask in memory
    mask = None
    if 1 < rows < context:
        row = torch.arange(context - rows, context, device=device)[:, None]  # (Tq, 1)
        mask = added_mask(torch.arange(context, device=device) <= row, cache.k.dtype)

    def plan(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        _, _, n_head, head_dim = q.shape
        n_kv_head = keys.shape[0]
        groups = n_head // keys.shape[0]
        # (n_kv_head, context, d)
        key = keys[:, slot, :context]
        value = values[:, slot, :context]
        if rows == 1:  # sees everything: grouped heads are rows of one product
            query = q.view(1, n_kv_head, groups, head_dim)
            y = F.scaled_dot_product_attention(query, key[None], value[None])
            return y.reshape(1, 1, n_head, head_dim)
        query = q[0].unflatten(1, (n_kv_head, groups)).permute(1, 2, 0, 3)  # (kv, groups, Tq, d)
        shape = (n_kv_head, groups, context, head_dim)
        key = key[:, None].expand(shape)
        value = value[:, None].expand(shape)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole)
        return y.permute(2, 0, 1, 3).flatten(1, 2)[None]  # (1, Tq, n_head, head_dim)

    return plan


def in_copy(cache: KVCache, rows: int, slots: Tensor, contexts: Tensor, longest: int) -> Plan:
    """For many requests in one launch. slots, contexts (n,) int64; longest: at least the largest.

    Shorter requests are padded with their own last key. Later keys in the cache may be NaN, and a
    mask does not keep a NaN out of a sum. The heads of a group are rows of one product: with
    `enable_gqa` and a mask, no fused kernel runs (PyTorch 2.13).
    """
    column = torch.arange(longest, device=slots.device)
    place = slots[:, None], torch.minimum(column, contexts[:, None] - 1)  # (n, 1), (n, longest)
    last_seen = contexts[:, None] - rows + torch.arange(rows, device=slots.device)  # (n, Tq)
    seen = column <= last_seen[:, None, :, None]  # (n, 1, Tq, longest)
    masks: dict[int, Tensor] = {}  # one, made when the first layer knows how many heads share keys

    def plan(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        groups = q.shape[2] // keys.shape[0]
        if groups not in masks:
            masks[groups] = added_mask(seen.repeat(1, 1, groups, 1), q.dtype)
        key = keys[:, *place].transpose(0, 1)  # (n, n_kv_head, longest, head_dim)
        value = values[:, *place].transpose(0, 1)  # (n, n_kv_head, longest, head_dim)
        query = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        # (n, n_kv_head, groups * Tq, head_dim)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=masks[groups])
        return y.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    return plan


def rows(
    batch: FlatBatch, cache: KVCache, numbers: Tensor | None = None, longest: int | None = None
) -> AttendLayer:
    """A back end: FlashAttention reads the slots in place, as one long row of keys.

    The keys of slot s begin at row s * length. FlashAttention takes where each request's keys begin
    (cu_seqlens_k), and how many are real (seqused_k). With that it reads no end from cu_seqlens_k
    (PyTorch's flash_attn/src/block_info.h). So requests may come in any order, and idle slots cost
    nothing. longest: at least the largest context.
    """
    if numbers is None:
        numbers = numbers_of(batch).to(cache.k.device)
    n_kv_head = cache.k.shape[1]
    most = max(rows_of(batch))
    limit = longest or longest_of(batch)
    starts = numbers[0]
    begins = numbers[1] * cache.length
    contexts = numbers[2, :-1]
    fused = small_operators(cache.k.device, cache.k.dtype)
    write = fused.write if fused else KVCache.write

    def attend_layer(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = split_heads(qkv, n_kv_head)  # (T, heads, head_dim) each
        write(cache, layer, batch.slots, batch.positions, k, v)
        key, value = (part.flatten(1, 2).transpose(0, 1) for part in cache.layers[layer])
        # (slots * length, n_kv_head, head_dim) each
        y = FLASH(
            q, key, value, starts, begins, most, limit, 0.0, most > 1, False, seqused_k=contexts
        )[0]
        return y.flatten(1)  # (T, n_head * head_dim)

    return attend_layer


def xformers(batch: FlatBatch, cache: KVCache) -> AttendLayer:
    """A back end: the cache is one long row of keys, with `length` of them for each slot.

    The mask says how many keys of a slot are real. It wants queries in the order of slots, and
    FlashAttention wants one query of each sequence at least, where none has more and heads share
    keys (github.com/Dao-AILab/flash-attention/issues/1619). So an idle slot has one, too: a copy of
    row 0, which sees one key, and whose result nobody reads.
    """
    from xformers.ops import fmha  # here: it takes seconds to load, and not all systems have it

    _, n_kv_head, slots, length, head_dim = cache.k.shape
    device = cache.k.device
    total = slots * length
    requests = [
        each for span in batch.spans for each in zip(span.slots, span.contexts, strict=True)
    ]
    rows = rows_of(batch)
    place_of = {slot: i for i, (slot, _) in enumerate(requests)}
    firsts = [*accumulate(rows, initial=0)]
    # rows as the mask wants them; of each slot
    order = []
    counts = []
    contexts = []
    back = [0] * firsts[-1]
    for slot in range(slots):
        place = place_of.get(slot)
        own = range(1) if place is None else range(firsts[place], firsts[place + 1])
        if place is not None:
            back[own.start : own.stop] = range(len(order), len(order) + len(own))
        order += own
        counts.append(len(own))
        contexts.append(1 if place is None else requests[place][1])
    there, home = (torch.tensor(each, device=device) for each in (order, back))
    bias = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=counts, kv_padding=length, kv_seqlen=contexts, device=device
    )

    def attend_layer(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = split_heads(qkv, n_kv_head)  # (T, heads, head_dim) each
        cache.write(layer, batch.slots, batch.positions, k, v)
        query = q[there].unflatten(1, (n_kv_head, -1))[None]  # (1, rows, n_kv_head, groups, d)
        shape = 1, total, n_kv_head, query.shape[3], head_dim
        row = (part.flatten(1, 2).transpose(0, 1)[None, :, :, None] for part in cache.layers[layer])
        key, value = (part.expand(shape) for part in row)
        y = fmha.memory_efficient_attention_forward(query, key, value, attn_bias=bias)
        return y[0, home].flatten(1)  # (T, n_head * head_dim)

    return attend_layer
