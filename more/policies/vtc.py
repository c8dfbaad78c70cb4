"""Virtual token counters (VTC): of the clients whose requests wait, the least served one is next.

A client is the tag `user`. What it was served are tokens: WP for a prompt token, WQ for an output
token. Idle time earns nothing: a client that begins to wait is lifted to the least of those that
wait, or, if nobody does, to the one whose request left the queue last. So two clients that both
have requests waiting never differ by more than a bound that does not grow with time (Sheng et al.,
OSDI 2024, arXiv 2401.00588, Algorithm 2).

Fair shares are not equal waits: who sends less than its share hardly waits.
Left out: weights of clients, and counters that a prediction of the output moves in advance.
"""

from collections import Counter
from collections.abc import Sequence

from batch import Batch, Request
from scheduler import SarathiServe

WP = 1
WQ = 2


class VTC(SarathiServe):
    # asks: for this tag
    name = "vtc"
    asks = "user"

    def __init__(self, *sizes: int | None):
        super().__init__(*sizes)
        self.served: Counter[str] = Counter()  # by client
        self.last = ""  # the client whose request left the queue last

    def add(self, request: Request) -> None:
        client = client_of(request)
        waiting = set(map(client_of, self.waiting))
        if client not in waiting:
            least = min(self.served[each] for each in waiting or [self.last])
            self.served[client] = max(self.served[client], least)
        super().add(request)

    def can_admit(self) -> bool:
        if self.waiting and len(self.running) < self.max_batch_size:
            # only the first matters; who was preempted has been paid for
            first = min(self.waiting, key=lambda r: (not r.preemptions, self.served[client_of(r)]))
            self.waiting.remove(first)
            self.waiting.appendleft(first)
        return super().can_admit()

    def admit(self) -> Request | None:
        request = super().admit()
        if request:
            self.last = client_of(request)
            if not request.preemptions:
                self.served[self.last] += WP * len(request.prompt)
        return request

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        for request in batch.sampled:
            self.served[client_of(request)] += WQ
        return super().update(batch, tokens)


def client_of(request: Request) -> str:
    return request.tags.get("user", "")
