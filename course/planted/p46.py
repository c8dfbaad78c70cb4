"""Rows of one slot are stored one after the other, whatever their positions."""

from torch import Tensor

from kvcache import KVCache

exercise = "2"
caught_by = "S3"
message = "the last writes (layer, slots, positions)"


class Slots(KVCache):
    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        for slot in slots.unique().tolist():
            own = slots == slot
            first, count = int(positions[own][0]), int(own.sum())
            for cache, rows in ((self.k, k), (self.v, v)):
                end = min(first + count, self.length)
                cache[layer, :, slot, first:end] = rows[own].transpose(0, 1)[:, : end - first]
