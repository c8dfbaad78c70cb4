"""The softmax overflows: no maximum is subtracted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention import chunk_mask

exercise = "4"
caught_by = "A1"
message = "exp(800) is inf"


def attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    out = torch.empty_like(q)
    groups = q.shape[2] // keys.shape[0]
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        rows = q.shape[1]
        for head in range(q.shape[2]):
            kv = head // groups
            key, value = keys[kv, slot, :context], values[kv, slot, :context]
            scores = q[i, :, head] @ key.T / q.shape[-1] ** 0.5
            mask = chunk_mask(context - rows, rows)
            weights = scores.exp() * mask
            out[i, :, head] = weights / weights.sum(-1, keepdim=True) @ value
    return out
