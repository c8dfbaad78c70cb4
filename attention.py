"""The mask of a chunk, and attention of a hybrid batch over the KV cache: the plain versions.

A chunk, a whole prompt and a decode differ in two numbers only: how many new rows a request has,
and how many of its tokens are in the cache. A *span* is rows that attend together: the rows of one
chunk, or one row of each decode. Two functions here attend a span, with these arguments:

    attend_span(q, keys, values, slots, contexts) -> y
        q         (n, Tq, n_head, head_dim)   Tq new rows of n requests: n = 1 for a chunk, Tq = 1
                                              for decodes
        keys      (n_kv_head, slots, length, head_dim)   a layer's whole cache; values: the same
        slots     n slot numbers, the place of each request in the cache
        contexts  n token counts, the new rows included: row i of a request is token
                  context - Tq + i
        y         (n, Tq, n_head, head_dim)

    reference   every step written out
    sdpa        PyTorch's fused attention

With grouped-query attention (n_kv_head < n_head) query head h reads key head
h // (n_head / n_kv_head). Faster versions are in more/fast/; all give the same result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache import KVCache

SpanAttention = Callable[[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]


@dataclass(slots=True)
class Span:
    """Rows that attend together: those of one chunk (n = 1), or one of each decode (Tq = 1)."""

    rows: slice  # of the flat batch: n * Tq of them
    slots: tuple[int, ...]  # n
    contexts: tuple[int, ...]  # n: tokens in the cache once these rows are written


@dataclass(slots=True)
class FlatBatch:
    """One iteration's rows. Long tensors on the model's device."""

    tokens: Tensor  # (T,)
    slots: Tensor  # (T,) the cache slot of each row
    positions: Tensor  # (T,) its place in the request
    spans: list[Span]
    logit_rows: Tensor  # (S,) rows that a token is sampled from


# Attention of one layer: (layer, qkv) -> y.
# qkv (T, n_head + 2 * n_kv_head, head_dim); y (T, n_head * head_dim)
AttendLayer = Callable[[int, Tensor], Tensor]
# A back end. The model calls it once per iteration, with the batch and the cache. It returns the
# function that the model then calls once per layer.
Attention = Callable[[FlatBatch, KVCache], AttendLayer]


@lru_cache(maxsize=8)  # every layer of an iteration asks for the same mask
def chunk_mask(start: int, length: int, device: str | torch.device = "cpu") -> Tensor:
    """Which keys the rows of a chunk may see (SARATHI, Fig 6): Boolean (length, start + length).

    Row i is prompt token start + i. It sees itself and everything before (True). The masks of a
    prompt's chunks, one below the other, are the lower triangle: the mask of the full prefill. So
    a chunked prefill computes the same.
    """
    row = torch.arange(start, start + length, device=device)[:, None]  # (length, 1)
    column = torch.arange(start + length, device=device)[None, :]  # (1, start + length)
    return column <= row


def reference(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """One request at a time, every step written out, scores in at least float32."""
    _, length, n_head, head_dim = q.shape  # length: Tq
    groups = n_head // keys.shape[0]
    exact = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        query = q[i].transpose(0, 1).to(exact)  # (n_head, Tq, head_dim)
        key = keys[:, slot, :context].repeat_interleave(groups, dim=0)  # (n_head, context, d)
        value = values[:, slot, :context].repeat_interleave(groups, dim=0)  # same shape
        scores = query @ key.to(exact).transpose(1, 2) / head_dim**0.5  # (n_head, Tq, context)
        scores = scores.masked_fill(~chunk_mask(context - length, length, q.device), float("-inf"))
        y = scores.softmax(dim=-1) @ value.to(exact)  # (n_head, Tq, head_dim)
        out[i] = y.transpose(0, 1)  # (Tq, n_head, head_dim)
    return out


def sdpa(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """PyTorch's fused attention, one request at a time, reading the cache in place.

    A padded batch of all requests would read the longest context for each of them.
    """
    length = q.shape[1]  # Tq
    out = torch.empty_like(q)
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        key = keys[:, slot, :context]  # (n_kv_head, context, head_dim)
        value = values[:, slot, :context]  # same shape
        if length == 1:
            out[i] = attend_decode(q[i], key, value)
        elif length == context:  # a whole prompt: its triangle needs no mask
            out[i] = attend_chunk(q[i], key, value, None)
        else:
            out[i] = attend_chunk(q[i], key, value, chunk_mask(context - length, length, q.device))
    return out


def attend_decode(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One new row, q (1, n_head, head_dim). It sees all keys: no mask.

    key, value: (n_kv_head, context, head_dim). The query heads of a group read the same keys. So
    they can stand where the rows of a chunk would stand, and one product serves them all.
    """
    query = q.view(1, key.shape[0], -1, q.shape[-1])  # (1, n_kv_head, groups, head_dim)
    y = F.scaled_dot_product_attention(query, key[None], value[None])
    return y.reshape(q.shape)  # (1, n_head, head_dim)


def attend_chunk(q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The new rows of a chunk, q (Tq, n_head, head_dim). mask (Tq, context); None: causal.

    key, value: (n_kv_head, context, head_dim). Key heads are the batch dimension here. So the query
    heads of a group share their keys without a copy.
    """
    query = q.unflatten(1, (key.shape[0], -1)).permute(1, 2, 0, 3)  # (n_kv_head, groups, Tq, d)
    shape = (*query.shape[:2], *key.shape[1:])  # (n_kv_head, groups, context, d)
    key = key[:, None].expand(shape)
    value = value[:, None].expand(shape)
    y = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None
    )  # (n_kv_head, groups, Tq, d)
    return y.permute(2, 0, 1, 3).flatten(1, 2)  # (Tq, n_head, head_dim)


def split_heads(qkv: Tensor, n_kv_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, n_head + 2 * n_kv_head, head_dim) -> its parts q, k and v, which are views."""
    return qkv.split((qkv.shape[1] - 2 * n_kv_head, n_kv_head, n_kv_head), dim=1)


def span_by_span(attend_span: SpanAttention) -> Attention:
    """Make a back end of a function that attends one span.

    In each layer it writes K and V of all rows to the cache, then attends span by span.
    """

    def attention(batch: FlatBatch, cache: KVCache) -> AttendLayer:
        def attend_layer(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = split_heads(qkv, cache.k.shape[1])  # (T, heads, head_dim) each
            cache.write(layer, batch.slots, batch.positions, k, v)
            y = torch.empty_like(q)  # (T, n_head, head_dim)
            for span in batch.spans:
                query = q[span.rows].unflatten(0, (len(span.slots), -1))  # (n, Tq, n_head, d)
                keys, values, slots = cache.read(layer, span.slots, span.contexts)
                y[span.rows] = attend_span(query, keys, values, slots, span.contexts).flatten(0, 1)
            return y.flatten(1)  # (T, n_head * head_dim)

        return attend_layer

    return attention


PLAIN: dict[str, Attention] = {"math": span_by_span(reference), "sdpa": span_by_span(sdpa)}
