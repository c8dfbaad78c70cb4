"""The KV cache: allocated once, for B slots at the largest length (SARATHI, Sec 4.5).

One slot holds one request from its first chunk to its last token. K and V are written in place. No
memory is allocated in an iteration.
"""

import torch
from torch import Tensor

from batch import Request
from configs import ModelConfig


class CacheError(RuntimeError):
    """A bug in the engine: it used a free or a full slot, or wanted a slot when none was left."""


class KVCache:
    """Keys and values of all layers for `slots` requests of up to `length` tokens each."""

    def __init__(
        self,
        model: ModelConfig,
        slots: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        # Heads come before slots, so that all slots of a head can be read as one long row of keys.
        shape = (model.n_layer, model.n_kv_head, slots, length, model.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.k, self.v, strict=True))  # (n_kv_head, slots, length, head_dim)
        self.slots = slots
        self.length = length
        self.reset()

    def reset(self) -> None:
        """Free all slots. Old values stay in the tensors, but no request reads them."""
        self.used: list[int | None] = [None] * self.slots  # tokens in each slot; None: it is free

    def allocate(self, request: Request | None = None) -> int:
        """A free slot for a request, now empty. The lowest, so that runs can be reproduced."""
        for slot, used in enumerate(self.used):
            if used is None:
                self.used[slot] = 0
                return slot
        raise CacheError(f"no slot left: all {self.slots} are in use")

    def free(self, slot: int) -> None:
        self._check(slot)
        self.used[slot] = None

    def extend(self, slot: int, tokens: int) -> int:
        """Take the next `tokens` places of a slot; returns the position of the first."""
        start = self._check(slot)
        if start + tokens > self.length:
            raise CacheError(
                f"slot {slot} holds {start} of {self.length} tokens; {tokens} more do not fit"
            )
        self.used[slot] = start + tokens
        return start

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store T tokens in place. slots, positions (T,) int64; k, v (T, n_kv_head, head_dim)."""
        for cache, new in zip(self.layers[layer], (k, v), strict=True):
            cache[:, slots, positions] = new.transpose(0, 1)  # (n_kv_head, T, head_dim)

    def read(self, layer: int, slots: tuple[int, ...], contexts: tuple[int, ...]) -> tuple:
        """What attention reads: keys, values, and the place of each slot in them.

        Here the place is the slot itself. (more/paged/ copies blocks, and needs `contexts`.)
        """
        keys, values = self.layers[layer]
        return keys, values, slots

    @property
    def bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    def _check(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise CacheError(f"slot {slot} does not exist: there are {self.slots}")
        used = self.used[slot]
        if used is None:
            raise CacheError(f"slot {slot} is free: allocate it before use")
        return used
