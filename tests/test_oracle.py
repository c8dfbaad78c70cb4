"""The backbone: whatever happens, a request gets the tokens that it gets alone."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from command.checks import UserError
from more.beam.request import BeamRequest
from more.loading.policyfile import load_policies
from more.policies import HEIRS
from scheduler import POLICIES, Scheduler
from tests import oracle
from tests.oracle import DRIVERS, perform

SEVERAL = [*POLICIES, "dynamic:12,5,2", "vllm_v0:7", "vllm_v1:5", "srpt:30"]
OF_PIPELINES = ["td_pipe", "td_pipe:constant=1"]
CASES = []
for driver in DRIVERS:
    policies = SEVERAL + OF_PIPELINES if driver == "MicroBatches" else SEVERAL
    # test_plays_have_too_little_room has all plays of sarathi_serve
    CASES += [(driver, policy) for policy in policies if policy != "sarathi_serve"]


@pytest.mark.parametrize(("driver", "policy"), CASES)
@pytest.mark.parametrize("third", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_same_tokens_whatever_happens(third: int, driver: str, policy: str) -> None:
    plays = 1 if policy in HEIRS else 2
    for seed in range(third * plays, (third + 1) * plays):
        perform(driver, seed, policy)


@pytest.mark.parametrize("driver", DRIVERS)
def test_plays_have_too_little_room(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are the same; requests are preempted, and searches start anew."""
    count: Counter[type] = Counter()
    for kind in (Scheduler, BeamRequest):
        counted(kind, count, monkeypatch)
    for seed in range(6):
        perform(driver, seed, "sarathi_serve")
    assert count[Scheduler] > 2 and (driver != "Loop" or count[BeamRequest])


def counted(kind: type, count: Counter[type], monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the preemptions of requests, and the restarts of searches."""
    name = "preempt" if kind is Scheduler else "restart"
    method = getattr(kind, name)

    def noted(*who: object) -> object:
        count[kind] += 1
        return method(*who)

    monkeypatch.setattr(kind, name, noted)


@pytest.fixture
def ask_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[str], str]:
    """What `python -m tests.oracle` prints of a file of policies, given as its text."""
    path = tmp_path / "mine.py"

    def asked(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(oracle, "PLAYS", 3)
        monkeypatch.setattr("sys.argv", ["oracle", str(path)])
        oracle.main()
        return capsys.readouterr().out

    return asked


def test_a_policy_of_ones_own_is_checked(ask_oracle: Callable[[str], str]) -> None:
    """One that changes a token is named."""
    said = "policy 'mine', driver Loop, play 0, at the end: request . does not end as alone, output"
    with pytest.raises(UserError, match=rf"{said} token \d+: it is 0, and must be \d+$"):
        ask_oracle(
            "from scheduler import Orca\nclass Mine(Orca):\n    name = 'mine'\n    def update(self,"
            " batch, tokens): return super().update(batch, [0 for _ in tokens])\n"
        )


def test_a_policy_that_knows_the_future_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seer.py"
    path.write_text(
        "from scheduler import SarathiServe\nclass Seer(SarathiServe):\n    name = 'seer'\n"
        "    def rank(self, request): return request.ends_after  # not ends_after\n"
    )
    monkeypatch.setattr("sys.argv", ["oracle", str(path)])
    with pytest.raises(UserError, match=r"seer.py, line 4: a policy may not know `ends_after`"):
        oracle.main()


@pytest.mark.parametrize("driver", oracle.DRIVERS)
def test_who_is_rejected_has_the_first_of_its_tokens(driver: str, tmp_path: Path) -> None:
    """A policy may refuse who waits, and who runs."""
    path = tmp_path / f"refuse_{driver}.py"
    path.write_text(
        f"from scheduler import SarathiServe\nclass Refuse(SarathiServe):\n"
        f"    name = 'refuse{driver}'\n    times = 0\n"
        "    def schedule(self, now):\n"
        "        self.times += 1\n"
        "        if self.times % 3 == 0 and self.waiting: self.reject(self.waiting[-1])\n"
        "        if self.times % 7 == 0 and self.running: self.reject(self.running[0])\n"
        "        return super().schedule(now)\n"
    )
    load_policies(path)
    for seed in range(8):
        oracle.perform(driver, seed, f"refuse{driver}")


WRONG = {  # what a policy of one's own gets wrong, and what it is told: rule, request, step
    "memory": (
        (
            "    def update(self, batch, tokens):\n"
            "        self.memory.taken += 1\n"
            "        return super().update(batch, tokens)\n"
        ),
        r"step \d+: tokens .* in `memory.taken`: it is \d+, and must be \d+$",
    ),
    "twice": (
        (
            "    def schedule(self, now):\n"
            "        batch = super().schedule(now)\n"
            "        if batch: batch.decodes *= 2\n"
            "        return batch\n"
        ),
        r"step \d+: policy 'mine' \(Mine\): a request is in the batch twice: \d+$",
    ),
    "starves": (
        (
            "    def can_admit(self):\n"
            "        return super().can_admit() and self.waiting[0].request_id != 0\n"
        ),
        r"step \d+: policy 'mine' \(Mine\): it schedules nothing, while requests wait or run",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_oracle_says_which_rule_was_broken_where(
    what: str, ask_oracle: Callable[[str], str]
) -> None:
    code, said = WRONG[what]
    head = "from scheduler import SarathiServe\nclass Mine(SarathiServe):\n    name = 'mine'\n"
    with pytest.raises(UserError, match=rf"policy 'mine', driver Loop, play \d, {said}"):
        ask_oracle(head + code)


def test_a_policy_may_preempt_as_it_likes(ask_oracle: Callable[[str], str]) -> None:
    """For a slot, as srpt does; or for no reason. Each request still gets its own tokens."""
    said = ask_oracle(
        "from scheduler import SarathiServe\n"
        "class Slot(SarathiServe):\n    name = 'slot'\n"
        "    def schedule(self, now):\n"
        "        if self.waiting and self.running and not self.can_admit():\n"
        "            self.once(max(self.running, key=lambda r: len(r.prompt)))\n"
        "        return super().schedule(now)\n"
        "    def once(self, request):\n"
        "        if not request.preemptions:\n"
        "            self.preempt(request)\n"
        "            self.waiting.rotate(-1)\n"
        "class Whim(Slot):\n    name = 'whim'\n"
        "    def schedule(self, now):\n"
        "        for request in [r for r in self.running if len(r.output) == 3]:\n"
        "            self.once(request)\n"
        "        return super().schedule(now)\n"
    )
    assert said.count("the same tokens as alone") == 2
