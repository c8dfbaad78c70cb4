"""Fair shares: of the users whose requests wait, the one who was served least is next.

A request's user is its tag `user`. What a user was served are tokens: a prompt token counts once,
an output token twice. Being away earns nothing: who begins to wait is lifted to the least of those
who wait already; if nobody does, to the user whose request left the queue last. (Virtual token
counters: Sheng et al., OSDI 2024, Algorithm 2.)
"""

from collections import Counter
from collections.abc import Sequence

from batch import Batch, Request
from scheduler import SarathiServe

OUTPUT = 2  # what an output token counts


class FairShare(SarathiServe):
    name = "fair_share"

    def __init__(self, *sizes: int | None):
        super().__init__(*sizes)
        self.served: Counter[str] = Counter()  # by user
        self.last = ""  # the user whose request left the queue last
        self.waits: Counter[str] = Counter()  # requests that wait, by user

    def add(self, request: Request) -> None:
        user, waiting = user_of(request), [each for each, count in self.waits.items() if count]
        if user not in waiting:
            least = min(self.served[each] for each in waiting or [self.last])
            self.served[user] = max(self.served[user], least)
        super().add(request)
        self.waits[user] += 1

    def cancel(self, request: Request) -> bool:
        if request in self.waiting:
            self.leaves(request)
        return super().cancel(request)

    def preempt(self, request: Request | None = None) -> Request:
        request = super().preempt(request)
        self.waits[user_of(request)] += 1
        return request

    def leaves(self, request: Request) -> None:
        self.last = user_of(request)
        self.waits[self.last] -= 1

    def can_admit(self) -> bool:
        if self.waiting:
            first = min(self.waiting, key=lambda request: self.served[user_of(request)])
            self.waiting.remove(first)
            self.waiting.appendleft(first)
        return super().can_admit()

    def admit(self) -> Request | None:
        request = super().admit()
        if request:
            self.leaves(request)
            if not request.preemptions:  # to run it again is no service
                self.served[self.last] += len(request.prompt)
        return request

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        for request in batch.sampled:
            self.served[user_of(request)] += OUTPUT
        return super().update(batch, tokens)


def user_of(request: Request) -> str:
    return request.tags.get("user", "")
