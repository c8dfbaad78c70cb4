"""The backbone: whatever happens, a request gets the tokens that it gets alone."""

from collections import Counter

import pytest

from more.beam.request import BeamRequest
from scheduler import POLICIES, Scheduler
from tests.oracle import DRIVERS, perform

SEVERAL = [*POLICIES, "dynamic:12,5,2", "vllm_v0:7", "vllm_v1:5", "srpt:30"]
OF_PIPELINES = ["td_pipe", "td_pipe:constant=1"]
CASES = [
    (driver, policy)
    for driver in DRIVERS
    for policy in SEVERAL + OF_PIPELINES * (driver == "MicroBatches")
]


SEEDS = range(6)


@pytest.mark.parametrize(("driver", "policy"), CASES)
def test_same_tokens_whatever_happens(
    driver: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: Counter[type] = Counter()
    for kind in (Scheduler, BeamRequest):
        counted(kind, count, monkeypatch)
    for seed in SEEDS:
        perform(driver, seed, policy)
    if policy == "sarathi_serve":  # else there would always be room for all
        assert count[Scheduler] > 2 and (driver != "Loop" or count[BeamRequest])


def counted(kind: type, count: Counter[type], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the preemptions of requests, and the restarts of searches."""
    name = "preempt" if kind is Scheduler else "restart"
    method = getattr(kind, name)

    def noted(*who: object) -> object:
        count[kind] += 1
        return method(*who)

    monkeypatch.setattr(kind, name, noted)
