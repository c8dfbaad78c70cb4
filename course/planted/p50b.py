"""What a slot holds is kept in a list of its own, and not in `used`."""

from kvcache import CacheError, KVCache

exercise = "2"
caught_by = "S2"
message = "how many tokens each slot holds"


class Slots(KVCache):
    @property
    def used(self) -> list[int | None]:
        return [None] * self.slots

    @used.setter
    def used(self, tokens: list[int | None]) -> None:
        self.own = tokens

    def allocate(self) -> int:
        if None not in self.own:
            raise CacheError("no slot is free")
        slot = self.own.index(None)
        self.own[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        if self.own[slot] is None:
            raise CacheError("it is free")
        self.own[slot] = None

    def extend(self, slot: int, tokens: int) -> int:
        start = self.own[slot]
        if start is None or start + tokens > self.length:
            raise CacheError("it does not fit")
        self.own[slot] = start + tokens
        return start
