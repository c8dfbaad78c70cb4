"""What the loop takes in, and what a trace tells of it. Its tokens: test_oracle.py."""

import pytest
from shared import run_loop, second_by_second

from batch import Batch, Request
from command.checks import UserError
from loop import Loop
from more.policies import compared
from scheduler import POLICIES, make_scheduler


def test_times_by_hand() -> None:
    """One slot, chunks of 4, 4 and 1 tokens, one decode: an iteration takes a second."""
    requests = [Request(number, range(9), 2) for number in range(2)]
    trace = run_loop(make_scheduler("sarathi", 1, 4), second_by_second(), requests).trace
    first, second = trace.lives.values()
    assert trace.finished == [(0, 4.0), (1, 8.0)]
    assert (first.tokens, second.tokens) == ([3.0, 4.0], [7.0, 8.0])
    assert (second.ttft, second.tbt, second.scheduling_delay, second.finished) == (7, [1], 4, 8)


@pytest.mark.parametrize("name", [name for name in compared() if name != "no_evict"])
def test_recomputed_tokens_are_all_work_beyond_what_is_useful(name: str) -> None:
    """No prefix is shared here, so each token of prompt and output but the last runs once."""

    class Thrash(POLICIES[name]):
        turn = 0

        def schedule(self, now: float) -> Batch | None:
            self.turn += 1
            if self.turn % 3 == 0 and self.turn < 60 and len(self.running) > 1:
                self.preempt()
            return super().schedule(now)

    traces = []
    for policy in (POLICIES[name], Thrash):
        requests = [Request(i, range(5 + 7 * i), 12, arrival=2.0 + i) for i in range(9)]
        traces.append(trace := run_loop(policy(4, 16), second_by_second(), requests).trace)
        useful = sum(life.prompt_tokens + len(life.tokens) for life in trace.lives.values())
        work = trace.num_prefill_tokens + trace.num_decodes
        assert trace.recomputed_tokens == work - useful + len(trace.lives)
        assert trace.useful_tokens == useful == 9 * (33 + 12)
        last = max(life.tokens[-1] for life in trace.lives.values())
        assert trace.throughput == useful / (last - 2.0)
    assert traces[0].recomputed_tokens == 0 < traces[1].recomputed_tokens
    assert traces[1].throughput <= traces[0].throughput


def test_a_step_in_the_middle_of_a_step_is_refused() -> None:
    """Nothing has run twice: the loop fails with it."""

    class Again(POLICIES["orca"]):
        def schedule(self, now: float) -> Batch | None:
            loop.step()
            return super().schedule(now)

    loop = Loop(Again(2, 8), second_by_second())
    loop.add(Request(0, range(4), 2))
    for _ in range(2):
        with pytest.raises(UserError, match="step was called while a step runs, or after one"):
            loop.step()
    assert loop.trace.iterations == []


def test_a_cancelled_request_has_no_useful_tokens() -> None:
    loop = Loop(make_scheduler("orca", 2, 8), second_by_second())
    gone = Request(0, range(4), 50)
    stays = Request(1, range(6), 5, tags={"user": "ann"})
    loop.add(gone)
    loop.add(stays)
    for _ in range(3):
        loop.step()
    loop.cancel(gone)
    trace = loop.run()
    assert trace.useful_tokens == 11 and trace.throughput == 11 / 5
    parts = trace.by_tag("user")
    assert [part.useful_tokens for part in parts.values()] == [0, 11]
    assert parts["ann"].seconds == 5 and parts["ann"].policy == "orca"
    assert parts["ann"].finished == trace.finished and parts[""].cancelled == trace.cancelled


def test_what_a_loop_takes_in() -> None:
    """Arrivals keep their order."""
    executor = second_by_second()
    executor.cost = lambda batch: 3.0
    loop = Loop(make_scheduler("sarathi", 3, 8, 20), executor)
    assert loop.scheduler.cost(Batch([], [])) == 3.0, "a policy may ask what a batch costs"
    stranger = Request(0, range(9), 8)
    assert loop.cancel(stranger) is False and stranger.finish_reason is None
    for number, arrival in enumerate((5.0, 1.0, 5.0, 1.0, 5.0, 3.0)):
        loop.add(Request(number, [1], 1, arrival=arrival))
    assert [request.request_id for request in loop.arriving] == [1, 3, 5, 0, 2, 4]
