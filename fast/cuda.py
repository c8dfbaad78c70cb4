"""Attention on a GPU: all decodes in one launch, and the paper's back end, xformers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import sdpa


def attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """`attention.sdpa` for one request. Many requests run in one kernel, on a padded copy.

    On a GPU, launching many kernels costs more than that copy.
    """
    if len(slots) == 1:
        return sdpa(q, keys, values, slots, contexts)
    numbers = [torch.tensor(each, device=q.device) for each in (slots, contexts)]
    return gathered(q, keys, values, *numbers, max(contexts))


def gathered(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, contexts: Tensor, longest: int
) -> Tensor:
    """Many requests in one kernel. slots, contexts (n,) int64; longest: the largest context.

    All that differs between two batches of the same shape is in tensors. So a CUDA graph can replay
    this (fast/graphs.py). Shorter requests are padded with their own last key. Later keys in
    the cache may be NaN, and a mask does not keep a NaN out of a sum.
    """
    rows, column = q.shape[1], torch.arange(longest, device=q.device)
    place = slots[:, None], torch.minimum(column, contexts[:, None] - 1)  # (n, 1), (n, longest)
    key = keys[:, *place].transpose(0, 1)  # (n, n_kv_head, longest, head_dim)
    value = values[:, *place].transpose(0, 1)  # (n, n_kv_head, longest, head_dim)
    last_seen = contexts[:, None] - rows + torch.arange(rows, device=q.device)  # (n, Tq)
    mask = (column <= last_seen[:, :, None])[:, None]  # (n, 1, Tq, longest)
    query = q.transpose(1, 2)  # (n, n_head, Tq, head_dim)
    y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return y.transpose(1, 2)  # (n, Tq, n_head, head_dim)


def xformers(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """The paper's back end (SARATHI, Sec 4.5): xformers' memory-efficient attention, CUDA only.

    It reads the cache in place, as one long row of keys with `length` keys for each slot. The
    padded-keys mask says how many keys of a slot are real. Slots that are not in the batch have no
    queries. So nothing is copied.
    """
    from xformers.ops import fmha  # here, because it only exists with CUDA

    n, rows, n_head, head_dim = q.shape
    n_kv_head, n_slots, length, _ = keys.shape
    groups, total = n_head // n_kv_head, n_slots * length
    order = sorted(range(n), key=lambda i: slots[i])  # the mask wants requests in order of slots
    context_of = dict(zip(slots, contexts, strict=True))
    bias = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[rows if slot in context_of else 0 for slot in range(n_slots)],
        kv_padding=length,
        kv_seqlen=[context_of.get(slot, 1) for slot in range(n_slots)],
    )
    query = q[order].view(1, n * rows, n_kv_head, groups, head_dim)

    def in_one_row(cached: Tensor) -> Tensor:
        row = cached.view(n_kv_head, total, head_dim).transpose(0, 1)[None, :, :, None]
        return row.expand(1, total, n_kv_head, groups, head_dim)

    key, value = in_one_row(keys), in_one_row(values)
    y = fmha.memory_efficient_attention_forward(query, key, value, attn_bias=bias)
    out = torch.empty_like(q)
    out[order] = y.view(n, rows, n_head, head_dim)
    return out
