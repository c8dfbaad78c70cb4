"""Attention of beams in C++, on a CPU: one call for all searches of a layer (more/fast/native.cpp).

It reads the prompt's keys and values once for all beams, in place. It reads those of the response
through the table. Nothing is copied. more/beam/attention.py has the same, written out.
"""

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from attention import AttendLayer, split_heads
from kvcache import KVCache
from more.beam.memory import BeamSpan, SegmentMemory, StandardMemory
from more.fast.native import INTEGER, Sizes, function, table


class BeamSizes(Sizes):
    """As in native.cpp."""

    _fields_: ClassVar = [("kv_token", INTEGER), ("layer", INTEGER)]


def attention(spans: Sequence[BeamSpan], cache: KVCache) -> AttendLayer:
    """A back end for the rows of beams (`more.beam.attention.BeamAttention`), on both caches.

    In each layer, one call attends for all searches on segments. Each search on the standard cache
    needs a call of its own. For what `native.check` lets through.
    """
    segments = []
    copies = []
    first = 0
    for span in spans:
        own = segments if isinstance(span.memory, SegmentMemory) else copies
        own.append((first, span.memory))
        first += span.memory.beam_width
    searches = searches_of(segments)

    def attend_layer(layer: int, qkv: Tensor) -> Tensor:
        rows, heads, head_dim = qkv.shape
        n_head = heads - 2 * cache.k.shape[1]
        y = torch.empty(rows, n_head * head_dim, dtype=qkv.dtype)
        if segments:
            attend_beams(qkv, *cache.layers[layer], searches, layer, y)
        for row, memory in copies:
            attend_copies(qkv, memory, row, layer, y)
        return y

    return attend_layer


def searches_of(memories: Sequence[tuple[int, SegmentMemory]]) -> ctypes.Array:
    """What native.cpp is told of searches: (first row in the batch, memory) of each.

    It holds addresses. They are valid until a memory grows, is reordered, or is freed.
    """
    numbers = []
    for row, memory in memories:
        keys = memory.keys
        values = memory.values
        own = memory.table
        assert keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape
        assert own.dtype == torch.int64 and own.stride(1) == 1
        assert 0 < memory.steps <= min(keys.shape[1], own.shape[1])
        numbers += row, memory.beam_width, memory.slot, memory.prompt, memory.steps
        numbers += keys.stride(0), own.stride(0)
        numbers += keys.data_ptr(), values.data_ptr(), own.data_ptr()
    return (INTEGER * len(numbers))(*numbers)


def attend_beams(
    qkv: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    searches: ctypes.Array,
    layer: int,
    y: Tensor,
) -> None:
    """Writes K and V of each beam into the segments, then attends. Only rows of `searches` count.

    qkv        (T, n_head + 2 * n_kv_head, head_dim), contiguous
    prompt_*   (n_kv_head, slots, length, head_dim): views with any strides, but the last must be 1.
               Permute a prompt of layout [BS, N, H, D] by (2, 0, 1, 3), and one of layout
               [N, BS, H, D] by (2, 1, 0, 3). Keys and values have the same strides.
    searches   from `searches_of`
    layer      of the segments
    y          (T, n_head * head_dim), contiguous: the result goes there
    """
    n_kv_head, _, _, head_dim = prompt_keys.shape
    rows, heads, _ = qkv.shape
    n_head = heads - 2 * n_kv_head
    strides = prompt_keys.stride()
    assert qkv.is_contiguous() and y.is_contiguous() and y.shape == (rows, n_head * head_dim)
    assert qkv.dtype == prompt_keys.dtype == y.dtype and qkv.shape[2] == head_dim
    assert prompt_values.stride() == strides and strides[3] == 1
    n = len(searches) // 10  # numbers of one
    stride = heads * head_dim
    sizes = BeamSizes(n, n_head, n_kv_head, head_dim, stride, *strides[:3], layer)
    # bytes of one head
    q = qkv.data_ptr()
    size = head_dim * qkv.element_size()
    k = q + n_head * size
    v = q + (n_head + n_kv_head) * size
    prompts = prompt_keys.data_ptr(), prompt_values.data_ptr()
    run = function("attend_beams", qkv.dtype)
    run(q, k, v, *prompts, y.data_ptr(), searches, ctypes.byref(sizes))


def attend_copies(qkv: Tensor, memory: StandardMemory, row: int, layer: int, y: Tensor) -> None:
    """The standard cache. Each beam is a request to native.cpp, with one row and its own slot.

    qkv, y: as for `attend_beams`. row: the first of this search in them.
    """
    n_kv_head, width = memory.layers[layer][0].shape[:2]
    heads, head_dim = qkv.shape[1:]
    n_head = heads - 2 * n_kv_head
    assert qkv.is_contiguous() and y.is_contiguous() and qkv.dtype == y.dtype
    _, k, v = split_heads(qkv[row : row + width], n_kv_head)  # (BW, n_kv_head, head_dim) each
    memory.append(layer, k, v)
    keys, values = (part.contiguous() for part in memory.layers[layer])
    context = keys.shape[2]
    strides = keys.stride()
    requests = table([(row + beam, 1, beam, context) for beam in range(width)])
    sizes = Sizes(width, n_head, n_kv_head, head_dim, heads * head_dim, *strides[:2])
    cached = keys.data_ptr(), values.data_ptr()
    run = function("attend", qkv.dtype)
    run(qkv.data_ptr(), None, None, *cached, y.data_ptr(), requests, ctypes.byref(sizes))
