"""The two caches of a beam search: segments and a table, or copies.

Both begin when the prefill, whole or in chunks, has written the prompt's keys and values into a
slot of `KVCache`.

    SegmentMemory   keeps them there, once for all beams. When beams change places, only the table
                    changes.
    StandardMemory  copies them for each beam. Each decode, and each change of places, copies
                    everything (as transformers' DynamicCache).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention import Span
from kvcache import KVCache
from more.beam.request import segment_length


class SegmentMemory:
    """Keys and values of one search (segment KV, Sec 3.2).

    keys, values: the response, (n_layer, N_step, BW, n_kv_head, head_dim): sequence first.
    table: (BW, N_step) int64. Beam b reads step t of the response from place table[b, t].
    """

    def __init__(self, cache: KVCache, slot: int, prompt: int, beam_width: int):
        self.slot = slot
        self.prompt = prompt
        self.beam_width = beam_width
        self.steps = 0  # of the response, whose keys and values are there
        n_layer, n_kv_head, _, _, head_dim = cache.k.shape
        shape = (n_layer, 0, beam_width, n_kv_head, head_dim)
        self.keys, self.values = cache.k.new_empty(shape), cache.v.new_empty(shape)
        self.table = torch.empty((beam_width, 0), dtype=torch.int64, device=cache.k.device)

    def reorder(self, parents: list[int]) -> None:
        """Beam b now continues beam parents[b]: it takes over that beam's row, with all steps.

        If it took over the last step only, it would read other beams' keys at earlier steps.
        """
        self.table = self.table[parents]

    def extend(self) -> None:
        """A place for each beam's next token: beam b writes to place b."""
        if self.steps == self.table.shape[1]:
            self.grow()
        self.table[:, self.steps] = torch.arange(self.beam_width)
        self.steps += 1

    def grow(self) -> None:
        """Make room for 16 more steps: copy each segment into a longer one, and drop the old."""
        length = segment_length(self.steps + 1)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty((old.shape[0], length, *old.shape[2:]))
            new[:, : self.steps] = old
            setattr(self, name, new)
        table = self.table.new_zeros((self.beam_width, length))
        table[:, : self.steps] = self.table
        self.table = table

    @property
    def bytes(self) -> int:
        """Bytes of the response. Those of the prompt are in its slot."""
        return 2 * self.keys.numel() * self.keys.element_size()


class StandardMemory:
    """A copy of everything for each beam.

    layers[i] = [keys, values], each (n_kv_head, BW, length, head_dim). The prompt also stays in its
    slot. The paper's formulas do not count that.
    """

    def __init__(self, cache: KVCache, slot: int, prompt: int, beam_width: int):
        self.prompt = prompt
        self.beam_width = beam_width
        self.steps = 0
        self.layers = [
            [part[:, slot, None, :prompt].repeat(1, beam_width, 1, 1) for part in layer]
            for layer in cache.layers
        ]

    def reorder(self, parents: list[int]) -> None:
        if self.beam_width == 1:
            return  # transformers without beams reorders nothing either
        chosen = torch.tensor(parents, device=self.layers[0][0].device)  # (BW,)
        for layer in self.layers:
            for i in range(2):
                layer[i] = layer[i].index_select(1, chosen)

    def extend(self) -> None:
        self.steps += 1

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v (BW, n_kv_head, head_dim)."""
        own = self.layers[layer]
        for i, new in enumerate((k, v)):
            own[i] = torch.cat((own[i], new.transpose(0, 1)[:, :, None]), dim=2)

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for layer in self.layers for part in layer)


MEMORIES = {"segment": SegmentMemory, "standard": StandardMemory}


@dataclass(slots=True)
class BeamSpan(Span):
    """The rows of one search, one for each beam. They come after all other rows of a batch."""

    memory: SegmentMemory | StandardMemory
