"""Slots 0 and 1 are False and True."""

from kvcache import KVCache

exercise = "2"
caught_by = "S1"
message = "The lowest free slot"


class Slots(KVCache):
    def allocate(self) -> int:
        slot = super().allocate()
        return bool(slot) if slot < 2 else slot
