"""The KV cache: allocated once, at the largest length, for B slots; K and V are written in place
(SARATHI, Sec 4.5).

One slot holds one request from its first chunk to its last token. No memory is allocated in an
iteration.
"""

import torch
from torch import Tensor

from configs import GPU, ModelConfig


class CacheError(RuntimeError):
    """The engine used the cache wrongly: a free slot, a full slot, or no slot left. A bug, not a
    user's mistake.
    """


def max_batch_size(model: ModelConfig, gpu: GPU, length: int, bytes_per_value: int = 2) -> int:
    """B = floor((M_G - M_S) / (L * m_kv)): how many requests of `length` tokens fit (SARATHI, Sec
    4.3.1).

    M_G is the GPU's memory and M_S that of the weights, both in bytes; L is in tokens; m_kv is
    bytes per token. The formula leaves nothing for activations, so that real systems fit fewer. 0
    means that not one request fits.
    """
    free = gpu.memory - model.parameters * bytes_per_value
    return max(0, int(free // (length * model.kv_bytes_per_token(bytes_per_value))))


def max_tokens(
    model: ModelConfig, gpu: GPU, tp: int = 1, utilization: float = 0.9, bytes_per_value: int = 2
) -> int:
    """How many tokens of all requests together fit `tp` GPUs that share the model, where no request
    reserves more than it uses.

    utilization: share of the memory that weights and cache may take; the rest is for activations
    (0.9: vLLM's gpu_memory_utilization).
    """
    copies = max(1, tp // model.n_kv_head)  # GPUs beyond the number of KV heads hold copies
    free = tp * gpu.memory * utilization - model.parameters * bytes_per_value
    return max(0, int(free // (model.kv_bytes_per_token(bytes_per_value) * copies)))


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
        # Heads before slots: a head's keys lie in one run, and (slots, length) can be read as one
        # long row of keys.
        shape = (model.n_layer, model.n_kv_head, slots, length, model.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        # views, (n_kv_head, slots, length, head_dim) each
        self.layers = list(zip(self.k, self.v, strict=True))
        self.slots, self.length = slots, length
        self.reset()

    def reset(self) -> None:
        """Free all slots. The memory stays; stale values are never seen: a context only covers what
        was written.
        """
        # tokens in each slot; None: the slot is free
        self.used: list[int | None] = [None] * self.slots

    def allocate(self) -> int:
        """A free slot, now empty. The lowest one, so that runs can be reproduced."""
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
        """Store T new tokens in place. slots, positions: (T,) int64; k, v: (T, n_kv_head,
        head_dim).
        """
        for cache, new in zip(self.layers[layer], (k, v), strict=True):
            cache[:, slots, positions] = new.transpose(0, 1)  # (n_kv_head, T, head_dim)

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
