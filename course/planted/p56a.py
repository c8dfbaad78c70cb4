"""Slots 0 and 1 are False and True."""

from kvcache import KVCache

exercise = "2"
caught_by = "K7"
message = "A slot comes back"


class Slots(KVCache):
    def allocate(self) -> int:
        slot = super().allocate()
        return bool(slot) if slot < 2 else slot
