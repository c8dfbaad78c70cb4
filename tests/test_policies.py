"""What sets the policies apart: worked examples, memory pressure, and one property test over all of
them.
"""

import pytest
from test_scheduler import drive, requests_of, shapes

from batch import Request
from scheduler import (
    Scheduler,
    make_scheduler,
)


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


def test_worked_example_of_a_fixed_budget() -> None:
    """Sarathi-Serve's example: a budget of 512 holds 2 decodes, the last 400 tokens of one prompt
    and the first 110 of the next.
    """
    scheduler = make_scheduler("sarathi_serve", 8, 512)
    running(scheduler, requests_of((9, 5), (9, 5), (912, 5)), [9, 9, 512])
    scheduler.add(Request(3, range(1000), 5))
    assert shapes([scheduler.schedule(0.0)]) == [([400, 110], 2)]


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


def test_dynamic_beside_decodes() -> None:
    """Two decodes and one long prompt, C = 512: the decodes count in every size."""
    scheduler = make_scheduler("dynamic", 8, 512)
    running(scheduler, requests_of((9, 50), (9, 50)), [9, 9])
    scheduler.add(Request(2, range(5000), 5))
    lengths = []
    for _ in range(7):
        batch = scheduler.schedule(0.0)
        (chunk,) = batch.chunks
        lengths.append(chunk.length)
        assert len(batch.decodes) == 2
        scheduler.update(batch, [7, 7])
    assert lengths == [510, 254, 126, 126, 126, 126, 126]


def test_dynamic_always_gives_something() -> None:
    """More decodes than the last size: a prompt still gets a quarter of that, as long as the batch
    has room, and the next request gets what is left of the first size.
    """
    scheduler = make_scheduler("dynamic:64,32,16", 80, 8)
    requests = requests_of(*[(2, 50)] * 20, (200, 5))
    running(scheduler, requests, [2] * 20 + [100])
    requests[20].chunks_run = 2
    scheduler.add(Request(21, range(200), 5))
    assert shapes([scheduler.schedule(0.0)]) == [([4, 40], 20)]
    scheduler = make_scheduler("dynamic:64,32,16", 80, 8)
    requests = requests_of(*[(2, 50)] * 62, (200, 5))
    running(scheduler, requests, [2] * 62 + [100])
    requests[62].chunks_run = 9
    assert shapes([scheduler.schedule(0.0)]) == [([2], 62)]


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
    # Three iterations together, 3 output tokens each; then A goes on alone, and B's 4 + 3 tokens
    # are prefilled again.
    assert shapes(batches) == [
        ([4, 4], 0),
        ([], 2),
        ([], 2),
        ([], 1),
        ([], 1),
        ([], 1),
        ([7], 0),
        ([], 1),
    ]
    assert (first.preemptions, second.preemptions, second.prefill_length - len(second.prompt)) == (
        0,
        1,
        3,
    )
    assert scheduler.memory.taken == 0 and [len(request.output) for request in requests] == [6, 5]
