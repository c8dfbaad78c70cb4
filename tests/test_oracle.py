"""The backbone: whatever happens, a request gets the tokens that it gets alone."""

import pytest

from scheduler import POLICIES
from tests.oracle import DRIVERS, perform

SEVERAL = [*POLICIES, "dynamic:12,5,2", "vllm_v0:7"]
OF_PIPELINES = ["td_pipe", "td_pipe:constant=1"]
CASES = [
    (driver, policy)
    for driver in DRIVERS
    for policy in SEVERAL + OF_PIPELINES * (driver == "MicroBatches")
]


@pytest.mark.parametrize(("driver", "policy"), CASES)
def test_same_tokens_whatever_happens(driver: str, policy: str) -> None:
    for seed in range(6):
        perform(driver, seed, policy)
