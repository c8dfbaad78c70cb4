"""Attention in bfloat16 on a CPU, with PyTorch's operators alone: it runs without a C++ compiler.

The results are those of `attention.sdpa`, which runs in all other cases. Two things are faster:

    a decode      reads K and V as float32 copies: products of few rows are slow in bfloat16
    a chunk       is three plain operators: the fused kernel is slower than plain products
"""

from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import PLAIN, AttendLayer, FlatBatch, span_by_span
from kvcache import KVCache

PIECE = 256  # rows
SCRATCH: WeakKeyDictionary[KVCache, Tensor] = WeakKeyDictionary()  # goes when its cache goes


def attention(batch: FlatBatch, cache: KVCache) -> AttendLayer:
    """A back end (attention.py)."""
    if cache.k.is_cuda or cache.k.dtype != torch.bfloat16:
        return PLAIN["sdpa"](batch, cache)

    scratch = SCRATCH.get(cache)
    if scratch is None:
        scratch = SCRATCH[cache] = make_scratch(cache)

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
    ) -> Tensor:
        return attend_bfloat16(q, keys, values, slots, contexts, scratch)

    return span_by_span(attend)(batch, cache)


def make_scratch(cache: KVCache) -> Tensor:
    """Room for K and V of one slot in float32."""
    with torch.inference_mode(False):  # else nobody could write to it outside of that mode
        return torch.empty(2, cache.k.shape[1], cache.length, cache.k.shape[4])


def attend_bfloat16(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[int],
    contexts: Sequence[int],
    scratch: Tensor,
) -> Tensor:
    """As `attention.sdpa`. scratch (2, n_kv_head, length, head_dim), float32.

    The scratch is always the same memory, so that it stays in the CPU's caches.
    """
    if q.shape[1] > 1:
        spans = zip(q, slots, contexts, strict=True)
        found = [chunk_in_products(q, keys[:, s], values[:, s], n) for q, s, n in spans]
        return torch.stack(found)
    n_kv_head, groups = keys.shape[0], q.shape[2] // keys.shape[0]
    out = torch.empty_like(q)
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        query = q[i].view(1, n_kv_head, groups, -1).float()
        key, value = scratch[:, None, :, :context]  # (1, n_kv_head, context, head_dim) each
        key.copy_(keys[:, slot, :context]), value.copy_(values[:, slot, :context])
        out[i] = F.scaled_dot_product_attention(query, key, value).view_as(out[i])
    return out


def chunk_in_products(q: Tensor, keys: Tensor, values: Tensor, context: int) -> Tensor:
    """`attention.reference` in three operators, 1.6x as fast on a CPU as the fused kernel.

    The scores are rounded to bfloat16, as in Hugging Face's "eager". q is (Tq, n_head, head_dim).
    keys and values are (n_kv_head, length, head_dim), all of a slot.

    Many rows are cut into pieces. Each piece reads keys up to its own last row only, as in a
    chunked prefill. This bounds the memory of the scores, and skips half of the masked work.
    If the number of keys is no multiple of 16, products take up to twice as long. So we read a few
    keys after the context, and mask them. They are set to 0 first, because a mask does not keep a
    NaN out of a sum.
    """
    rows, n_head, head_dim = q.shape
    n_kv_head, length = keys.shape[:2]
    groups, out = n_head // n_kv_head, torch.empty_like(q)
    behind = slice(context, round_up(context, length))
    keys[:, behind], values[:, behind] = 0, 0
    for first in range(0, rows, PIECE):
        piece = q[first : first + PIECE].unflatten(1, (n_kv_head, groups))  # (Tp, kv, groups, d)
        start = context - rows + first
        end = round_up(start + len(piece), length)
        query = piece.permute(1, 2, 0, 3).flatten(1, 2)  # (n_kv_head, groups * Tp, head_dim)
        mask = added_mask(start, len(piece), end, groups, q.dtype)  # (groups * Tp, end)
        key, value = keys[:, :end].transpose(1, 2), values[:, :end]
        scores = torch.baddbmm(mask, query, key, alpha=head_dim**-0.5)  # (kv, groups * Tp, end)
        y = torch.bmm(scores.softmax(dim=-1), value)  # (n_kv_head, groups * Tp, head_dim)
        out[first : first + PIECE] = y.unflatten(1, (groups, -1)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def round_up(keys: int, length: int) -> int:
    """To a multiple of 16, as far as the slot goes."""
    return min(-(-keys // 16) * 16, length)


@lru_cache(maxsize=8)
def added_mask(start: int, length: int, end: int, groups: int, dtype: torch.dtype) -> Tensor:
    """`chunk_mask` for each head of a group, to be added to scores over `end` keys.

    0 = sees, -inf = does not.
    """
    seen = torch.arange(end) <= torch.arange(start, start + length)[:, None]  # (length, end)
    mask = torch.zeros(groups * length, end, dtype=dtype)
    return mask.masked_fill(~seen.repeat(groups, 1), float("-inf"))
