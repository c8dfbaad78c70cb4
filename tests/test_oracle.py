"""The backbone: whatever happens, a request gets the tokens that it gets alone."""

import pytest

from beam.request import BeamRequest
from scheduler import POLICIES, Scheduler
from tests.oracle import DRIVERS, perform

SEVERAL = [*POLICIES, "dynamic:12,5,2", "vllm_v0:7", "vllm_v1:5"]
OF_PIPELINES = ["td_pipe", "td_pipe:constant=1"]
CASES = [
    (driver, policy)
    for driver in DRIVERS
    for policy in SEVERAL + OF_PIPELINES * (driver == "MicroBatches")
]


@pytest.mark.parametrize(("driver", "policy"), CASES)
def test_same_tokens_whatever_happens(driver: str, policy: str) -> None:
    for seed in range(10):
        perform(driver, seed, policy)


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_plays_preempt(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would be empty if there were always room for all."""
    preempted, preempt = [], Scheduler.preempt
    monkeypatch.setattr(Scheduler, "preempt", lambda *who: preempted.append(who) or preempt(*who))
    for seed in range(10):
        perform(driver, seed, "sarathi_serve")
    assert len(preempted) > 3


def test_the_plays_preempt_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts, restart = [], BeamRequest.restart
    monkeypatch.setattr(BeamRequest, "restart", lambda who: restarts.append(who) or restart(who))
    for seed in range(10):
        perform("Loop", seed, "orca")
        perform("Loop", seed, "sarathi_serve")
    assert restarts
