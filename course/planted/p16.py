"""Query head h reads key head h % n_kv_head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention import chunk_mask

exercise = "4"
caught_by = "A1"
message = "not h % n"


def attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    out = torch.empty_like(q)
    n_kv = keys.shape[0]
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        rows = q.shape[1]
        for head in range(q.shape[2]):
            kv = head % n_kv
            key, value = keys[kv, slot, :context], values[kv, slot, :context]
            scores = q[i, :, head] @ key.T / q.shape[-1] ** 0.5
            mask = chunk_mask(context - rows, rows)
            out[i, :, head] = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
    return out
