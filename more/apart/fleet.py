"""Many loops on one line of events: each engine has its own clock, scheduler and memory. Priced.

An event is a request that comes, an iteration that ends, or a fetch that ends. They are handled in
order of time. So a router sees what has ended by then, and not what an iteration in progress will
bring. (But a `hit` may be in a block that the iteration in progress fills.) A decode engine decides
between two iterations what it fetches. Between two events of its own, an engine is exactly
`simulate`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from batch import Request
from configs import Link
from costmodel import CostModel
from loop import Loop
from more.apart.halves import First, second_half, step
from more.apart.routers import Router
from more.pipeline.costs import Hop
from more.simulate import Fleeting, Passing
from timeline import Life


class Way(Hop):
    """The way of keys and values from a prefill engine to a decode engine.

    A fetch takes both engines' ports for its bytes. Every GPU sends its part over a port of its
    own. Left out: Splitwise and Mooncake send each layer as soon as it is computed; so there, less
    of the way is seen.
    """

    @staticmethod
    def over(link: Link, cost_model: CostModel) -> "Way":
        """The link reaches the same share of its data sheet as the memory, as in a pipeline."""
        return Way(link.latency, cost_model.kv_bytes / link.reached(cost_model.efficiency.memory))


@dataclass(frozen=True)
class Fetch:
    """Keys and values of a prompt, on their way. Times in seconds."""

    request_id: int
    source: int  # numbers of engines
    target: int
    tokens: int
    asked: float  # when the first half ended
    start: float
    end: float


class PatientLoop(Loop):
    """Its `step` returns None where nothing can run yet: a fetch may bring work."""

    def wait(self) -> bool:
        return False


class Engine:
    """One loop, as a router and the driver see it. open, tokens: see `routers.Engine`."""

    def __init__(self, number: int, loop: Loop, keep: bool = False):
        self.number = number
        self.loop = loop
        self.memory = loop.scheduler.memory
        loop.trace = (Passing if keep else Fleeting)(loop.scheduler.name)
        self.open = self.tokens = 0
        # when its next turn is, and when its port is free
        self.due = inf
        self.port = 0.0
        self.queue: deque[tuple[Request, Engine, First]] = deque()  # to be fetched, and from where

    def hit(self, request: Request) -> int:
        return self.memory.prefill(request)[1]

    def count(self, request: Request, by: int) -> None:
        self.open += by
        self.tokens += by * len(request.prompt)


class Fleet:
    """Engines that serve whole requests; or, if `decoders` are given, first and second halves.

    route, hand_over: the routers to `engines` and to `decoders`. done: is given each request's
    life when it has ended. fetches: all of them, if `keep`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        route: Router,
        done: Callable[[Life], None],
        decoders: Sequence[Engine] = (),
        hand_over: Router | None = None,
        way: Way | None = None,
        keep: bool = False,
    ):
        self.engines = engines
        self.route = route
        self.done = done
        self.decoders = decoders
        self.hand_over = hand_over
        self.way = way or Way()
        self.keep = keep
        self.fetches = []
        self.now = 0.0
        self.events: list[tuple[float, int, Callable, tuple]] = []  # a heap
        self.order = count()
        self.firsts: dict[int, Life] = {}  # of first halves, until the second one ends

    def run(self, requests: Iterable[Request]) -> None:
        """Serve them. They come in order of arrival, and may be made one by one."""
        arrivals = iter(requests)
        request = next(arrivals, None)
        while request is not None or self.events:
            if request is not None and (not self.events or request.arrival <= self.events[0][0]):
                self.now = request.arrival
                self.arrive(request)
                request = next(arrivals, None)
            else:
                self.now, _, act, given = heappop(self.events)
                act(*given)
        for engine in (*self.engines, *self.decoders):
            if engine.loop.busy or engine.queue:
                raise engine.loop.scheduler.broken("requests are left, and nothing can run")

    def at(self, moment: float, act: Callable, *given: object) -> None:
        heappush(self.events, (moment, next(self.order), act, given))

    def arrive(self, request: Request) -> None:
        engine = self.route(self.engines, request)
        engine.count(request, 1)
        if self.decoders:
            request.check_new()
            self.decoders[0].loop.scheduler.check(request)
            request = First.of(request)
        engine.loop.add(request)
        self.wake(engine)

    def wake(self, engine: Engine) -> None:
        """Let an idle engine have a turn. Others have one when their iteration ends."""
        if engine.loop.executor.now() <= self.now:
            self.next_turn(engine, self.now)

    def next_turn(self, engine: Engine, moment: float) -> None:
        engine.due = moment
        self.at(moment, self.turn, engine)

    def turn(self, engine: Engine) -> None:
        """An iteration ends, or an idle engine has something to do: begin the next iteration."""
        if engine.due != self.now:
            return  # it has had its turn
        loop = engine.loop
        engine.due = inf
        ended = loop.trace.ended
        loop.trace.ended = []
        for request, life in ended:
            self.end(engine, request, life)
        self.fetch(engine)
        loop.executor.wait_until(max(self.now, loop.executor.now()))
        if step(loop):
            self.next_turn(engine, loop.executor.now())
        elif loop.arriving:
            self.next_turn(engine, loop.arriving[0].arrival)

    def end(self, engine: Engine, request: Request, life: Life) -> None:
        engine.count(request, -1)
        if engine in self.decoders:
            first = self.firsts.pop(request.request_id)
            first.tokens += life.tokens
            first.finished = life.finished
            first.preemptions = first.preemptions + life.preemptions
            again = life.prompt_tokens - 1 - life.cached  # its keys and values were lost: run again
            first.recomputed += life.recomputed + again
            self.done(first)
        elif isinstance(request, First) and request.stays:
            self.firsts[request.request_id] = life
            target = self.hand_over(self.decoders, request)
            second = second_half(request)
            target.count(second, 1)
            target.queue.append((second, engine, request))
            self.wake(target)
        else:
            self.done(life)

    def fetch(self, target: Engine) -> None:
        """Begin to fetch what has room, oldest first."""
        while target.queue and target.memory.reserve(target.queue[0][0], target.loop.scheduler):
            second, source, first = target.queue.popleft()
            start = max(self.now, source.port, target.port)
            tokens = len(first.prompt)
            source.port = target.port = start + tokens * self.way.seconds_per_token
            second.arrival = source.port + self.way.latency
            if self.keep:
                ended = self.firsts[second.request_id].finished
                what = second.request_id, source.number, target.number, tokens, ended
                self.fetches.append(Fetch(*what, start, second.arrival))
            target.loop.add(second)
            self.at(second.arrival, self.fetched, source, first)

    def fetched(self, source: Engine, first: First) -> None:
        first.fetched = True
        source.memory.give(first)
        self.wake(source)
