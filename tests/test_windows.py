"""Windows: what counts in them, by hand; what tunes; how requests look that were dropped."""

import math

import pytest
from shared import Odd, run_loop, second_by_second

from batch import Request
from experiments import heirs
from experiments.lib.papers import CHAT
from experiments.lib.windows import Windows, fairness, medians, state, times
from scheduler import POLICIES, make_scheduler
from timeline import Trace


class Steps:
    """Requests of 100 tokens, of ann; the first is bob's."""

    name = "steps"

    def __init__(self) -> None:
        self.asked = []

    def window(self, number: int, count: int, rate: float, seed: int) -> list[Request]:
        self.asked.append((number, rate))
        tags = [{"user": "ann" if i else "bob"} for i in range(count)]
        return [Request(i, range(100), 2, arrival=i / rate, tags=tags[i]) for i in range(count)]


class Judged(Steps):
    """By the times of ann's requests, in three windows."""

    quantity, value, tuning = "mean E2E", "ann", 3


class Engine:
    """Each iteration takes a second."""

    orca_batch_size = 1
    max_batch_size = 4
    software = "none"
    cache_tokens = 0

    def serve(self, requests: list[Request], policy: str, C: int, clients: int | None) -> Trace:
        return run_loop(make_scheduler(policy, 4, C), second_by_second(), requests).trace


def test_windows_by_hand() -> None:
    """Of eight requests, one each 10 s, the last six count. Window 0 alone tunes: there, with
    C = 50, the second chunk would break the promise.
    """
    data = Steps()
    chosen = Windows(data, 8, 2, 0, (50, 100), 0.05, (1.5, 9.0), "user")
    found = chosen.serve(Engine(), 0.1, "sarathi_serve")
    assert data.asked == [(0, 0.05), (0, 0.05), (1, 0.1), (2, 0.1)]
    for every, ann in found:  # bob's only request is in the first quarter
        assert every["C"] == 100 and ann["tag"] == "user=ann"
        assert every["tuning"] == "promises kept: 0.00 with C = 50; 100 with C = 100"
        assert (every["P99 TTFT"], every["mean E2E"], every["promises kept"]) == (1, 2, 100)
        assert every["output tokens"] == pytest.approx(10 / 50)  # of five requests, in 50 s
        assert every["throughput"] == pytest.approx(8 * 102 / 72)  # of all, until the last token
        rates = [every[name] for name in ("offered", "achieved", "goodput")]
        assert rates == pytest.approx([0.1, 0.1, 0.1]) and every["state"] == "stationary"
        assert (every["counted"], every["gaps counted"]) == (6, 5), "the last gap is after the end"
        assert (every["ended"], every["rejected"], every["fairness"]) == (100, 0, 1)
    assert chosen.serve(Engine(), 0.1, "sarathi_serve", 50)[0][0]["promises kept"] == 0


def test_what_is_judged_tunes() -> None:
    """The data says by what, and in how many windows: nobody can forget to."""
    data = Judged()
    chosen = Windows(data, 8, 2, 0, (50, 100), 0.05, (9.0, 9.0), "user")
    assert chosen.budget(Engine(), "sarathi_serve") == 100, "3 s with C = 50, 2 s with C = 100"
    assert [number for number, _ in data.asked] == 2 * [0, 3, 4], "none that is measured"
    row = chosen.serve(Engine(), 0.1, "sarathi_serve")[0][1]
    assert row["tuning"] == "mean E2E: 3.00 with C = 50; 2.00 with C = 100"


def test_who_is_rejected_has_waited_for_ever() -> None:
    """Each second request: the promises of half are broken, and no percentile leaves them out."""
    POLICIES["odd"] = Odd
    chosen = Windows(Steps(), 40, 1, 0, (100,), 0.1, (1.5, 9.0), "user")
    [[row, ann]] = chosen.serve(Engine(), 0.1, "odd")
    assert (row["ended"], row["promises kept"], row["counted"]) == (50, 50, 30)
    assert row["P99 TTFT"] == row["P99 E2E"] == row["mean E2E"] == math.inf
    assert row["median TTFT"] == math.inf, "it lies between 1 s and infinity"
    rates = [row[name] for name in ("offered", "achieved", "rejected", "goodput")]
    assert rates == pytest.approx([0.1, 14 / 290, 14 / 290, 0.05])
    assert row["state"] == "stationary", "no queue grows"
    assert ann["rejected"] == row["rejected"]


def test_a_queue_that_grows_is_not_stationary() -> None:
    """One request each second, of two seconds, one at a time."""
    engine = Engine()
    engine.max_batch_size = 1
    data = Steps()
    requests = data.window(0, 40, 1.0, 0)
    trace = run_loop(make_scheduler("sarathi_serve", 1, 100), second_by_second(), requests).trace
    chosen = Windows(data, 40, 1, 0, (100,), 1.0, (9.0, 9.0))
    [row] = chosen.metrics(trace, requests)
    assert row["achieved"] == pytest.approx(row["offered"] / 2, rel=0.05)
    assert row["state"] == "not stationary" and row["ended"] == 100
    steady = row | {"achieved": row["offered"], "state": "stationary"}
    assert medians([row, steady, steady])["state"] == "not stationary in 1 of 3"
    assert medians([steady, steady])["state"] == "stationary"
    for share, word in ((0.96, "stationary"), (0.94, "not stationary")):
        assert state(row | {"achieved": share * row["offered"]}) == word


@pytest.mark.parametrize("policy", ["sarathi_serve", "odd"])
def test_a_closed_loop_counts_the_same_requests(policy: str) -> None:
    """With their arrivals of that run: they come as fast as others leave."""
    POLICIES["odd"] = Odd
    chosen = Windows(CHAT, 40, 1, 0, (512,), 1.0, (2.0, 0.2))
    [[row]] = chosen.serve(heirs.LLAMA, None, policy, clients=4)
    assert row["counted"] == 30 and row["ended"] == (50 if policy == "odd" else 100)
    assert (row["rejected"] > 0) == (policy == "odd")
    left = row["achieved"] + row["rejected"]
    assert left == pytest.approx(row["offered"], rel=0.2) and row["offered"] > 0.5


def test_the_index_of_fairness() -> None:
    """Jain's: 1 where all got alike parts of their fair shares, 1 / n where one got all."""
    assert fairness([5, 5], [50, 50]) == 1
    assert fairness([1, 9], [1, 50]) == 1, "who asks for little gets it all"
    assert fairness([10, 0], [50, 50]) == pytest.approx(1 / 2)
    assert fairness([0.5, 9.5], [1, 50]) == pytest.approx(
        (0.5 + 19 / 18) ** 2 / 2 / 1.364, rel=1e-3
    )
    assert fairness([0, 0], [1, 1]) == 1, "nobody got anything"


def test_two_infinite_times_are_the_same() -> None:
    assert [times(4, 2), times(math.inf, math.inf), times(2, math.inf)] == [2, 1, 0]
    assert times(2, 0) == math.inf and times(0, 0) == 1


def test_each_of_the_three_promises_can_be_broken() -> None:
    """Also the longest, of 180 s: first come, first served breaks some of each."""
    work = heirs.WORKLOADS["promises"]
    chosen = Windows(work, work.count, 1, 0, (512,), work.rate, heirs.PROMISE, "kind")
    requests = work.window(1, work.count, work.rate, 0)
    rows = chosen.metrics(work.engine.serve(requests, "sarathi_serve", 512), requests)
    kinds = {row["tag"]: row["promises kept"] for row in rows if "tag" in row}
    assert list(kinds) == ["kind=batch", "kind=chat", "kind=mail"]
    assert max(kinds.values()) < 90, kinds
