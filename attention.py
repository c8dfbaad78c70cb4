"""The mask of a chunk, and attention over the KV cache in four back ends with one signature: here,
and in native.py.

A back end attends the new rows of n requests to all that these requests have in one layer's cache:

    attend(q, keys, values, slots, contexts) -> y
        q         (n, Tq, n_head, head_dim)   Tq new rows of each request: n = 1 for a chunk, Tq = 1
                  for decodes
        keys      (n_kv_head, slots, length, head_dim)   the layer's whole cache; values alike
        slots     n slot numbers, the cache row of each request
        contexts  n token counts, the request's new rows included: row i of a request sits at
                  position context - Tq + i
        y         (n, Tq, n_head, head_dim)

One may also have an attribute `over`, which does a whole batch in one call: see
`model.span_by_span`. Nothing else is needed: a chunk, a whole prompt and a decode differ only in Tq
and context. With grouped-query attention (n_kv_head < n_head) query head h reads key head h //
(n_head / n_kv_head).
"""

import math as pymath
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

import native
from configs import UserError

Attend = Callable[[Tensor, Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]


@lru_cache(maxsize=8)  # every layer of an iteration asks for the same mask
def chunk_mask(start: int, length: int, device: str | torch.device = "cpu") -> Tensor:
    """Which keys the rows of a chunk may see (SARATHI, Fig 6): Boolean (length, start + length),
    True = sees.

    Row i is prompt token start + i; it sees itself and everything before. Stacked, the masks of a
    prompt's chunks are the rows of the lower triangle: that is why a chunked prefill computes what
    the full prefill does.
    """
    row = torch.arange(start, start + length, device=device)[:, None]  # (length, 1)
    column = torch.arange(start + length, device=device)[None, :]  # (1, start + length)
    return column <= row


def math(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """The reference: one request at a time, every step written out, scores in at least float32."""
    _, rows, n_head, head_dim = q.shape
    groups = n_head // keys.shape[0]
    exact = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        query = q[i].transpose(0, 1).to(exact)  # (n_head, Tq, head_dim)
        # (n_head, context, head_dim)
        key = keys[:, slot, :context].repeat_interleave(groups, dim=0).to(exact)
        # (n_head, context, head_dim)
        value = values[:, slot, :context].repeat_interleave(groups, dim=0).to(exact)
        scores = query @ key.transpose(1, 2) / pymath.sqrt(head_dim)  # (n_head, Tq, context)
        scores = scores.masked_fill(~chunk_mask(context - rows, rows, q.device), float("-inf"))
        out[i] = (scores.softmax(dim=-1) @ value).transpose(0, 1)  # (Tq, n_head, head_dim)
    return out


def sdpa(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """PyTorch's fused attention, reading the cache in place."""
    if q.is_cuda and len(slots) > 1:
        return _sdpa_gathered(q, keys, values, slots, contexts)
    _, rows, n_head, head_dim = q.shape
    n_kv_head, groups = keys.shape[0], n_head // keys.shape[0]
    out = torch.empty_like(q)
    # A loop, because contexts differ and a padded batch would read the longest for all; the views
    # below copy nothing.
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        key = keys[:, slot, :context]  # (n_kv_head, context, head_dim)
        value = values[:, slot, :context]  # (n_kv_head, context, head_dim)
        # a decode sees all of its context: its grouped heads can be the rows of one unmasked
        # product
        if rows == 1:
            query = q[i].view(1, n_kv_head, groups, head_dim)
            if q.dtype == torch.bfloat16 and not q.is_cuda:
                # Few-row bf16 products are slow on CPUs; as float32 a request's K and V pass
                # through the caches, 3x faster.
                key32, value32 = _scratch(n_kv_head, keys.shape[2], head_dim)[
                    :, None, :, :context
                ]  # (1, n_kv_head, context, head_dim) each
                y = F.scaled_dot_product_attention(
                    query.float(), key32.copy_(key), value32.copy_(value)
                )
            else:
                y = F.scaled_dot_product_attention(query, key[None], value[None])
            out[i] = y.view(1, n_head, head_dim)
        elif q.dtype == torch.bfloat16 and not q.is_cuda:
            out[i] = _chunk_in_products(q[i], keys[:, slot], values[:, slot], context)
        else:  # key heads are the batch dimension, so that grouping is a broadcast and not a copy
            # (n_kv_head, groups, Tq, head_dim)
            query = q[i].view(rows, n_kv_head, groups, head_dim).permute(1, 2, 0, 3)
            key = key[:, None].expand(-1, groups, -1, -1)  # (n_kv_head, groups, context, head_dim)
            # (n_kv_head, groups, context, head_dim)
            value = value[:, None].expand(-1, groups, -1, -1)
            whole = rows == context  # a whole prompt: its lower triangle needs no mask in memory
            mask = None if whole else chunk_mask(context - rows, rows, q.device)
            y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=whole)
            out[i] = y.permute(2, 0, 1, 3).reshape(rows, n_head, head_dim)
    return out


@lru_cache(maxsize=1)
def _scratch(n_kv_head: int, length: int, head_dim: int) -> Tensor:
    """Room for K and V of one slot as float32. Always the same place, which stays in the CPU's
    caches; new memory each time is not.
    """
    # a tensor made in inference mode could not be written outside of it
    with torch.inference_mode(False):
        return torch.empty(2, n_kv_head, length, head_dim)


def _chunk_in_products(q: Tensor, keys: Tensor, values: Tensor, context: int) -> Tensor:
    """`math` in three operators, 1.6x as fast on a CPU as the fused kernel; the scores are rounded
    to bfloat16, as in Hugging Face's "eager".

    q (Tq, n_head, head_dim); keys, values (n_kv_head, length, head_dim), all of a slot. Many rows
    go in pieces, each up to its own last key: a chunked prefill once more, which bounds the memory
    of the scores and skips half of what the mask would hide. Products over a number of keys that is
    no multiple of 16 take up to twice as long, and chunks of C - (B-1) tokens end anywhere: so a
    few keys more are read, and masked. Behind the context they are nobody's; they are cleared,
    since not even a mask keeps a stale NaN out of a sum.
    """
    rows, n_head, head_dim = q.shape
    n_kv_head, length = keys.shape[:2]
    groups, out = n_head // n_kv_head, torch.empty_like(q)
    behind = slice(context, round_up(context, length))
    keys[:, behind], values[:, behind] = 0, 0
    for first in range(0, rows, PIECE):
        # (Tp, n_kv_head, groups, head_dim)
        piece = q[first : first + PIECE].unflatten(1, (n_kv_head, groups))
        start, end = context - rows + first, round_up(context - rows + first + len(piece), length)
        # (n_kv_head, groups * Tp, head_dim): grouped heads are rows of one product
        query = piece.permute(1, 2, 0, 3).flatten(1, 2)
        mask = _added_mask(start, len(piece), end, groups, q.dtype)  # (groups * Tp, end)
        # (n_kv_head, groups * Tp, end)
        scores = torch.baddbmm(mask, query, keys[:, :end].transpose(1, 2), alpha=head_dim**-0.5)
        y = torch.bmm(scores.softmax(dim=-1), values[:, :end])  # (n_kv_head, groups * Tp, head_dim)
        out[first : first + PIECE] = y.unflatten(1, (groups, -1)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def round_up(keys: int, length: int) -> int:
    """To a multiple of 16, as far as the slot goes."""
    return min(-(-keys // 16) * 16, length)


PIECE = 256  # rows


@lru_cache(maxsize=8)
def _added_mask(start: int, length: int, end: int, groups: int, dtype: torch.dtype) -> Tensor:
    """`chunk_mask` for each head of a group, to be added to scores over `end` keys: 0 = sees, -inf
    = does not.
    """
    seen = torch.arange(end) <= torch.arange(start, start + length)[:, None]  # (length, end)
    return torch.zeros(groups * length, end, dtype=dtype).masked_fill(
        ~seen.repeat(groups, 1), float("-inf")
    )


def _sdpa_gathered(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """Many requests in one kernel launch, at the price of a padded copy: on a GPU, launches cost
    more than that.
    """
    longest = max(contexts)
    return gathered(
        q,
        keys,
        values,
        torch.tensor(slots, device=q.device),
        torch.tensor(contexts, device=q.device),
        longest,
    )


def gathered(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, contexts: Tensor, longest: int
) -> Tensor:
    """What differs between two batches of one shape is in tensors alone: slots, contexts (n,)
    int64. So a CUDA graph can replay it (graphs.py).

    Shorter requests are padded with their own last key, not with what lies behind it in the cache:
    a mask does not keep a NaN out of a sum.
    """
    rows, column = q.shape[1], torch.arange(longest, device=q.device)
    place = slots[:, None], torch.minimum(column, contexts[:, None] - 1)  # (n, 1), (n, longest)
    key = keys[:, *place].transpose(0, 1)  # (n, n_kv_head, longest, head_dim)
    value = values[:, *place].transpose(0, 1)  # (n, n_kv_head, longest, head_dim)
    last_seen = contexts[:, None] - rows + torch.arange(rows, device=q.device)  # (n, Tq)
    mask = column <= last_seen[:, :, None]  # (n, Tq, longest)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), key, value, attn_mask=mask[:, None], enable_gqa=True
    )
    return y.transpose(1, 2)  # (n, Tq, n_head, head_dim)


def xformers(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """The paper's back end (SARATHI, Sec 4.5): xformers' memory-efficient attention on the cache as
    it lies, CUDA only.

    The cache is one long row of keys, `length` of them to a slot; the padded-keys mask says how
    many of each slot are real. Slots that are not in the batch get zero queries, so nothing is
    gathered.
    """
    from xformers.ops import fmha  # here, because it only exists with CUDA

    n, rows, n_head, head_dim = q.shape
    n_kv_head, n_slots, length, _ = keys.shape
    groups = n_head // n_kv_head
    # the mask wants the requests in the order of their slots
    order = sorted(range(n), key=lambda i: slots[i])
    context_of = dict(zip(slots, contexts, strict=True))
    bias = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[rows if slot in context_of else 0 for slot in range(n_slots)],
        kv_padding=length,
        kv_seqlen=[context_of.get(slot, 1) for slot in range(n_slots)],
    )
    query = q[order].view(1, n * rows, n_kv_head, groups, head_dim)
    # (1, slots * length, n_kv_head, 1, head_dim)
    key = keys.view(n_kv_head, n_slots * length, head_dim).transpose(0, 1)[None, :, :, None]
    value = values.view(n_kv_head, n_slots * length, head_dim).transpose(0, 1)[None, :, :, None]
    shape = (1, n_slots * length, n_kv_head, groups, head_dim)
    y = fmha.memory_efficient_attention_forward(
        query, key.expand(shape), value.expand(shape), attn_bias=bias
    )
    out = torch.empty_like(q)
    out[order] = y.view(n, rows, n_head, head_dim)
    return out


BACKENDS: dict[str, Attend] = {
    "math": math,
    "sdpa": sdpa,
    "native": native.attend,
    "xformers": xformers,
}


def check_backend(name: str, device: torch.device) -> None:
    """Raises UserError for a name that is none, or a back end that this device cannot have,
    whatever the model.
    """
    if name != "auto" and name not in BACKENDS:
        raise UserError(f"unknown attention {name!r}: choose from auto, {', '.join(BACKENDS)}")
    if name == "xformers" and (device.type != "cuda" or find_spec("xformers") is None):
        raise UserError(
            f"attention 'xformers' needs a CUDA device and the xformers package; this is {device}:"
            " choose auto, sdpa or math"
        )


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, groups: int
) -> str:
    """The name of the back end for queries of this dtype, `groups` heads of them to each key head.

    "auto": on a CPU `native`, where it can run, and else sdpa, which runs everywhere. (On CUDA
    `LLM` measures: see `fastest`.)
    """
    check_backend(name, device)
    if name == "native":
        native.check(device, dtype, head_dim, groups)
    if name == "auto":
        return "native" if native.usable(device, dtype, head_dim, groups) else "sdpa"
    return name


def candidates() -> list[str]:
    """What "auto" has to choose from on CUDA: the paper's back end too, where it is installed."""
    return ["sdpa"] if find_spec("xformers") is None else ["sdpa", "xformers"]


def fastest(
    names: Sequence[str], n_head: int, keys: Tensor, values: Tensor, repeats: int = 5
) -> str:
    """The back end that takes least for a decode of every slot and for a chunk, half a slot deep in
    one layer's cache, as it lies.

    One that cannot run here (another dtype, a GPU that it was not built for) is passed over; the
    first name must run.
    """
    first, *others = names
    if not others:
        return first
    slots, context, device = list(range(keys.shape[1])), max(1, keys.shape[2] // 2), keys.device
    decodes = torch.zeros(len(slots), 1, n_head, keys.shape[3], dtype=keys.dtype, device=device)
    chunk = torch.zeros(
        1, min(256, context), n_head, keys.shape[3], dtype=keys.dtype, device=device
    )

    def seconds(name: str) -> float:
        def once() -> float:
            begin = synchronized_clock(device)
            BACKENDS[name](decodes, keys, values, slots, [context] * len(slots))
            BACKENDS[name](chunk, keys, values, slots[:1], [context])
            return synchronized_clock(device) - begin

        once()  # warms up
        return min(once() for _ in range(repeats))

    best, least = first, seconds(first)
    for name in others:
        try:
            taken = seconds(name)
        except (RuntimeError, NotImplementedError, ImportError, ValueError):
            continue
        if taken < least:
            best, least = name, taken
    return best


def synchronized_clock(device: torch.device) -> float:
    """The wall clock in seconds, once the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
