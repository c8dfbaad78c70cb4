"""A request in two halves, and what the memories at both ends keep for it.

    First    runs on a prefill engine, and ends with its first output token.
    Second   runs on a decode engine. Its prompt is the first half's prompt and that token. All of
             it but the last token is a hit: its keys and values come over the link. So its
             "prefill" is one row, which yields the second output token.

No policy knows of this. The memories of both engines do (`scheduler.Memory`):

    Keeps      a prefill engine's. It keeps what a first half holds until that has been fetched.
    Receives   a decode engine's. It takes room for a second half before the fetch begins. So what
               is under way always has a place.

If a decode engine preempts a second half, its keys and values are lost, and it is prefilled there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from batch import Request
from loop import Loop
from paged.blocks import BlockMemory, Table
from paged.prompts import Parts
from scheduler import Memory


@dataclass(eq=False, slots=True)
class First(Request):
    """The first half of `whole`: its prompt, and one output token."""

    whole: Request | None = None

    @staticmethod
    def of(whole: Request) -> "First":
        return First(
            whole.request_id, whole.prompt, 1, whole.stop_ids, whole.arrival,
            sampler=whole.sampler, tags=whole.tags, whole=whole,
        )  # fmt: skip

    @property
    def goes_on(self) -> bool:
        """Whether a second half follows. Not after a stop token, or if one token was wanted."""
        return self.finish_reason == "length" and self.whole.max_tokens > 1


def second_half(first: First, arrival: float = 0.0) -> Request:
    whole = first.whole
    return Request(
        whole.request_id, Parts([whole.prompt, first.output]), whole.max_tokens - 1, whole.stop_ids,
        arrival, sampler=whole.sampler, tags=whole.tags,
    )  # fmt: skip


class Keeps:
    """Mixed into the memory of a prefill engine."""

    def give(self, request: Request) -> None:
        if not (isinstance(request, First) and request.goes_on):
            super().give(request)

    def let_go(self, first: First) -> None:
        """The first half has been fetched."""
        super().give(first)


class Receives:
    """Mixed into the memory of a decode engine. coming: second halves that have room, but do not
    run yet, in order."""

    def __init__(self, *args: object):
        super().__init__(*args)
        self.coming: dict[Request, None] = {}

    def reserve(self, second: Request, running: Sequence[Request]) -> bool:
        """Take room for it, if there is room for all next tokens, too. Else it would preempt."""
        nexts = self.next_tokens((*running, *self.coming, second))
        if self.taken and not self.holds(super().prefill(second)[0] + nexts):
            return False
        super().take(second)
        self.coming[second] = None
        return True

    def revoke(self, second: Request | None = None) -> bool:
        """Take the room of one (None: the newest) back: it will be prefilled here, if at all.

        False: there is none.
        """
        second = second or next(reversed(self.coming), None)
        if second not in self.coming:
            return False
        del self.coming[second]
        super().give(second)
        return True

    def prefill(self, newcomer: Request) -> tuple[int, int]:
        if newcomer in self.coming:
            return 0, newcomer.prefill_length - 1
        return super().prefill(newcomer)

    def take(self, newcomer: Request) -> int:
        if newcomer in self.coming:
            del self.coming[newcomer]
            return newcomer.prefill_length - 1
        return super().take(newcomer)


class HashedOnce(BlockMemory):
    """Blocks of one of several engines: a prompt is hashed once, whichever of them are asked.

    known: request id -> the keys of its blocks so far; shared by all engines.
    """

    known: dict[int, list[bytes]]

    def _table(self, newcomer: Request) -> Table:
        if self._newcomer[0] is not newcomer:
            keys = self.known.setdefault(newcomer.request_id, [])
            self._newcomer = newcomer, Table(keys=keys)
        return self._newcomer[1]


class KeepsSlots(Keeps, Memory):
    pass


class KeepsBlocks(Keeps, HashedOnce):
    pass


class ReceivesSlots(Receives, Memory):
    pass


class ReceivesBlocks(Receives, HashedOnce):
    pass


def may_run(loop: Loop, now: float) -> bool:
    """Let in who has arrived by now. Then: whether the policy can schedule something.

    A decode engine takes room back from what is coming, the newest first: before it preempts what
    runs, and if it stands still. (At its head may wait a preempted request that is larger than what
    is left.) A prefill engine waits for a fetch.
    """
    scheduler = loop.scheduler
    memory, running = scheduler.memory, scheduler.running
    receives = isinstance(memory, Receives)
    while loop.arriving and loop.arriving[0].arrival <= now:
        scheduler.add(loop.arriving.popleft())
    if running:
        while receives and not memory.holds(memory.next_tokens(running)) and memory.revoke():
            pass
        return True
    while scheduler.waiting and not scheduler.can_admit():
        if not (receives and memory.revoke()):
            return False
    return bool(scheduler.waiting)
