"""Every write makes a new tensor."""

from torch import Tensor

from kvcache import KVCache

exercise = "2"
caught_by = "S4"
message = "allocated once"


class Slots(KVCache):
    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        for name, new in (("k", k), ("v", v)):
            cache = getattr(self, name).clone()
            cache[layer][:, slots, positions] = new.transpose(0, 1)
            setattr(self, name, cache)
