"""Policies alone: what they put into batches, without any model; and what a policy that breaks a
rule is told.
"""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch import Batch, Chunk, Request
from command.checks import UserError
from loop import check_batch
from pipeline import simulate_pipeline
from scheduler import POLICIES, SarathiServe, Scheduler, make_scheduler, whole_prefill
from simulate import simulate


def drive(
    scheduler: Scheduler, requests: list[Request], arrive_at: list[int] | None = None
) -> list[Batch]:
    """Run to the end with made-up tokens, checking every batch on its way; arrivals are counted in
    iterations.
    """
    waiting = sorted(
        zip(arrive_at or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0]
    )
    batches: list[Batch] = []
    step = 0
    while waiting or scheduler.has_work:
        while waiting and waiting[0][0] <= step:
            scheduler.add(waiting.pop(0)[1])
        batch = scheduler.schedule(now=float(step))
        step += 1
        if batch is None:
            assert not scheduler.has_work
            continue
        check(batch, scheduler)
        scheduler.update(batch, [7] * len(batch.sampled))
        batches.append(batch)
        assert step < 100_000, "a request starves"
    return batches


def check(batch: Batch, scheduler: Scheduler) -> None:
    check_batch(scheduler, batch)  # the engine's own rules, and here once more in other words
    members = [chunk.request for chunk in batch.chunks] + batch.decodes
    assert 1 <= len(members) <= scheduler.max_batch_size
    assert len({request.request_id for request in members}) == len(members), (
        "a request is in a batch once"
    )
    assert all(
        not request.in_prefill and request.finish_reason is None for request in batch.decodes
    )


def requests_of(*shapes: tuple[int, int]) -> list[Request]:
    return [Request(i, range(prompt), output) for i, (prompt, output) in enumerate(shapes)]


def shapes(batches: list[Batch]) -> list[tuple[list[int], int]]:
    return [([chunk.length for chunk in batch.chunks], len(batch.decodes)) for batch in batches]


def test_baseline_never_mixes_and_admits_whole_batches() -> None:
    batches = drive(make_scheduler("baseline", 2, 256), requests_of((5, 3), (9, 2), (4, 1)))
    assert shapes(batches) == [([5, 9], 0), ([], 2), ([], 1), ([4], 0)]


def test_sarathi_is_decode_maximal() -> None:
    """One chunk a batch, all others decode, and the fused rows stay at C while a prompt lasts
    (SARATHI, Sec 4.4).
    """
    batches = drive(make_scheduler("sarathi", 3, 8), requests_of((16, 9), (14, 3), (7, 1)))
    assert shapes(batches) == [
        ([8], 0),
        ([8], 0),
        ([7], 1),  # C - 1
        ([7], 1),
        ([6], 2),  # C - 2: two decodes ride
        ([1], 2),  # the rest of the last prompt, whose first token is also its last
        ([], 1),
        ([], 1),
        ([], 1),
        ([], 1),
    ]


def test_paper_example() -> None:
    """SARATHI, Sec 4.4: C = 256 and B = 18 make a chunk of 256 - 17."""
    scheduler = make_scheduler("sarathi", 18, 256)
    batches = drive(scheduler, requests_of(*[(1024, 200)] * 18))
    assert max(len(batch.decodes) for batch in batches if batch.chunks) == 17
    assert all(batch.num_tokens <= 256 for batch in batches)
    assert [
        chunk.length
        for batch in batches
        for chunk in batch.chunks
        if len(batch.decodes) == 17 and not chunk.is_last
    ] == [239] * 4


def test_orca_runs_whole_prompts_beside_decodes() -> None:
    """Requests enter as soon as a slot is free, however many, and their prompts are never split
    (SARATHI, Sec 5.2).
    """
    batches = drive(
        make_scheduler("orca", 3, 2), requests_of((5, 2), (9, 4), (4, 2), (6, 2), (7, 1))
    )
    assert shapes(batches) == [([5, 9, 4], 0), ([], 3), ([6, 7], 1), ([], 2)]


def test_orca_at_its_worst_is_the_baseline() -> None:
    """All requests start and end together: no prefill ever meets a decode."""
    work = [(20, 6)] * 12
    assert shapes(drive(make_scheduler("orca", 4, 8), requests_of(*work))) == shapes(
        drive(make_scheduler("baseline", 4, 8), requests_of(*work))
    )


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    longer=st.integers(0, 10),
    count=st.integers(1, 24),
)
def test_orca_at_its_best_is_sarathi_with_long_chunks(
    prompt: int, batch_size: int, longer: int, count: int
) -> None:
    """Requests that start one after the other: the same batches as SARATHI whose C holds the
    longest prompt and the decodes.
    """
    work, arrive_at = [(prompt, batch_size + longer)] * count, list(range(count))
    orca = drive(make_scheduler("orca", batch_size, 1), requests_of(*work), arrive_at)
    sarathi = drive(
        make_scheduler("sarathi", batch_size, prompt + batch_size), requests_of(*work), arrive_at
    )
    assert shapes(orca) == shapes(sarathi)
    assert all(len(batch.chunks) <= 1 for batch in orca)


def test_decodes_that_fill_the_budget_hold_prompts_back() -> None:
    """B > C: never more than C tokens, and the next prompt starts when a decode has ended."""
    for policy in ("sarathi", "sarathi_serve"):
        batches = drive(make_scheduler(policy, 6, 2), requests_of(*[(3, 30)] * 6))
        assert (
            max(batch.num_tokens for batch in batches)
            == 2
            == max(len(batch.decodes) for batch in batches)
        )


def test_stop_token_ends_a_request() -> None:
    request = Request(0, range(3), max_tokens=10, stop_ids=frozenset({7}))
    drive(make_scheduler("sarathi", 1, 8), [request])
    assert request.output == [7] and request.finish_reason == "stop"


class Broken(SarathiServe):
    """Sarathi-Serve, but `spoil` has the last word on a batch."""

    name = "broken"
    spoil: Callable = staticmethod(lambda scheduler, batch: batch)

    def schedule(self, now: float) -> Batch | None:
        return self.spoil(super().schedule(now))


def shifted(batch: Batch, start: int, length: int) -> Batch:
    return Batch(
        [
            Chunk(chunk.request, chunk.start + start, chunk.length + length)
            for chunk in batch.chunks
        ],
        batch.decodes,
    )


def empty(self: Scheduler, batch: Batch) -> Batch:
    return Batch([], [])


def nothing(self: Scheduler, batch: Batch) -> None:
    return None


def a_decode_twice(self: Scheduler, batch: Batch) -> Batch:
    return Batch(batch.chunks, 2 * batch.decodes)


def chunk_and_decode(self: Scheduler, batch: Batch) -> Batch:
    return Batch(batch.chunks, [chunk.request for chunk in batch.chunks] or batch.decodes)


def still_waiting(self: Scheduler, batch: Batch) -> Batch:
    return Batch([whole_prefill(self.waiting[0])], []) if self.waiting else batch


def skips_a_token(self: Scheduler, batch: Batch) -> Batch:
    return shifted(batch, 1, 0)


def starts_too_late(self: Scheduler, batch: Batch) -> Batch:
    return shifted(batch, 1, -1)


def one_token_too_long(self: Scheduler, batch: Batch) -> Batch:
    return shifted(batch, 0, 1)


def no_tokens(self: Scheduler, batch: Batch) -> Batch:
    return shifted(batch, 0, -9)


def decodes_too_early(self: Scheduler, batch: Batch) -> Batch:
    return Batch([], list(self.running))


BROKEN = {  # what a policy of one's own may get wrong -> what the engine says of it
    empty: "the batch is empty; return None",
    nothing: "it schedules nothing, while requests wait or run and no more will arrive",
    a_decode_twice: "a request is in the batch twice",
    chunk_and_decode: "a request is in the batch twice",
    still_waiting: "request 3 is in the batch but not running",
    skips_a_token: (
        "request 0 has prefilled 0 of 9 tokens, and its chunk is 1 to 9: prompt tokens run"
    ),
    starts_too_late: (
        "request 0 has prefilled 0 of 9 tokens, and its chunk is 1 to 8: prompt tokens run"
    ),
    one_token_too_long: (
        "request 0 has prefilled 0 of 9 tokens, and its chunk is 0 to 9: prompt tokens run"
    ),
    no_tokens: "its chunk is 0 to -1: prompt tokens run exactly once and in order",
    decodes_too_early: "request 0 decodes, but has prefilled 0 of 9 tokens",
}


@pytest.mark.parametrize("spoil", BROKEN)
def test_a_broken_policy_is_told_which_rule_it_breaks(
    spoil: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the batch runs, in one line that names the policy: priced, and in a pipeline that
    shares the queue.
    """
    monkeypatch.setitem(POLICIES, "broken", Broken)
    monkeypatch.setattr(Broken, "spoil", spoil)
    with pytest.raises(UserError, match=r"policy 'broken' \(Broken\): .*" + BROKEN[spoil]):
        simulate(requests_of(*[(9, 4)] * 4), policy="broken", chunk_size=64, max_batch_size=3)
    with pytest.raises(UserError, match=r"policy 'broken' \(Broken\): "):
        simulate_pipeline(
            requests_of(*[(9, 4)] * 4), policy="broken", chunk_size=64, max_batch_size=3, stages=2
        )


def test_a_policy_that_ignores_B_or_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(SarathiServe):
        def admit(self) -> Request | None:
            if not self.waiting:
                return None
            self.running.append(self.waiting.popleft())
            self.memory.taken += self.running[-1].prefill_length
            return self.running[-1]

        def decodes(self) -> list[Request]:
            return [request for request in self.running if not request.in_prefill]

    monkeypatch.setitem(POLICIES, "greedy", Greedy)
    with pytest.raises(UserError, match="the batch exceeds B: 4 requests, and 3 may run"):
        simulate(requests_of(*[(9, 4)] * 4), policy="greedy", chunk_size=64, max_batch_size=3)
    with pytest.raises(UserError, match="the cache overflows: 22 tokens, and it holds 20"):
        simulate(
            requests_of((9, 12), (9, 12)),
            policy="greedy",
            chunk_size=64,
            max_batch_size=3,
            cache_tokens=20,
        )


def test_preempted_before_it_ran() -> None:
    """A budget below the number of decodes lets a request in without a chunk. To lose its place
    again costs it nothing: it has no slot.
    """

    class Small(SarathiServe):
        def prefills(self, num_decodes: int) -> list[Chunk]:
            self.admit()
            return super().prefills(self.chunk_size if num_decodes else 0)

    scheduler, requests = Small(2, 8, cache_tokens=12), requests_of((4, 9), (5, 4))
    scheduler.add(requests[0])
    scheduler.update(batch := scheduler.schedule(0.0), [7] * len(batch.sampled))
    scheduler.add(requests[1])
    seen = 0
    while requests[0].finish_reason is None:
        batch = scheduler.schedule(0.0)
        seen = max(seen, len(scheduler.running))
        check_batch(scheduler, batch)
        scheduler.update(batch, [7])
    assert (
        seen == 2
        and requests[1].preemptions == 0
        and scheduler.take_preempted() == []
        and list(scheduler.waiting) == [requests[1]]
    )
    assert scheduler.memory.taken == 0
