"""TD-Pipe's three rules: when to switch, and how to share out.

    LookAhead    prefill -> decode: will the memory hold what the requests will grow to?  (Sec 3.3)
    share_out    which requests a decode micro-batch takes along: work stealing           (Sec 3.4)
    Intensity    decode -> prefill: do small batches cost more than a switch does?        (Sec 3.5)
    Rules        which variant of each

The controller that asks them is in more/pipeline/td_pipe.py.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from batch import Request
from command.checks import UserError, check_flag, check_whole, lookup, range_of, shown
from more.pipeline.predictors import Predictor, oracle, predicted
from scheduler import Memory, Scheduler

# future decode steps at which the look-ahead looks (TD-Pipe, Sec 3.3; its artefact: 5 to 4096)
POINTS = tuple(range(32, 1025, 32))
STEALING = ("window", "pool", "off")


class LookAhead:
    """The memory at some future decode steps, in tokens, if all goes as predicted (Algorithm 1).

    points: decode steps from now. At point p, the paper counts (cached + p) for every request that
    is predicted to last at least p steps more. With `between`, point p stands for all steps since
    the point before it: every request counts that lasts beyond that one, with the most tokens that
    it has up to p. A last point stands for all later steps. Then nothing is missed.
    """

    def __init__(self, points: Sequence[int], between: bool = True):
        self.points = points
        self.between = between
        size = len(points) + 1
        # sums over the requests that end at each place
        self.count = [0] * size
        self.cached = [0] * size
        self.steps = [0] * size

    def add(self, cached: int, steps: int, sign: int = 1) -> None:
        """A request with `cached` tokens now, and `steps` decode steps to go. sign -1: remove."""
        place = (bisect_left if self.between else bisect_right)(self.points, steps)
        self.count[place] += sign
        self.cached[place] += sign * cached
        self.steps[place] += sign * steps

    def usage(self) -> list[int]:
        """Tokens at each point; with `between`, also after the last one."""
        # count, cached: of the requests that go on past the point
        used = []
        count = 0
        cached = 0
        if self.between:
            for place in range(len(self.points), -1, -1):
                point = self.points[place] if count else 0  # no request goes on past the last place
                used.append(cached + count * point + self.cached[place] + self.steps[place])
                count += self.count[place]
                cached += self.cached[place]
        else:
            for place in range(len(self.points), 0, -1):
                count += self.count[place]
                cached += self.cached[place]
                used.append(cached + count * self.points[place - 1])
        return used[::-1]

    def peak(self) -> int:
        return max(self.usage())

    def admits(self, cached: int, steps: int, limit: float) -> bool:
        """Add the request if the peak stays within `limit` tokens."""
        self.add(cached, steps)
        if self.peak() <= limit:
            return True
        self.add(cached, steps, sign=-1)
        return False


def share_out(
    stealing: str,
    own: list[Request],
    withheld: list[Request],
    total: int,
    groups: int,
    turn: int,
    most: int,
) -> tuple[list[Request], list[Request]]:
    """A decode micro-batch has come back: the requests that it runs next, and those withheld.

    own: its requests that have not ended. withheld: requests that are past their prefill and in no
    micro-batch. total: all requests in memory. groups: how many decode micro-batches there are.
    turn: how many have come back before. most: B, of one micro-batch.

    window  the paper's rule: it takes the average, no more. (The paper adds up the withheld
            requests and the latest sizes of all micro-batches, without the ended ones: `total`.)
    pool    the rule of the paper's artefact: all requests that are not in flight form one pool. The
            micro-batch takes its even share. If at most `groups` would remain, it takes these, too.
    off     no stealing: it keeps its own requests, and takes a share of the new ones only.
    """
    if stealing == "pool":
        pool = withheld + own
        size = total // groups + (turn % groups < total % groups)
        if len(pool) - size <= groups:
            size = len(pool)
        size = min(size, most)
        return pool[:size], pool[size:]
    size = min(most, -(-total // groups))  # rounded up: else some would be withheld for ever
    keep = own if stealing == "off" else own[:size]
    more = max(0, size - len(keep))
    return keep + withheld[:more], withheld[more:] + own[len(keep) :]


class Intensity:
    """Spatial against temporal intensity (TD-Pipe, Sec 3.5).

    seconds_of: a function: rows -> seconds of an iteration, over all stages together. It does not
    know the context: the paper measures a decode batch by its number of requests alone.
    stages: S. The artefact counts the running decode step with the time of all of them. We think
    that the paper means the time of one stage: a bubble is seconds of one stage.
    """

    def __init__(self, seconds_of: Callable[[int], float], stages: int):
        self.seconds_of = seconds_of
        self.stages = stages

    def spatial(self, requests: int, peak: int) -> float:
        """How well a decode batch of this many requests uses the GPU: 1 for `peak` requests."""
        if requests >= peak:
            return 1.0
        best = peak / self.seconds_of(peak)
        return min(1.0, requests / self.seconds_of(max(1, requests)) / best)

    def temporal(self, prompts: Iterable[int], requests: int) -> float:
        """1 - bubble / total time of a prefill phase that begins now.

        prompts: tokens of each prompt. requests: in the decode batch that runs before the phase.
        """
        stages = self.stages
        times = [self.seconds_of(tokens) for tokens in prompts]
        longest = max(times) / stages
        decode = self.seconds_of(max(1, requests)) / stages
        total = sum(times) / stages + (stages - 1) * longest
        return 1 - (stages - 1) * max(0.0, longest - decode) / total


@dataclass(frozen=True)
class Rules:
    """TD-Pipe's options.

    Most defaults are the paper's. `pack` is that of its artefact. `between` and `peak_rows` are
    ours.

    predict: output tokens of a request (more/pipeline/predictors.py).
    between: see `LookAhead`.
    limit: share of the memory that the look-ahead may fill (the artefact: 0.9).
    stealing: see `share_out`.
    peak_rows: the size of the decode batch whose spatial intensity is 1, in requests. None: the
        size that a prefill phase would give now. The artefact has 256.
    pack: a prefill micro-batch takes prompts until it has this many tokens, padded to the longest
        prompt.
    occupied: instead of looking ahead, prefill until this share of the memory is taken (Fig 13).
    finished: instead of comparing intensities, decode until this share of the phase's first
        requests has ended (Fig 16).
    """

    predict: Predictor = oracle
    between: bool = True
    limit: float = 1.0
    stealing: str = "window"
    peak_rows: int | None = None
    pack: int = 192
    occupied: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        lookup(dict.fromkeys(STEALING), self.stealing, "stealing")
        check_flag("between", self.between)
        check_whole("pack", self.pack)
        if self.peak_rows is not None:
            check_whole("peak_rows", self.peak_rows)
        if not callable(self.predict):
            raise UserError(
                f"predict is {shown(self.predict)}; it must be a function: request -> output"
                " tokens, such as more.pipeline.predictors.oracle"
            )
        for name in ("limit", "occupied", "finished"):
            share = getattr(self, name)
            if share is not None or name == "limit":
                range_of(0, 1, whole=False, above=True).check(name, share)

    def future(self, request: Request) -> tuple[int, int]:
        """Tokens in memory when the request decodes next, and its decode steps from there.

        If its prefill has not run yet, the prefill yields the first token. If the request already
        has more tokens than predicted, we assume that it ends with the next one.
        """
        left = max(1, predicted(self.predict, request) - len(request.output))
        return (request.prefill_length, left - 1) if request.in_prefill else (request.context, left)

    def admits(self, request: Request, ahead: LookAhead, memory: Memory, promised: int = 0) -> bool:
        """Whether the future of one more request fits the memory. If not, it is time to decode.

        promised: tokens of requests that will be admitted before it.
        """
        if memory.capacity is None:
            return True
        if self.occupied is not None:
            return memory.taken + promised < self.occupied * memory.capacity
        return ahead.admits(*self.future(request), self.limit * memory.capacity)

    def prefill_pays(
        self, ledger: Scheduler, groups: int, ended: float, intensity: Intensity
    ) -> bool:
        """Whether to go from decodes to prefills: small decode batches cost more than a switch.

        ended: the share that has ended of the requests that began the decode phase.
        """
        running = len(ledger.running)
        if not ledger.waiting:
            return False
        if self.finished is not None:
            return ended >= self.finished
        if not (pending := self.pending(ledger)):
            return False
        peak = self.peak_rows or max(1, (running + len(pending)) // groups)
        requests = running // groups  # of one decode micro-batch
        return intensity.spatial(requests, peak) < intensity.temporal(pending, requests)

    def pending(self, ledger: Scheduler) -> list[int]:
        """Prompt tokens of each request that a prefill phase would admit now."""
        memory = ledger.memory
        ahead = self.look_ahead(ledger.running)
        pending = []
        promised = 0
        running = len(ledger.running)
        for request in islice(ledger.waiting, ledger.max_batch_size - running):
            next_tokens = running + len(pending) + 1  # one each, as in `Scheduler.can_admit`
            if promised + request.prefill_length + next_tokens > memory.room:
                break
            if not self.admits(request, ahead, memory, promised):
                break
            pending.append(request.prefill_length)
            promised += request.prefill_length
        return pending

    def look_ahead(self, requests: Iterable[Request]) -> LookAhead:
        """A look-ahead over requests in memory."""
        ahead = LookAhead(POINTS, self.between)
        for request in requests:
            ahead.add(*self.future(request))
        return ahead
