"""Policies compared fairly: the same windows of requests, the steady state, each its own budget.

A window is so many requests in a row, of a file or with a seed of its own. The first quarter of its
requests only fills the engine, and does not count; nor do tokens after the last arrival. So the
arrivals alone say what counts: it is the same for all policies. Only "throughput", of useful
tokens, is that of the whole window.

What counts is what was *offered*. A request that did not end has broken its promise, and its times
are infinite; "ended" has the share of those that did. In the steady state, "offered" requests per
second come, "achieved" end, and "rejected" are sent away; "goodput" come and get all that was
promised. "counted" requests stand behind each percentile of a window, and "gaps counted" behind
that of the TBT.

A window is "not stationary" where fewer than STEADY of the requests that come leave again: a queue
grows. Then delays are those of windows of so many requests, and longer ones have longer delays. A
row says in how many of its windows it is so.

Windows of their own tune: in them, each policy takes the token budget (C) that is best for what is
judged. The others are measured.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from batch import Request
from experiments.lib.engines import median_row
from experiments.lib.flags import word_of
from experiments.lib.rows import Row, Rows, three_digits
from more.policies.qoserve import kept
from more.serving.capacity import START_SHARE, WHOLE, Deployment
from more.serving.search import percentile
from more.serving.traffic import copy_of
from timeline import Trace

REQUESTS = 1024  # of a window: with 256, two policies may stand in the wrong order
STEADY = 0.95  # of the requests that come; with fewer that leave, a queue grows
FEW = 100  # requests: of fewer, none is the longest of a hundred
STATIONARY = "stationary"
PROMISES = "promises kept"
SECONDS = ("P99 TBT", "median TTFT", "P99 TTFT", "P99 E2E", "mean E2E")
LESS = (*SECONDS, "preemptions", "recomputed")  # the less, the better
UNITS = dict.fromkeys(SECONDS, "s") | {
    PROMISES: "%",
    "offered": "requests/s",
    "achieved": "requests/s",
    "rejected": "requests/s",
    "goodput": "requests/s",
    "ended": "%",
    "counted": "requests",
    "gaps counted": "numbers",
    "fairness": "of 1",
    "preemptions": "per request",
    "recomputed": "%",
    "output tokens": "tokens/s",
    "throughput": "tokens/s",
}


class Data(Protocol):
    """What has windows: lib/papers.py, heirs.py.

    It may say what it is judged by: `quantity`, of requests with this `value` of the tag. `tuning`:
    how many windows are for that.
    """

    name: str

    def window(self, number: int, count: int, rate: float, seed: int) -> list[Request]: ...


@dataclass(frozen=True)
class Windows:
    """`windows` windows of `count` requests each, and those that tune.

    budgets: token budgets, of which each policy takes its best. tuned_at: requests per second, for
    that. promise: seconds to the first token, and to each further one, of requests without the tags
    `ttft`, `tbt` or `ttlt`. tag: each of its values has rows of its own.
    """

    data: Data
    count: int
    windows: int
    seed: int
    budgets: tuple[int, ...]
    tuned_at: float
    promise: tuple[float, float]
    tag: str | None = None

    @property
    def quantity(self) -> str:
        """What the data is judged by."""
        return getattr(self.data, "quantity", PROMISES)

    @property
    def judged_tag(self) -> str | None:
        """Of which rows, as their column `tag` says it; None: of all requests."""
        value = getattr(self.data, "value", None)
        return None if value is None else word_of(f"{self.tag}={value}")

    @property
    def tuning(self) -> list[int]:
        """The numbers of the windows that tune: 0, and those after the measured ones."""
        more = getattr(self.data, "tuning", 1) - 1
        return [0, *range(self.windows + 1, self.windows + 1 + more)]

    def metrics(self, trace: Trace, offered: Sequence[Request]) -> list[Row]:
        """Of all requests that were offered in the steady state; then by each value of the tag."""
        arrivals = sorted(request.arrival for request in offered)
        span = arrivals[int(START_SHARE * len(arrivals))], arrivals[-1]
        every = self.of(trace, offered, *span)
        if self.tag is None:
            return [every]
        named = []
        asked = []  # output tokens
        for value in sorted({request.tags.get(self.tag, "") for request in offered}):
            own = [each for each in offered if each.tags.get(self.tag, "") == value]
            wanted = sum(each.ends_after for each in own if each.arrival >= span[0])
            if wanted:
                word = {"tag": word_of(f"{self.tag}={value}")}
                named.append(word | self.of(trace, own, *span))
                asked.append(wanted)
        length = span[1] - span[0]
        got = [row["output tokens"] * length for row in named]
        return [every | {"fairness": fairness(got, asked)}, *named]

    def of(self, trace: Trace, offered: Sequence[Request], begin: float, end: float) -> Row:
        """The metrics of these requests, between two moments."""
        inside = [request for request in offered if request.arrival >= begin]
        arrived = sum(request.arrival > begin for request in inside)
        known = [each.request_id for each in offered if each.request_id in trace.lives]
        own = {request_id: trace.lives[request_id] for request_id in known}
        part = Trace(lives=own, cancelled=trace.cancelled, rejected=trace.rejected)
        lives = own.values()
        ran = [life for life in lives if life.arrival >= begin]
        ended = [life for life in ran if life.finished is not None]
        never = [math.inf] * (len(inside) - len(ended))
        ttft = [life.ttft for life in ended] + never
        e2e = [life.latency for life in ended] + never
        left = sum(life.finished is not None and begin < life.finished <= end for life in lives)
        these = {request.request_id for request in offered}
        refused = [moment for request_id, moment in trace.rejected if request_id in these]
        rejected = sum(begin < moment <= end for moment in refused)
        tokens = [[moment for moment in life.tokens if begin <= moment <= end] for life in lives]
        gaps = [after - before for moments in tokens for before, after in pairwise(moments)]
        keeping = sum(kept(life, *self.promise) for life in ended) / len(inside)
        run = sum(life.prompt_tokens + len(life.tokens) for life in ran)
        lost = sum(life.recomputed for life in ran)
        each_second = 1 / (end - begin) if end > begin else 0.0
        row = {
            "P99 TBT": percentile(gaps, 99),
            "median TTFT": percentile(ttft, 50),
            "P99 TTFT": percentile(ttft, 99),
            "P99 E2E": percentile(e2e, 99),
            "mean E2E": statistics.fmean(e2e),
            PROMISES: 100 * keeping,
            "offered": arrived * each_second,
            "achieved": left * each_second,
            "rejected": rejected * each_second,
            "goodput": keeping * arrived * each_second,
            "ended": 100 * len(ended) / len(inside),
            "counted": len(inside),
            "gaps counted": len(gaps),
            "preemptions": sum(life.preemptions for life in ran) / len(inside),
            "recomputed": 100 * lost / (run + lost) if ran else 0.0,
            "output tokens": sum(map(len, tokens)) * each_second,
            "throughput": part.throughput,
        }
        return row | {"state": state(row)}

    @lru_cache(64)  # noqa: B019 (as long as the script)
    def tuned(self, engine: Deployment, policy: str) -> dict[int, tuple[float, float]]:
        """By budget: the quantity that is judged, and the P99 E2E; medians over these windows."""
        found = {}
        for C in self.budgets:
            rows = []
            for number in self.tuning:
                offered = self.window(number, self.tuned_at)
                every = self.metrics(engine.serve(offered, policy, C, None), offered)
                rows += [row for row in every if row.get("tag") == self.judged_tag]
            judged = statistics.median(row[self.quantity] for row in rows)
            found[C] = judged, statistics.median(row["P99 E2E"] for row in rows)
        return found

    def budget(self, engine: Deployment, policy: str) -> int:
        """Of `budgets`, the best in what is judged; of equals, that with the shortest P99 E2E."""
        if len(self.budgets) == 1:
            return self.budgets[0]
        found = self.tuned(engine, policy)
        sign = 1 if self.quantity in LESS else -1
        return min(found, key=lambda C: (sign * found[C][0], found[C][1]))

    def window(self, number: int, rate: float) -> list[Request]:
        return self.data.window(number, self.count, rate, self.seed)

    @lru_cache(64)  # noqa: B019 (as long as the script)
    def serve(
        self,
        engine: Deployment,
        rate: float | None,
        policy: str,
        C: int | None = None,
        clients: int | None = None,
    ) -> list[list[Row]]:
        """The metrics of each window, at `rate` requests per second. C: None is its best.

        clients: a closed loop instead, in which so many requests run or wait at any time.
        """
        size = engine.orca_batch_size if policy == "orca" else engine.max_batch_size
        own: Row = {"data": self.data.name, "seed": self.seed, "requests": self.count}
        own |= {"windows": self.windows, "tuned at": self.tuned_at, "ttft": self.promise[0]}
        own |= {"software": engine.software, "cache": engine.cache_tokens, "B": size}
        if policy.partition(":")[0] not in WHOLE:
            own["C"] = C or self.budget(engine, policy)
            if C is None and len(self.budgets) > 1:
                own["tuning"] = words_of(self.quantity, self.tuned(engine, policy))
        found = []
        for number in range(1, self.windows + 1):
            offered = self.window(number, rate or 1.0)
            trace = engine.serve(offered, policy, own.get("C", 1), clients)
            if clients is not None:
                offered = as_sent(trace, offered)
            found.append([own | row for row in self.metrics(trace, offered)])
        return found


def state(row: Row) -> str:
    """Whether as many requests leave as come. Those that are rejected leave, too."""
    left = row["achieved"] + row["rejected"]
    return STATIONARY if left >= STEADY * row["offered"] else f"not {STATIONARY}"


def unsteady(row: Row) -> bool:
    """Whether its state is not stationary, in any window."""
    return row.get("state", STATIONARY) != STATIONARY


def medians(rows: Sequence[Row]) -> Row:
    """One row of several windows: medians, their range, and in how many a queue grows."""
    count = sum(map(unsteady, rows))
    words = f"not {STATIONARY} in {count} of {len(rows)}" if count else STATIONARY
    return median_row(rows) | {"state": words}


def say_if_few(rows: Rows) -> None:
    """Print how many requests are behind a P99, where one in a hundred of them is none."""
    counted = min(rows.newest().column("counted"), default=FEW)
    if counted < FEW:
        print(f"\na P99 of {counted:g} requests: below {FEW}, it is about the longest of them")


def words_of(quantity: str, tuned: Mapping[int, tuple[float, float]]) -> str:
    """What each token budget came to, where it was chosen."""
    values = [f"{three_digits(value)} with C = {C}" for C, (value, _) in tuned.items()]
    return f"{quantity}: {'; '.join(values)}"


def as_sent(trace: Trace, requests: Sequence[Request]) -> list[Request]:
    """The requests of a closed loop, with the arrivals that they had in this run."""
    moments = dict(trace.rejected)
    moments |= {own: life.arrival for own, life in trace.lives.items()}
    return [copy_of(each, each.request_id, moments[each.request_id]) for each in requests]


def times(own: float, other: float) -> float:
    """`own` over `other`; 1 where both are the same, such as infinite."""
    if own == other:
        return 1.0
    return own / other if other else math.inf


def fairness(got: Sequence[float], asked: Sequence[float]) -> float:
    """Jain's index of what each user got, as a part of its fair share; 1: all parts are alike.

    A share is fair by max-min: who asks for less than an equal part gets it, and the others share
    the rest (Jain, Chiu and Hawe 1984, DEC-TR-301).
    """
    left = sum(got)
    if left == 0:
        return 1.0
    parts = []
    for place, (wanted, own) in enumerate(sorted(zip(asked, got, strict=True))):
        share = min(wanted, left / (len(asked) - place))
        left -= share
        parts.append(own / share)
    return sum(parts) ** 2 / (len(parts) * sum(part**2 for part in parts))


def by_tag(windows: Sequence[list[Row]]) -> list[list[Row]]:
    """The rows of each value of the tag; not each window has each."""
    found: dict[object, list[Row]] = {}
    for row in (row for rows in windows for row in rows):
        found.setdefault(row.get("tag"), []).append(row)
    return list(found.values())
