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
        goes_on = self.finish_reason == "length" and self.whole.max_tokens > 1
        return goes_on and not self.fetched


def second_half(first: First) -> Request:
    prompt, left = Parts([first.whole.prompt, first.output]), first.whole.max_tokens - 1
    return replace(first.whole, prompt=prompt, max_tokens=left, arrival=0.0, output=[])


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
        more = super().prefill(second)[0] + self.next_tokens([*others, second])
        if self.taken and not self.holds(more):
            return False
        super().take(second)
        self.coming[second] = None
        return True

    def revoke(self) -> None:
        """Take the room of the newest back: it will be prefilled here, if at all."""
        super().give(self.coming.popitem()[0])

    def prefill(self, newcomer: Request) -> tuple[int, int]:
        if newcomer in self.coming:
            hit = newcomer.prefill_length - 1
            if self.taken == self.whole(newcomer.prefill_length):
                # nobody else is here: `check` says that it fits, and so does its next token
                return -self.next_tokens([newcomer]), hit
            return 0, hit
        return super().prefill(newcomer)

    def take(self, newcomer: Request) -> int:
        if newcomer in self.coming:
            del self.coming[newcomer]
            return newcomer.prefill_length - 1
        return super().take(newcomer)


class HalfSlots(Halves, Memory):
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
    scheduler, memory = loop.scheduler, loop.scheduler.memory
    while memory.coming and not memory.holds(memory.next_tokens(scheduler.running)):
        memory.revoke()
    while not (done := loop.step()):
        if scheduler.running or not (scheduler.waiting and memory.coming):
            break
        memory.revoke()
    return done
