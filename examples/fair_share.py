"""Fair shares: of the users whose requests wait, the one who was served least is next.

A request's user is its tag `user`. What a user was served are tokens: a prompt token counts once,
an output token twice. Who begins to wait is lifted to the least of those who wait already, so being
away earns nothing. (Virtual token counters: Sheng et al., OSDI 2024.)
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

    def add(self, request: Request) -> None:
        waiting, user = set(map(user_of, self.waiting)), user_of(request)
        if waiting and user not in waiting:
            self.served[user] = max(self.served[user], min(self.served[each] for each in waiting))
        super().add(request)

    def can_admit(self) -> bool:
        if self.waiting:
            first = min(self.waiting, key=lambda request: self.served[user_of(request)])
            self.waiting.remove(first)  # in place: micro-batches of a pipeline share one queue
            self.waiting.appendleft(first)
        return super().can_admit()

    def admit(self) -> Request | None:
        request = super().admit()
        if request and not request.preemptions:  # to run it again is no service
            self.served[user_of(request)] += len(request.prompt)
        return request

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        for request in batch.sampled:
            self.served[user_of(request)] += OUTPUT
        return super().update(batch, tokens)


def user_of(request: Request) -> str:
    return request.tags.get("user", "")
