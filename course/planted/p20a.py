"""A slot that is freed never comes back."""

from kvcache import KVCache

exercise = "2"
caught_by = "K7"
message = "A slot comes back"


class Slots(KVCache):
    def free(self, slot: int) -> None:
        self._check(slot)
        self.gone = {*getattr(self, "gone", ()), slot}
        self.used[slot] = None

    def allocate(self) -> int:
        for slot in getattr(self, "gone", ()):
            self.used[slot] = 0
        try:
            return super().allocate()
        finally:
            for slot in getattr(self, "gone", ()):
                self.used[slot] = None
