"""Policies alone: what they put into batches, without any model; and what a policy that breaks a
rule is told.
"""

import pytest
from shared import second_by_second

from batch import Batch, Chunk, Request
from command.checks import UserError
from loop import Loop, check_batch
from more.pipeline.micro_batches import Pool
from more.simulate import simulate
from scheduler import POLICIES, SarathiServe, Scheduler, make_scheduler


def drive(
    scheduler: Scheduler, requests: list[Request], arrive_at: list[int] | None = None
) -> list[Batch]:
    """The batches of a run to the end; arrivals count iterations."""
    loop = Loop(scheduler, second_by_second())
    batches = []
    for request, moment in zip(requests, arrive_at or [0] * len(requests), strict=True):
        request.arrival = moment
        loop.add(request)
    while loop.step():
        batches.append(loop.batch)
    return batches


def requests_of(*work: tuple) -> list[Request]:
    """work: prompt and output tokens of each; and when it arrives, if not at 0."""
    return [
        Request(i, range(prompt), output, arrival=sum(arrival))
        for i, (prompt, output, *arrival) in enumerate(work)
    ]


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
    # C - 1, C - 2 beside one and two decodes; the last prompt's first token is also its last
    hybrid = [([7], 1), ([7], 1), ([6], 2), ([1], 2)]
    assert shapes(batches) == [([8], 0), ([8], 0), *hybrid, *[([], 1)] * 4]


def test_decodes_that_fill_the_budget_hold_prompts_back() -> None:
    """B > C: never more than C tokens, and the next prompt starts when a decode has ended."""
    for policy in ("sarathi", "sarathi_serve"):
        batches = drive(make_scheduler(policy, 6, 2), requests_of(*[(3, 30)] * 6))
        assert max(batch.num_tokens for batch in batches) == 2
        assert max(len(batch.decodes) for batch in batches) == 2


def test_stop_token_ends_a_request() -> None:
    request = Request(0, range(3), max_tokens=10, stop_ids=frozenset({0}))
    drive(make_scheduler("sarathi", 1, 8), [request])
    assert request.output == [0] and request.finish_reason == "stop"


def test_a_policy_that_ignores_B_or_the_cache() -> None:
    class Greedy(SarathiServe):
        def admit(self) -> Request | None:
            if not self.waiting:
                return None
            self.running.append(self.waiting.popleft())
            self.memory.taken += self.running[-1].prefill_length
            return self.running[-1]

        def decodes(self) -> list[Request]:
            return [request for request in self.running if not request.in_prefill]

    POLICIES["greedy"] = Greedy
    options = {"policy": "greedy", "chunk_size": 64, "max_batch_size": 3}
    with pytest.raises(UserError, match="the batch exceeds B: 4 requests, and 3 may run"):
        simulate(requests_of(*[(9, 4)] * 4), **options)
    with pytest.raises(UserError, match="the cache overflows: 22 tokens, and it holds 20"):
        simulate(requests_of((9, 12), (9, 12)), cache_tokens=20, **options)


@pytest.mark.parametrize(("taken", "flying", "total"), [(18, 2, 21), (20, 0, 21), (0, 20, 21)])
def test_an_overflow_counts_what_is_in_flight(taken: int, flying: int, total: int) -> None:
    """Of a pipeline's shared memory; and what fills it to its last token is fine."""
    scheduler = make_scheduler("sarathi_serve", 4, 64, 20)
    decode = Request(0, range(4), 9)
    scheduler.running.append(decode)
    decode.prefilled = decode.context = 4
    scheduler.memory = Pool(20, taken)
    scheduler.memory.flying = flying
    with pytest.raises(UserError, match=f"the cache overflows: {total} tokens, and it holds 20;"):
        check_batch(scheduler, Batch([], [decode]))
    scheduler.memory.capacity = total
    check_batch(scheduler, Batch([], [decode]))


class Small(SarathiServe):
    """A budget below the number of decodes: a request is let in without a chunk."""

    def prefills(self, num_decodes: int) -> list[Chunk]:
        self.admit()
        return super().prefills(self.chunk_size if num_decodes else 0)


def test_preempted_before_it_ran() -> None:
    """To lose its place again costs a request nothing: it has no slot."""
    scheduler, (first, second) = Small(2, 8, cache_tokens=12), requests_of((4, 9), (5, 4))
    seen = 0
    scheduler.add(first)
    while first.finish_reason is None:
        batch = scheduler.schedule(0.0)
        if not first.output:
            scheduler.add(second)
        seen = max(seen, len(scheduler.running))
        check_batch(scheduler, batch)
        scheduler.update(batch, [7])
    assert seen == 2 and second.preemptions == 0
    assert scheduler.take_preempted() == [] and list(scheduler.waiting) == [second]
    assert scheduler.memory.taken == 0
