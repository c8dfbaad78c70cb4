"""E2, lesson 2: the slots of the KV cache. About 15 lines: four short methods.

The cache is allocated once. A slot holds one request, from its first chunk to its last token.
"""

import torch
from torch import Tensor

from configs import ModelConfig
from kvcache import CacheError  # raise it where the docstrings say so


class Slots:
    """Keys and values of all layers for `slots` requests of up to `length` tokens each."""

    def __init__(
        self,
        model: ModelConfig,
        slots: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        shape = (model.n_layer, model.n_kv_head, slots, length, model.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.slots, self.length = slots, length
        self.used: list[int | None] = [None] * slots  # tokens in each slot; None: it is free

    def allocate(self) -> int:
        """The lowest free slot, now empty (0 tokens). CacheError if none is free."""
        raise NotImplementedError

    def free(self, slot: int) -> None:
        """Give a slot back. CacheError if it is free already."""
        raise NotImplementedError

    def extend(self, slot: int, tokens: int) -> int:
        """Take the next `tokens` places of a slot; returns the position of the first.

        CacheError if the slot is free, or if they do not fit its `length`. Then nothing changes.
        """
        raise NotImplementedError

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store T tokens in place: self.k and self.v stay the same tensors.

        slots, positions (T,) int64; k, v (T, n_kv_head, head_dim).
        """
        raise NotImplementedError
