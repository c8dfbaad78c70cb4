"""Sarathi-Serve's deployments, data sets and capacities (Sec 5, Table 2); looks of policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path

from batch import Request
from command.checks import UserError
from experiments.lib.colours import LOOKS
from experiments.lib.common import paper_numbers
from experiments.lib.flags import word_of
from experiments.lib.rows import Row, Rows, print_rows
from more.loading.requests import short_enough
from more.serving.capacity import Deployment, Slo
from more.serving.lengths import tag_lengths
from more.serving.planner import EXACT, Traffic, find_capacity
from more.serving.traffic import (
    FASTEST,
    Counter,
    Lengths,
    LogNormal,
    at_rate,
    copy_of,
    make_requests,
    poisson,
    read_trace,
)

MOST_VALUES = 12  # of a tag, that a figure shows
NAMED = ("model", "gpu", "tp", "max_batch_size", "software")  # flags that change a deployment

# for policies that are not ours: sand, chocolate, steel blue, wine
SPARE_LOOKS = (("#DDCC77", "x"), ("#661100", "d"), ("#6699CC", "h"), ("#AA4466", "8"))


def looks_of(policies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each policy: that in LOOKS; the others get SPARE_LOOKS in turn."""
    spare = cycle(SPARE_LOOKS)
    known = {policy: LOOKS.get(policy.partition(":")[0]) for policy in policies}
    return {policy: found or next(spare) for policy, found in known.items()}


MISTRAL = Deployment("mistral-7b")
YI = Deployment("yi-34b", tp=2)


@dataclass(frozen=True)
class Dataset:
    """Log-normal lengths with a published median and P90.

    Requests are no longer than `max_length`, as the paper filtered them.
    """

    name: str
    prompts: Lengths
    outputs: Lengths
    max_length: int

    @staticmethod
    def published(name: str, max_length: int) -> "Dataset":
        """chat (openchat_sharegpt4) or arxiv (arxiv_summarization), from Table 2.

        The artefact has chat's. Three of arxiv's four percentiles are unverified.
        """
        numbers = paper_numbers()
        prompts, outputs = (
            LogNormal(numbers[f"ss_data_{name}_{what}_p50"], numbers[f"ss_data_{name}_{what}_p90"])
            for what in ("prompt", "output")
        )
        return Dataset(name, prompts, outputs, max_length)

    def requests(self, count: int, rate: float = 1.0, seed: int = 0) -> list[Request]:
        """`count` requests with Poisson arrivals."""
        return make_requests(
            poisson(count, rate, seed), self.prompts, self.outputs, seed, self.max_length
        )

    def window(self, number: int, count: int, rate: float, seed: int) -> list[Request]:
        """Window `number`: `count` requests with a seed of its own."""
        return self.requests(count, rate, 100 * seed + number)

    def divide(self, windows: int, count: int) -> tuple[int, int]:
        """Of windows and requests of each, as many as there are."""
        return windows, count


CHAT = Dataset.published("chat", 8192)
ARXIV = Dataset.published("arxiv", 16384)


def read_whole(path: Path, *counter: Counter) -> list[Request]:
    """The requests of a file, for an engine that computes each prompt whole. It says so."""
    requests = read_trace(path, *counter)
    if not all(isinstance(each.prompt, range) for each in requests):
        print(f"{path}: what its prompts share is computed again: no prefix caching")
    return requests


@lru_cache(2)  # what it says of the file, it says once
def read_once(path: Path, engines: tuple[Deployment, ...]) -> list[Request]:
    """Those that are short enough for each of these engines."""
    requests = read_whole(path)
    for each in engines:
        most = min(each.cost_model.model.max_length, each.cache_tokens)
        requests = short_enough(requests, most, f"{each.model} on {each.hardware}")
    return requests


@dataclass(frozen=True)
class Recorded:
    """The requests of a user's file, in the place of a `Dataset`.

    lengths: see more/serving/lengths.py. engines: that serve them; what is too long for one of them
    is left out for all.
    """

    path: Path
    lengths: str | None = None
    engines: tuple[Deployment, ...] = ()

    @property
    def name(self) -> str:
        return word_of(self.path.stem)

    @property
    def every(self) -> list[Request]:
        return read_once(self.path, self.engines)

    @property
    def max_length(self) -> int:
        """Tokens of the longest."""
        return max(request.most_cached for request in self.every) + 1

    def requests(self, count: int, rate: float = 1.0, seed: int = 0) -> list[Request]:
        """The first `count`, with their arrivals scaled to this rate. seed: of the lengths."""
        made = at_rate(self.every[:count], rate)
        return made if self.lengths is None else tag_lengths(made, self.lengths, seed)

    def window(self, number: int, count: int, rate: float, seed: int) -> list[Request]:
        """Window `number`: `count` requests in a row, when all of the file come at this rate."""
        made = at_rate(self.every, rate)[number * count : (number + 1) * count]
        first = made[0].arrival
        made = [copy_of(each, each.request_id, each.arrival - first) for each in made]
        return made if self.lengths is None else tag_lengths(made, self.lengths, seed)

    def divide(self, windows: int, count: int) -> tuple[int, int]:
        """As many windows of `count` requests as the file has, one for tuning apart; else two."""
        total = len(self.every)
        if total < 8:
            raise UserError(f"{self.path} has {total} requests; two windows need at least 8")
        windows = max(1, min(windows, total // count - 1))
        return windows, min(count, total // (windows + 1))

    def values(self, tag: str) -> list[str]:
        """Of a tag, in all requests. Raises UserError where there are none, or too many to show."""
        found = sorted({request.tags.get(tag, "") for request in self.every})
        if found == [""] or len(found) > MOST_VALUES:
            known = dict.fromkeys(name for request in self.every for name in request.tags)
            raise UserError(
                f"{self.path}: tag {tag!r} has {len(found) if any(found) else 'no'} values; --by"
                f" needs 1 to {MOST_VALUES}. Its tags: {', '.join(known) or 'none'}"
            )
        if len(set(map(word_of, found))) < len(found):
            raise UserError(
                f"{self.path}: tag {tag!r} has values that differ in blanks or signs alone:"
                f" {', '.join(map(repr, found))}; --by needs words and numbers"
            )
        return found


Data = Dataset | Recorded


def deployments(own: Sequence[Deployment], **flags: object) -> list[Deployment]:
    """The paper's; or, if a user gives one of NAMED, the first of them with what is given."""
    changes = {name: flags[name] for name in NAMED if flags.get(name) is not None}
    if not changes:
        return list(own)
    if "gpu" in changes:
        changes["link"] = None
    if changes.keys() & {"model", "gpu", "max_batch_size"}:  # Orca's smaller B is of the paper's
        changes["orca_batch_size"] = changes.get("max_batch_size", own[0].max_batch_size)
    one = replace(own[0], **changes)
    if not one.cache_tokens > 0:
        raise UserError(f"{one.model} does not fit {one.hardware}: give more GPUs with --tp")
    return [one]


@lru_cache(8)
def burst_rate(engine: Deployment, data: Data, count: int, budget: int) -> float:
    """Requests per second, if `count` of them wait from the start. seed 0."""
    trace = engine.serve(data.requests(count, FASTEST), OURS, budget)
    return len(trace.finished) / trace.seconds


OURS = "sarathi_serve"
RIVALS = ("vllm_v0", "orca")
POLICIES = (*RIVALS, OURS)
Slos = Mapping[str, tuple[float, int]]  # name -> bound in seconds, and the token budget for it
NO_BUDGET = 1  # token: the RIVALS run whole prompts and read no budget, so one run serves all SLOs


def capacity_rows(
    engine: Deployment,
    data: str,
    policy: str,
    workloads: Mapping[str, Sequence[Request]],
    slos: Callable[[Deployment], Slos],
    budgets: Sequence[int] = (),
    precision: float = EXACT,
) -> list[Row]:
    """The capacity under each SLO, in requests/s; and where they differ from what was given, how
    many requests and which token budget it was found with.

    workloads: requests by the name of the data. budgets: others to try beside the SLO's, of which
    the best is taken; the RIVALS read no budget.
    """
    requests = workloads[data]
    search = partial(find_capacity, engine, Traffic.of(policy, requests), runs={})
    rows = []
    for slo, (bound, budget) in slos(engine).items():
        sizes = [NO_BUDGET] if policy in RIVALS else dict.fromkeys([budget, *budgets])
        first, *others = sizes
        best = search(Slo.of(bound), policy, first, precision)
        for each in others:  # one that does not serve a little more is not better
            start = best.rate
            least = best.rate * precision
            found = search(Slo.of(bound), policy, each, precision, start=start, least=least)
            best = found if found.rate >= least else best
        row = {"slo": slo, "capacity": best.rate}
        if best.requests > len(requests):
            row["repeated to"] = best.requests
        if budgets and policy not in RIVALS:
            row["budget"] = best.budget
        rows.append(row)
    return rows


def add_gains(rows: Rows, capacity: float) -> None:
    """`capacity`, which is OURS, over that of each other policy."""
    for row in rows:
        if row["policy"] != OURS and row["capacity"]:
            row["gain"] = capacity / row["capacity"]


def report(rows: Rows, *keys: str) -> None:
    """Print the capacities, and how often the requests were repeated, where they were."""
    found = rows.where("capacity")
    wide = found.across("policy", "capacity")
    print_rows(wide, (*keys, *found.by("policy")), "capacities in requests/s")
    if repeated := rows.column("repeated to"):
        print(
            f"\nrequests were repeated, up to {max(repeated):.0f} of them in a run: with too few,"
            " no queue builds, and the capacity comes out too large"
        )
