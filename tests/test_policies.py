"""What sets the policies apart: worked examples, memory pressure, and one property test over all of
them.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import drive, requests_of, shapes

from batch import Request
from scheduler import Scheduler, make_scheduler


def running(scheduler: Scheduler, requests: list[Request], prefilled: list[int]) -> None:
    """Put requests into the running batch with that much of their prefill done; a finished prefill
    has one token out.
    """
    for request, tokens in zip(requests, prefilled, strict=True):
        scheduler.add(request)
        assert scheduler.admit() is request
        request.prefilled = request.context = tokens
        if not request.in_prefill:
            request.output.append(7)


def test_worked_example_of_a_dynamic_schedule() -> None:
    """Its schedule [1024, 512, 256]: 2 decodes, the last 250 tokens of a request in stage 3, and
    772 of one in stage 1: 1024 together. The stage is the number of chunks that have run.
    """
    for policy, chunk_size in (("dynamic:1024,512,256", 8), ("dynamic", 1024)):
        scheduler = make_scheduler(policy, 8, chunk_size)
        requests = requests_of((9, 5), (9, 5), (600, 5))
        running(scheduler, requests, [9, 9, 350])
        requests[2].chunks_run = 2
        scheduler.add(Request(3, range(3000), 5))
        batch = scheduler.schedule(0.0)
        assert shapes([batch]) == [([250, 772], 2)] and batch.num_tokens == 1024


def test_dynamic_stages() -> None:
    """Alone, a prompt is cut into C, C/2, and then C/4 to its end, or into the sizes given."""
    for policy, lengths in (("dynamic", (16, 8, 4, 4, 1)), ("dynamic:20,6", (20, 6, 6, 1))):
        assert shapes(drive(make_scheduler(policy, 1, 16), requests_of((33, 1)))) == [
            ([n], 0) for n in lengths
        ]


def test_dynamic_always_gives_something() -> None:
    """More decodes than the last size: a prompt still gets a quarter of that, as long as the batch
    has room, and the next request gets what is left of the first size.
    """
    for decodes, run, chunks in ((20, 2, [4, 40]), (62, 9, [2])):
        scheduler = make_scheduler("dynamic:64,32,16", 80, 8)
        requests = requests_of(*[(2, 50)] * decodes, (200, 5))
        running(scheduler, requests, [2] * decodes + [100])
        requests[decodes].chunks_run = run
        scheduler.add(Request(99, range(200), 5))
        assert shapes([scheduler.schedule(0.0)]) == [(chunks, decodes)]


def test_dynamic_begins_again_after_a_preemption() -> None:
    """A request that has lost its cache is in stage 1 again."""
    scheduler = make_scheduler("dynamic", 2, 16, cache_tokens=100)
    (request,) = requests_of((40, 5))
    scheduler.add(request)
    for _ in range(2):
        scheduler.update(scheduler.schedule(0.0), [])
    assert (request.chunks_run, request.prefilled) == (2, 24)
    assert scheduler.preempt() is request and request.chunks_run == 0
    assert shapes([scheduler.schedule(0.0)]) == [([16], 0)]


# prompt and output tokens of A and B at once, and of C two iterations later
WORK = [(6, 4), (5, 3), (4, 3)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # C waits for A and B to end
        ("request_level", [([6, 5], 0), ([], 2), ([], 2), ([], 1), ([4], 0), ([], 1), ([], 1)]),
        # A and B stall while C prefills
        ("vllm_v0", [([6, 5], 0), ([], 2), ([4], 0), ([], 3), ([], 2)]),
        ("orca", [([6, 5], 0), ([], 2), ([4], 2), ([], 2), ([], 1)]),
        ("sarathi", [([6], 0), ([5], 1), ([4], 2), ([], 3), ([], 1)]),
        ("sarathi_serve", [([6, 2], 0), ([3], 1), ([4], 2), ([], 3), ([], 1)]),
        ("chunked_only", [([6, 2], 0), ([], 1), ([3, 4], 0), ([], 3), ([], 3)]),
        # 6 + 5 would be over the budget of 8
        ("hybrid_only", [([6], 0), ([5], 1), ([4], 2), ([], 3), ([], 1)]),
        ("vllm_v1", [([6, 2], 0), ([3], 1), ([4], 2), ([], 3), ([], 1)]),
        # A waits for all chunks of B, and both for C
        ("prefill_first", [([6, 2], 0), ([3], 0), ([4], 0), ([], 3), ([], 3), ([], 1)]),
        ("no_evict", [([6, 2], 0), ([3], 1), ([4], 2), ([], 3), ([], 1)]),
    ],
)
def test_one_workload_under_each_policy(policy: str, expected: list[tuple[list[int], int]]) -> None:
    """Checked by hand, iteration by iteration: budget 8, four slots."""
    assert shapes(drive(make_scheduler(policy, 4, 8), requests_of(*WORK), [0, 0, 2])) == expected


def test_hybrid_only_counts_the_decodes() -> None:
    """Budget 8: two prompts of 4 fit alone, but not beside a decode."""
    work, moments = [(2, 4), (4, 3), (4, 2)], [0, 1, 1]
    batches = drive(make_scheduler("hybrid_only", 4, 8), requests_of(*work), moments)
    assert shapes(batches) == [([2], 0), ([4], 1), ([4], 2), ([], 3)]
    together = drive(make_scheduler("hybrid_only", 4, 8), requests_of(*work[1:]))
    assert shapes(together) == [([4, 4], 0), ([], 2), ([], 1)]


def test_vllm_v0_with_a_most_of_prompt_tokens() -> None:
    """Six slots: prompts of 4, 3, 9, 2, 3 and 1 tokens, and at most 7 tokens at a time. The prompt
    of 9 is too long, and goes alone. Nobody overtakes it.
    """
    work = [(4, 3), (3, 3), (9, 3), (2, 3), (3, 3), (1, 3)]
    expected = [([4, 3], 0), ([9], 0), ([2, 3, 1], 0), ([], 6), ([], 6)]
    assert shapes(drive(make_scheduler("vllm_v0:7", 6, 8), requests_of(*work))) == expected
    for policy in ("vllm_v0", "vllm_v0:22"):
        whole = [([4, 3, 9, 2, 3, 1], 0), ([], 6), ([], 6)]
        assert shapes(drive(make_scheduler(policy, 6, 8), requests_of(*work))) == whole
    one_by_one = [([prompt], 0) for prompt, _ in work]
    batches = drive(make_scheduler("vllm_v0:1", 6, 8), requests_of(*work))
    assert shapes(batches) == [*one_by_one, ([], 6), ([], 6)]


def test_preemption_by_hand() -> None:
    """A cache of 12 tokens, two prompts of 4: when both contexts are 6 it is full, B leaves, and
    comes back when A has ended.
    """
    first, second = requests = requests_of((4, 6), (4, 5))
    scheduler = make_scheduler("orca", 2, 8, cache_tokens=12)
    batches = drive(scheduler, requests)
    together, alone = [([4, 4], 0), ([], 2), ([], 2)], [([], 1)] * 3
    assert shapes(batches) == [*together, *alone, ([7], 0), ([], 1)]
    assert (first.preemptions, second.preemptions, second.prefill_length) == (0, 1, 4 + 3)
    assert scheduler.memory.taken == 0 and [len(request.output) for request in requests] == [6, 5]


def content(
    policy: str, size: int, budget: int, work: list[tuple[int, int, int]], memory: int | None = None
) -> tuple[list[tuple[list[tuple[int, int, int]], list[int]]], int]:
    """The chunks (request, start, length) and decodes of each batch; and how many are preempted.

    work: prompt, output and step of arrival of each request.
    """
    requests = requests_of(*[each[:2] for each in work])
    scheduler, found = make_scheduler(policy, size, budget, memory), []
    for batch in drive(scheduler, requests, [each[2] for each in work]):
        chunks = [(chunk.request.request_id, chunk.start, chunk.length) for chunk in batch.chunks]
        found.append((chunks, [request.request_id for request in batch.decodes]))
    return found, sum(request.preemptions for request in requests)


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 30))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 60), st.lists(SIZES, min_size=1))
def test_sarathi_serve_by_other_names(size: int, budget: int, spare: int, work: list) -> None:
    """vllm_v1 has its batches, also with little memory and B > C, unless a threshold is given.
    no_evict has them where all fit; else it never preempts.
    """
    for memory in (None, spare + max(prompt + output for prompt, output, _ in work)):
        ours = content("sarathi_serve", size, budget, work, memory)
        for policy in ("vllm_v1", "vllm_v1:40"):
            assert content(policy, size, budget, work, memory) == ours
        careful = content("no_evict", size, budget, work, memory)
        assert careful == ours if memory is None else careful[1] == 0


def test_vllm_v1_with_a_threshold() -> None:
    """Budget 8, prompts of 12 and 3. With a threshold of 4, the short one need not wait for the
    long one. The long one ends later, because a part of the budget lies idle.
    """
    work = [(12, 2, 0), (3, 3, 0)]
    batches = [([(0, 0, 8)], []), ([(0, 8, 4), (1, 0, 3)], []), ([], [0, 1]), ([], [1])]
    assert content("sarathi_serve", 4, 8, work) == (batches, 0)
    batches = [([(0, 0, 4), (1, 0, 3)], []), ([(0, 4, 4)], [1]), ([(0, 8, 4)], [1]), ([], [0])]
    assert content("vllm_v1:4", 4, 8, work) == (batches, 0)


def test_no_evict_by_hand() -> None:
    """A and B have prompts of 6 and up to 8 output tokens: each needs 13 tokens of cache at last.
    20 hold both prompts, but not both outputs: B waits for A. 26 are just enough for both.
    """
    work = [(6, 8, 0), (6, 8, 0)]
    assert content("sarathi_serve", 2, 12, work, 20)[1] == 1
    first, second = ([([(n, 0, 6)], []), *[([], [n])] * 7] for n in (0, 1))
    assert content("no_evict", 2, 12, work, 20) == (first + second, 0)
    together = [([(0, 0, 6), (1, 0, 6)], []), *[([], [0, 1])] * 7]
    assert content("no_evict", 2, 12, work, 26) == (together, 0)
