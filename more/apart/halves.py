"""A request in two halves, and what the memories at both ends keep for it.

    First    runs on a prefill engine, and ends with its first output token.
    Second   runs on a decode engine. Its prompt is the first half's prompt and that token. All of
             it but the last token is a hit: its keys and values come over the link. So its
             "prefill" is one row, which yields the second output token.

No policy knows of this. The memories of both engines do (`scheduler.Memory`). A prefill engine's
keeps what a first half holds until that has been fetched. A decode engine's takes room for a second
half before the fetch begins. So what is under way always has a place.

If a decode engine preempts a second half, its keys and values are lost, and it is prefilled there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batch import Request
from loop import Loop
from more.paged.blocks import BlockMemory, Table
from more.paged.prompts import Parts
from scheduler import Memory, Scheduler
from timeline import Iteration


@dataclass(eq=False, slots=True)
class First(Request):
    """The first half of `whole`: its prompt, and one output token."""

    whole: Request | None = None
    fetched: bool = False

    @staticmethod
    def of(whole: Request) -> "First":
        own = {"sampler": whole.sampler, "tags": whole.tags, "whole": whole}
        return First(whole.request_id, whole.prompt, 1, whole.stop_ids, whole.arrival, **own)

    @property
    def stays(self) -> bool:
        """Whether its keys and values are to be fetched. Not after a stop token, for example."""
        goes_on = self.finish_reason == "length" and self.whole.ends_after > 1
        return goes_on and not self.fetched


def second_half(first: First) -> Request:
    whole = first.whole
    return replace(
        whole,
        prompt=Parts([whole.prompt, first.output]),
        max_tokens=whole.max_tokens - 1,
        ends_after=whole.ends_after - 1,
        arrival=0.0,
        output=[],
    )


class Halves:
    """Mixed into the memory of an engine that may have halves. coming: second halves that have
    room, but do not run yet, in order.
    """

    def __init__(self, *args: object):
        super().__init__(*args)
        self.coming: dict[Request, None] = {}

    def give(self, request: Request) -> None:
        if not getattr(request, "stays", False):
            super().give(request)

    def reserve(self, second: Request, scheduler: Scheduler) -> bool:
        """Take room for it, if there is room for all next tokens, too. Else it would preempt.

        Who was preempted here, or has come, is before it.
        """
        others = [*scheduler.running, *self.coming]
        if scheduler.waiting or len(others) >= scheduler.max_batch_size:
            return False
        if self.taken and not super().holds(others, second):
            return False
        super().take(second)
        second.prefilled = second.context = 0  # it is not admitted yet
        self.coming[second] = None
        return True

    def revoke(self) -> None:
        """Take the room of the newest back: it will be prefilled here, if at all."""
        super().give(self.coming.popitem()[0])

    def holds(self, decodes: Sequence[Request], newcomer: Request | None = None) -> bool:
        if newcomer in self.coming:  # it has its room: only its next token is new
            # nobody else is here: `check` says that it fits, and so does its next token
            alone = not decodes and len(self.coming) == 1
            return alone or super().holds([*decodes, newcomer])
        return super().holds(decodes, newcomer)

    def prefill(self, newcomer: Request) -> tuple[int, int]:
        if newcomer in self.coming:
            return 0, newcomer.prefill_length - 1
        return super().prefill(newcomer)

    def to_run(self, newcomer: Request) -> int:
        return newcomer.prefill_length - self.prefill(newcomer)[1]

    def take(self, newcomer: Request) -> None:
        if newcomer in self.coming:
            del self.coming[newcomer]
            newcomer.prefilled = newcomer.context = newcomer.prefill_length - 1
        else:
            super().take(newcomer)


class Slots(Memory):
    def prefill(self, newcomer: Request) -> tuple[int, int]:
        """As `BlockMemory.prefill`: nothing is a hit."""
        return newcomer.prefill_length, 0


class HalfSlots(Halves, Slots):
    pass


class HalfBlocks(Halves, BlockMemory):
    """A prompt is hashed once, whichever of several engines are asked.

    known: request id -> the keys of its blocks so far; shared by all engines.
    """

    known: dict[int, list[bytes]]

    def _table(self, newcomer: Request) -> Table:
        if self._newcomer[0] is not newcomer:
            keys = self.known.setdefault(newcomer.request_id, [])
            self._newcomer = newcomer, Table(keys=keys)
        return self._newcomer[1]


def step(loop: Loop) -> Iteration | None:
    """An iteration of an engine's loop. None: the policy finds nothing to run now.

    A decode engine takes room back from what is coming, the newest first: before it preempts what
    runs, and if it stands still. (A preempted request may be larger than what is left.) A prefill
    engine waits for a fetch.
    """
    scheduler = loop.scheduler
    memory = loop.scheduler.memory
    while memory.coming and not memory.holds(scheduler.running):
        memory.revoke()
    while not (done := loop.step()):
        if scheduler.running or not (scheduler.waiting and memory.coming):
            break
        memory.revoke()
    return done
