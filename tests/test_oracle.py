"""The backbone: whatever happens, a request gets the tokens that it gets alone."""

from collections import Counter
from pathlib import Path

import pytest

from command.checks import UserError
from more.beam.request import BeamRequest
from more.policies import HEIRS
from scheduler import POLICIES, Scheduler
from tests import oracle
from tests.oracle import DRIVERS, perform

SEVERAL = [*POLICIES, "dynamic:12,5,2", "vllm_v0:7", "vllm_v1:5", "srpt:30"]
OF_PIPELINES = ["td_pipe", "td_pipe:constant=1"]
CASES = [
    (driver, policy)
    for driver in DRIVERS
    for policy in SEVERAL + OF_PIPELINES * (driver == "MicroBatches")
]


@pytest.mark.parametrize(("driver", "policy"), CASES)
def test_same_tokens_whatever_happens(
    driver: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: Counter[type] = Counter()
    for kind in (Scheduler, BeamRequest):
        counted(kind, count, monkeypatch)
    for seed in range(3 if policy in HEIRS else 6):
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


def test_a_policy_of_ones_own_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One that changes a token is named; one that keeps all passes."""
    monkeypatch.setattr(oracle, "PLAYS", 2)
    path = tmp_path / "mine.py"
    path.write_text(
        "from scheduler import Orca\nclass Mine(Orca):\n    name = 'mine'\n"
        "    def update(self, batch, tokens): return super().update(batch, [0 for _ in tokens])\n"
    )
    monkeypatch.setattr("sys.argv", ["oracle", str(path)])
    with pytest.raises(UserError, match="policy 'mine', driver Loop, play 0: request . does not"):
        oracle.main()
    monkeypatch.setattr(
        "sys.argv", ["oracle", str(Path(oracle.__file__).parents[1] / "examples/priority.py")]
    )
    oracle.main()
    assert capsys.readouterr().out.startswith("priority: the same tokens as alone, in 2 plays of")
