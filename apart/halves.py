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
from paged.blocks import BlockMemory
from paged.prompts import Parts
from scheduler import Memory, Scheduler


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

    def revoke(self) -> bool:
        """Take the room of the newest one back: it will be prefilled here. False: there is none."""
        if not self.coming:
            return False
        second, _ = self.coming.popitem()
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


class KeepsSlots(Keeps, Memory):
    pass


class KeepsBlocks(Keeps, BlockMemory):
    pass


class ReceivesSlots(Receives, Memory):
    pass


class ReceivesBlocks(Receives, BlockMemory):
    pass


def may_run(scheduler: Scheduler) -> bool:
    """Whether a policy can schedule something now, while requests wait or run.

    A decode engine that stands still takes room back from what is coming: at its head may wait a
    preempted request that is larger than what is left. A prefill engine waits for a fetch.
    """
    if scheduler.running:
        return True
    while scheduler.waiting and not scheduler.can_admit():
        if not (isinstance(scheduler.memory, Receives) and scheduler.memory.revoke()):
            return False
    return bool(scheduler.waiting)
