"""The tensors of a cache in blocks: a `KVCache` whose slots are rows of a table.

To attention, a slot is still a number of a request. `write` and `read` look up its blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from batch import Request
from command.checks import UserError
from configs import ModelConfig
from kvcache import KVCache
from more.paged.blocks import BlockMemory, Blocks, real_memory
from scheduler import Scheduler


class PagedCache(KVCache):
    """Keys and values in the blocks of a `BlockMemory`, for `slots` requests at once.

    k, v: (n_layer, n_kv_head, blocks, block_size, head_dim). table: (slots, most blocks of a
    request) int64, on the device: row s has the blocks of slot s. length: tokens that a request
    may have.
    """

    def __init__(
        self,
        model: ModelConfig,
        slots: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        *,
        memory: BlockMemory,
    ):
        self.memory = memory
        size = memory.block_size
        super().__init__(model, memory.most, size, dtype, device)
        self.slots = slots
        self.length = -(-length // size) * size
        rows = torch.arange(slots * self.length // size, device=device) % memory.most
        self.table = rows.unflatten(0, (slots, -1))  # a benchmark that maps nothing reads far apart
        self.reset()

    def reset(self) -> None:
        """Free all slots. What is computed stays, and can be found by its tokens."""
        super().reset()
        self.owner: list[Request | None] = [None] * self.slots
        self.mapped = [0] * self.slots  # blocks in each row of the table
        self.memory.reset()

    def allocate(self, request: Request | None = None) -> int:
        """A free slot for a request that its scheduler has admitted. It begins after the hit."""
        slot = super().allocate(request)
        self.owner[slot] = request
        self.used[slot] = request.prefilled
        self.mapped[slot] = 0
        return slot

    def extend(self, slot: int, tokens: int) -> int:
        """As `KVCache.extend`; a decode takes a block if the last one is full."""
        start = super().extend(slot, tokens)
        mapped = self.mapped[slot]
        blocks = self.memory.cover(self.owner[slot], start + tokens)
        if len(blocks) > mapped:
            self.table[slot, mapped : len(blocks)] = torch.tensor(blocks[mapped:])
            self.mapped[slot] = len(blocks)
        return start

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        size = self.memory.block_size
        blocks = self.table[slots, positions // size]  # (T,)
        super().write(layer, blocks, positions % size, k, v)

    def read(self, layer: int, slots: Sequence[int], contexts: Sequence[int]) -> tuple:
        """A copy of the blocks of these slots, one row each: (n_kv_head, n, tokens, head_dim)."""
        count = -(-max(contexts) // self.memory.block_size)
        blocks = self.table[list(slots), :count]  # (n, count)
        keys, values = (part[:, blocks].flatten(2, 3) for part in self.layers[layer])
        return keys, values, range(len(slots))


def make_cache(
    model: ModelConfig,
    slots: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks | None,
    cache_tokens: int | None,
) -> KVCache:
    """Slots (blocks: None), or the blocks of `real_memory`."""
    memory = real_memory(blocks, slots, length, cache_tokens)
    if memory is None:
        return KVCache(model, slots, length, dtype, device)
    return PagedCache(model, slots, length, dtype, device, memory=memory)


def manage(scheduler: Scheduler, cache: KVCache | None) -> Scheduler:
    """Let a scheduler account for blocks, if the cache has any.

    Raises UserError unless they are as many as the scheduler's `cache_tokens` asks for.
    """
    if isinstance(cache, PagedCache):
        asked = scheduler.memory.capacity
        memory = cache.memory
        tokens = cache.slots * cache.length if asked is None else asked
        if tokens // memory.block_size != memory.most:
            raise UserError(
                f"cache_tokens is {asked}, and the cache has {memory}: call resize_cache"
            )
        scheduler.memory = memory
    return scheduler
