"""Virtual token counters (VTC): of the clients whose requests wait, the least served one is next.

A client is the tag `user`. What it was served are tokens: WP for a prompt token, WQ for an output
token. Idle time earns nothing: a client that begins to wait is lifted to the least of those that
wait, or, if nobody does, to the one whose request left the queue last. So two clients that both
have requests waiting never differ by more than a bound that does not grow with time (Sheng et al.,
OSDI 2024, arXiv 2401.00588, Algorithm 2).

Fair shares are not equal waits: who sends less than its share hardly waits.
Left out: weights of clients, and counters that a prediction of the output moves in advance.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

from batch import Batch, Request
from scheduler import SarathiServe

WP = 1
WQ = 2


class VTC(SarathiServe):
    name = "vtc"
    asks = "user"  # the tag without which it is sarathi_serve

    def __init__(self, *sizes: int | None):
        super().__init__(*sizes)
        self.served: Counter[str] = Counter()  # by client
        self.last = ""  # the client whose request left the queue last

    def enqueue(self, request: Request, first: bool = False) -> None:
        """Those of a client stand together: so nobody looks at the whole queue."""
        place = bisect_left if first else bisect_right
        self.waiting.insert(place(self.waiting, client_of(request), key=client_of), request)

    def firsts(self) -> Iterator[Request]:
        """The first request of each client that waits."""
        place = 0
        while place < len(self.waiting):
            request = self.waiting[place]
            yield request
            place = bisect_right(self.waiting, client_of(request), place, key=client_of)

    def first(self) -> Request:
        return min(self.firsts(), key=self.turn)

    def turn(self, request: Request) -> tuple:
        """Least served first; but who was preempted has been paid for."""
        served = self.served[client_of(request)]
        return not request.preemptions, served, request.arrival, request.request_id

    def add(self, request: Request) -> None:
        client = client_of(request)
        waiting = [client_of(each) for each in self.firsts()]
        if client not in waiting:
            least = min(self.served[each] for each in waiting or [self.last])
            self.served[client] = max(self.served[client], least)
        super().add(request)

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
