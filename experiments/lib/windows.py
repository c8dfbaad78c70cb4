"""Policies compared fairly: the same windows of requests, the steady state, each its own budget.

A window is so many requests in a row, of a file or with a seed of its own. The first quarter of its
requests only fills the engine, and does not count; nor do tokens after the last arrival. (In an
overload the queue grows: then numbers hold for windows of so many requests.) Only "throughput", of
useful tokens, is that of the whole window. Window 0 tunes: in it, each policy takes the token
budget (C) that keeps most promises. The others are measured.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from batch import Request
from experiments.lib.flags import word_of
from experiments.lib.rows import Row
from more.policies.qoserve import kept
from more.serving.capacity import WHOLE, Deployment, Load, steady_span
from timeline import Trace

SECONDS = ("P99 TBT", "median TTFT", "P99 TTFT", "P99 E2E", "mean E2E")
UNITS = dict.fromkeys(SECONDS, "s") | {
    "promises kept": "%",
    "preemptions": "per request",
    "recomputed": "%",
    "output tokens": "tokens/s",
    "throughput": "tokens/s",
}


class Data(Protocol):
    """What has windows: lib/papers.py, heirs.py."""

    name: str

    def window(self, number: int, count: int, rate: float, seed: int) -> list[Request]: ...


@dataclass(frozen=True)
class Windows:
    """`windows` windows of `count` requests each, and one to tune.

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

    def metrics(self, trace: Trace) -> list[Row]:
        """Of all requests in the steady state; then of those with each value of the tag."""
        span = begin, end = steady_span(trace)

        def of(part: Trace) -> Row:
            load = Load.of(part, *span)
            every = part.lives.values()
            lives = [life for life in every if life.arrival >= begin]
            tokens = [moment for life in every for moment in life.tokens if begin <= moment <= end]
            run = sum(life.prompt_tokens + len(life.tokens) for life in lives)
            lost = sum(life.recomputed for life in lives)
            return {
                "P99 TBT": load.value("tbt", 99),
                "median TTFT": load.value("ttft", 50),
                "P99 TTFT": load.value("ttft", 99),
                "P99 E2E": load.value("e2e", 99),
                "mean E2E": statistics.fmean(life.latency for life in lives),
                "promises kept": statistics.fmean(100.0 * kept(e, *self.promise) for e in lives),
                "preemptions": statistics.fmean(life.preemptions for life in lives),
                "recomputed": 100 * lost / (run + lost),
                "output tokens": len(tokens) / (end - begin) if end > begin else 0.0,
                "throughput": part.throughput,
            }

        parts = trace.by_tag(self.tag).items() if self.tag else ()
        named = [
            {"tag": word_of(f"{self.tag}={value}")} | of(part)
            for value, part in parts
            if any(life.arrival >= begin for life in part.lives.values())
        ]
        return [of(trace), *named]

    @lru_cache(64)  # noqa: B019 (as long as the script)
    def budget(self, engine: Deployment, policy: str) -> int:
        """Of `budgets`: with it, most promises are kept, or else the P99 E2E is the shortest."""

        def quality(C: int) -> tuple[float, float]:
            found = self.metrics(engine.serve(self.window(0, self.tuned_at), policy, C))[0]
            return found["promises kept"], -found["P99 E2E"]

        return max(self.budgets, key=quality) if len(self.budgets) > 1 else self.budgets[0]

    def window(self, number: int, rate: float) -> list[Request]:
        return self.data.window(number, self.count, rate, self.seed)

    @lru_cache(64)  # noqa: B019 (as long as the script)
    def serve(
        self, engine: Deployment, rate: float, policy: str, C: int | None = None
    ) -> list[list[Row]]:
        """The metrics of each window, at `rate` requests per second. C: None is its best."""
        size = engine.orca_batch_size if policy == "orca" else engine.max_batch_size
        own: Row = {"data": self.data.name, "seed": self.seed, "requests": self.count}
        own |= {"windows": self.windows, "tuned at": self.tuned_at, "ttft": self.promise[0]}
        own |= {"software": engine.software, "cache": engine.cache_tokens, "B": size}
        if policy.partition(":")[0] not in WHOLE:
            own["C"] = C or self.budget(engine, policy)
        found = []
        for number in range(1, self.windows + 1):
            trace = engine.serve(self.window(number, rate), policy, own.get("C", 1))
            found.append([own | row for row in self.metrics(trace)])
        return found


def by_tag(windows: Sequence[list[Row]]) -> list[list[Row]]:
    """The rows of each value of the tag; not each window has each."""
    found: dict[object, list[Row]] = {}
    for row in (row for rows in windows for row in rows):
        found.setdefault(row.get("tag"), []).append(row)
    return list(found.values())
