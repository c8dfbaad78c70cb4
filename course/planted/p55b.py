"""A slot is never filled to its last place."""

from kvcache import CacheError, KVCache

exercise = "2"
caught_by = "S2"
message = "how many tokens it holds"


class Slots(KVCache):
    def extend(self, slot: int, tokens: int) -> int:
        if self.used[slot] is not None and self.used[slot] + tokens >= self.length:
            raise CacheError("it does not fit")
        return super().extend(slot, tokens)
