"""Attention of a beam search: over the prompt, over the response, and the two put together.

All beams of a search read the same keys of the prompt. So these are read once for all beams.
Softmax over both segments needs one denominator. So we cannot just add the two parts (segment KV,
Sec 3.3). Each part is first multiplied by exp(its maximum - the larger maximum), as in
FlashAttention.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from attention import AttendLayer, Attention, FlatBatch, SpanAttention, split_heads
from kvcache import KVCache
from more.beam.memory import BeamSpan, SegmentMemory

BeamAttention = Callable[[Sequence[BeamSpan], KVCache], AttendLayer]
"""A back end for the rows of beams alone. It writes their K and V, and then attends."""


def two_segments(
    q: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
) -> Tensor:
    """Every step written out, scores in at least float32. The prompt may be empty: P = 0.

    q          (BW, n_head, head_dim): one row for each beam
    prompt_*   (n_kv_head, P, head_dim): the prompt's, once
    keys, values (t, BW, n_kv_head, head_dim): the response's, by step and place
    table      (BW, t): beam b reads step t from place table[b, t]
    returns    (BW, n_head, head_dim)
    """
    width, n_head, head_dim = q.shape
    n_kv_head = prompt_keys.shape[0]
    steps = table.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    query = q.to(exact).view(width, n_kv_head, -1, head_dim) / math.sqrt(head_dim)  # (BW, kv, g, d)
    own = torch.arange(steps, device=q.device)  # (t,)
    response = keys[own, table].to(exact), values[own, table].to(exact)  # (BW, t, kv, d) each
    prompt = prompt_keys.to(exact), prompt_values.to(exact)  # (kv, P, d) each

    parts = []
    for scores, read, value in (
        (torch.einsum("bkgd,kpd->bkgp", query, prompt[0]), "bkgp,kpd->bkgd", prompt[1]),
        (torch.einsum("bkgd,btkd->bkgt", query, response[0]), "bkgt,btkd->bkgd", response[1]),
    ):
        if scores.shape[-1] == 0:  # a window has left the prompt behind
            continue
        most = scores.amax(dim=-1, keepdim=True)  # (BW, kv, g, 1)
        weights = (scores - most).exp()  # (BW, kv, g, P or t)
        parts.append((most, weights.sum(dim=-1, keepdim=True), torch.einsum(read, weights, value)))
    largest = reduce(torch.maximum, [most for most, _, _ in parts])
    total = 0.0
    y = 0.0
    for most, weight, value in parts:
        share = (most - largest).exp()  # the larger part has 1
        total = total + share * weight
        y = y + share * value
    y = y / total
    return y.reshape(width, n_head, head_dim).to(q.dtype)


def plain(attend: SpanAttention, window: int = 0) -> BeamAttention:
    """A back end of torch alone. attend: for the standard cache, whose beams are like requests.

    That cache copies the prompt BW times. So its beams are a batch of BW requests, and the ways of
    attention.py can attend to it.
    window: a beam sees that many tokens, itself included; 0: all. `attend` must have the same.
    """

    def attention(spans: Sequence[BeamSpan], cache: KVCache) -> AttendLayer:
        def attend_layer(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = split_heads(qkv, cache.k.shape[1])  # (T, heads, head_dim) each
            y = torch.empty_like(q)  # (T, n_head, head_dim)
            row = 0
            for span in spans:
                memory = span.memory
                rows = slice(row, row + memory.beam_width)
                row = rows.stop
                y[rows] = attend_one(layer, memory, q[rows], k[rows], v[rows], cache)
            return y.flatten(1)  # (T, n_head * head_dim)

        return attend_layer

    def attend_one(layer, memory, q, k, v, cache) -> Tensor:  # q, k, v (BW, heads, head_dim)
        if isinstance(memory, SegmentMemory):
            steps = memory.steps
            end = memory.prompt
            first = max(0, end + steps - window) if window else 0  # the first that a beam sees
            past = max(0, first - end)  # steps of the response before it
            own = slice(past, steps)
            keys = memory.keys[layer, own]
            values = memory.values[layer, own]
            keys[-1], values[-1] = k, v
            prompt = [part[:, memory.slot, min(first, end) : end] for part in cache.layers[layer]]
            return two_segments(q, *prompt, keys, values, memory.table[:, own])
        memory.append(layer, k, v)
        context = memory.prompt + memory.steps
        slots = range(memory.beam_width)
        contexts = [context] * memory.beam_width
        return attend(q[:, None], *memory.layers[layer], slots, contexts)[:, 0]

    return attention


def with_beams(inner: Attention, beams: BeamAttention) -> Attention:
    """A back end for batches that may hold beams. All other rows go to `inner`."""

    def attention(batch: FlatBatch, cache: KVCache) -> AttendLayer:
        spans = [span for span in batch.spans if isinstance(span, BeamSpan)]
        if not spans:
            return inner(batch, cache)
        first = spans[0].rows.start  # the rows of beams come last
        of_beams = beams(spans, cache)
        if first == 0:
            return of_beams
        others = [span for span in batch.spans if not isinstance(span, BeamSpan)]
        rows = batch.tokens[:first], batch.slots[:first], batch.positions[:first]
        of_others = inner(FlatBatch(*rows, others, batch.logit_rows), cache)

        def attend_layer(layer: int, qkv: Tensor) -> Tensor:
            y = of_others(layer, qkv[:first]), of_beams(layer, qkv[first:])
            return torch.cat(y)  # (T, n_head * head_dim)

        return attend_layer

    return attention
