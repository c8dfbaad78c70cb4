"""It reads the whole slot, and hopes that the rest is empty."""

from collections.abc import Sequence

import torch
from torch import Tensor

exercise = "4"
caught_by = "A1"
message = "another request's old keys"


def attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    out = torch.empty_like(q)
    groups = q.shape[2] // keys.shape[0]
    for i, (slot, context) in enumerate(zip(slots, contexts, strict=True)):
        rows = q.shape[1]
        for head in range(q.shape[2]):
            kv = head // groups
            key, value = keys[kv, slot, :], values[kv, slot, :]
            scores = q[i, :, head] @ key.T / q.shape[-1] ** 0.5
            mask = torch.ones(rows, keys.shape[2]).tril(context - rows).bool()
            out[i, :, head] = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
    return out
