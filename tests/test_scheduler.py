"""Policies alone: what they put into batches, without any model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import UserError
from scheduler import POLICIES, Batch, Chunk, Request, Scheduler, make_scheduler


def drive(scheduler: Scheduler, requests: list[Request], arrive_at: list[int] | None = None) -> list[Batch]:
    """Run to the end with made-up tokens, checking every batch on its way; arrivals are counted in iterations."""
    waiting = sorted(zip(arrive_at or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
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
    members = [chunk.request for chunk in batch.chunks] + batch.decodes
    assert 1 <= len(members) <= scheduler.max_batch_size
    assert len({request.request_id for request in members}) == len(members), "a request is in a batch once"
    assert all(not request.in_prefill and request.finish_reason is None for request in batch.decodes)


def requests_of(*shapes: tuple[int, int]) -> list[Request]:
    return [Request(i, range(prompt), output) for i, (prompt, output) in enumerate(shapes)]


def shapes(batches: list[Batch]) -> list[tuple[list[int], int]]:
    return [([chunk.length for chunk in batch.chunks], len(batch.decodes)) for batch in batches]


def test_baseline_never_mixes_and_admits_whole_batches() -> None:
    batches = drive(make_scheduler("baseline", 2, 256), requests_of((5, 3), (9, 2), (4, 1)))
    assert shapes(batches) == [([5, 9], 0), ([], 2), ([], 1), ([4], 0)]


def test_sarathi_is_decode_maximal() -> None:
    """One chunk a batch, all others decode, and the fused rows stay at C while a prompt lasts (SARATHI, Sec 4.4)."""
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
    assert [chunk.length for batch in batches for chunk in batch.chunks if len(batch.decodes) == 17 and not chunk.is_last] == [239] * 4


def test_orca_runs_whole_prompts_beside_decodes() -> None:
    """Requests enter as soon as a slot is free, however many, and their prompts are never split (SARATHI, Sec 5.2)."""
    batches = drive(make_scheduler("orca", 3, 2), requests_of((5, 2), (9, 4), (4, 2), (6, 2), (7, 1)))
    assert shapes(batches) == [([5, 9, 4], 0), ([], 3), ([6, 7], 1), ([], 2)]


def test_orca_at_its_worst_is_the_baseline() -> None:
    """All requests start and end together: no prefill ever meets a decode."""
    work = [(20, 6)] * 12
    assert shapes(drive(make_scheduler("orca", 4, 8), requests_of(*work))) == shapes(
        drive(make_scheduler("baseline", 4, 8), requests_of(*work))
    )


@settings(max_examples=50, deadline=None)
@given(prompt=st.integers(1, 40), batch_size=st.integers(1, 6), longer=st.integers(0, 10), count=st.integers(1, 24))
def test_orca_at_its_best_is_sarathi_with_long_chunks(prompt: int, batch_size: int, longer: int, count: int) -> None:
    """Requests that start one after the other: the same batches as SARATHI whose C holds the longest prompt and the decodes."""
    work, arrive_at = [(prompt, batch_size + longer)] * count, list(range(count))
    orca = drive(make_scheduler("orca", batch_size, 1), requests_of(*work), arrive_at)
    sarathi = drive(make_scheduler("sarathi", batch_size, prompt + batch_size), requests_of(*work), arrive_at)
    assert shapes(orca) == shapes(sarathi)
    assert all(len(batch.chunks) <= 1 for batch in orca)


def test_decodes_that_fill_the_budget_hold_prompts_back() -> None:
    """B > C: never more than C tokens, and the next prompt starts when a decode has ended."""
    for policy in ("sarathi", "sarathi_serve"):
        batches = drive(make_scheduler(policy, 6, 2), requests_of(*[(3, 30)] * 6))
        assert max(batch.num_tokens for batch in batches) == 2 == max(len(batch.decodes) for batch in batches)


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    batch_size=st.integers(1, 6),
    chunk_size=st.integers(1, 40),
    work=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 12), st.integers(0, 60)), min_size=1, max_size=12),
)
def test_invariants(policy: str, batch_size: int, chunk_size: int, work: list[tuple[int, int, int]]) -> None:
    """Every prompt token runs once and in order, every request ends with all its tokens, first come is first served."""
    requests = [Request(i, range(prompt), output) for i, (prompt, output, _) in enumerate(work)]
    arrive_at = [arrival for _, _, arrival in work]
    scheduler = make_scheduler(policy, batch_size, chunk_size)
    batches = drive(scheduler, requests, arrive_at)
    for request, (prompt, output, _) in zip(requests, work, strict=True):
        chunks = [chunk for batch in batches for chunk in batch.chunks if chunk.request is request]
        assert [token for chunk in chunks for token in range(chunk.start, chunk.start + chunk.length)] == list(range(prompt))
        assert len(request.output) == output and request.finish_reason == "length"
        assert sum(request in batch.decodes for batch in batches) == output - 1
        assert request.context == prompt + output - 1
    first_chunks = [chunk.request for batch in batches for chunk in batch.chunks if chunk.start == 0]
    assert [arrive_at[request.request_id] for request in first_chunks] == sorted(arrive_at)
    if policy == "sarathi":
        assert all(len(batch.chunks) <= 1 for batch in batches)
    if policy in ("sarathi", "sarathi_serve", "dynamic", "chunked_only"):
        assert all(batch.num_tokens <= chunk_size for batch in batches if batch.chunks)
    if policy in ("request_level", "vllm_v0", "chunked_only"):
        assert not any(batch.chunks and batch.decodes for batch in batches)
    if policy in ("request_level", "orca", "vllm_v0", "hybrid_only"):
        assert all(chunk.length == len(chunk.request.prompt) for batch in batches for chunk in batch.chunks)
    assert not scheduler.running and not scheduler.waiting


def test_stop_token_ends_a_request() -> None:
    request = Request(0, range(3), max_tokens=10, stop_ids=frozenset({7}))
    drive(make_scheduler("sarathi", 1, 8), [request])
    assert request.output == [7] and request.finish_reason == "stop"


def test_update_catches_a_policy_that_skips_prompt_tokens() -> None:
    scheduler = make_scheduler("sarathi", 1, 8)
    scheduler.add(request := requests_of((20, 1))[0])
    scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="once and in order"):
        scheduler.update(Batch([Chunk(request, 4, 4)], []), [])


def test_update_catches_a_batch_over_B() -> None:
    scheduler = make_scheduler("sarathi", 1, 8)
    with pytest.raises(AssertionError, match="exceeds B"):
        scheduler.update(Batch([Chunk(request, 0, 4) for request in requests_of((4, 1), (4, 1))], []), [])


@pytest.mark.parametrize(
    ("policy", "batch_size", "chunk_size", "message"),
    [
        ("fifo", 4, 8, "unknown policy 'fifo': choose from request_level, orca, vllm_v0, sarathi, "),
        ("sarathi", 0, 8, "max_batch_size is 0; it must be a whole number, at least 1"),
        ("sarathi", 4, 0, "chunk_size is 0; it must be a whole number, at least 1"),
    ],
)
def test_bad_options(policy: str, batch_size: int, chunk_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_scheduler(policy, batch_size, chunk_size)


def test_bad_requests() -> None:
    with pytest.raises(UserError, match="request 3: the prompt is empty"):
        Request(3, [], 1)
    with pytest.raises(UserError, match="request 3: max_tokens is 0"):
        Request(3, [1], 0)
    with pytest.raises(UserError, match="max_tokens is 2.5; it must be a whole number"):
        Request(3, [1], 2.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cache_tokens is 0"):
        make_scheduler("sarathi", 4, 8, 0)
    with pytest.raises(
        UserError,
        match="request 0 can never run: 5 prompt tokens .max_tokens 4 need 8 tokens of cache, which holds 7".replace(" .", r" \+ "),
    ):
        make_scheduler("sarathi", 4, 8, 7).add(requests_of((5, 4))[0])
    drive(make_scheduler("sarathi", 4, 8), [request := requests_of((5, 4))[0]])
    with pytest.raises(UserError, match="request 0 has run before"):
        make_scheduler("sarathi", 4, 8).add(request)
