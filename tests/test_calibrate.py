"""Calibration and validation: known laws are recovered, files keep what they hold, and broken ones
say where in one line.
"""

from types import SimpleNamespace

import pytest
import torch
from shared import ran

from batch import Batch
from configs import MODELS, ModelConfig
from costmodel import make_batch
from experiments import calibrate, validate
from experiments.calibrate import make_plan
from experiments.lib.rows import read_rows
from loop import Result
from more.policies import compared
from more.serving.calibration import CalibratedModel, Calibration

pytestmark = pytest.mark.usefixtures("sketches")


MODEL = MODELS["llama-0.2b"]
LLM_OF_LAW = SimpleNamespace(config=MODEL, device=torch.device("cpu"), dtype=torch.bfloat16)
# s, and 2 ms each to begin with
PER_TOKEN = {"preproj": 4e-5, "postproj": 2e-5, "ffn_ln1": 9e-5, "ffn_ln2": 5e-5, "others": 1e-5}


def law(batch: Batch) -> dict[str, float]:
    """A made-up machine: all is a straight line, but for the square of a prompt's attention."""
    operators = {name: 2e-3 + slope * batch.num_tokens for name, slope in PER_TOKEN.items()}
    operators["others"] += 1e-3 + 1e-4 * len(batch.sampled) if batch.sampled else 0.0
    attention = 3e-4 + sum(5e-4 + 1e-6 * request.context for request in batch.decodes)
    for chunk in batch.chunks:
        if chunk.start == 0:
            attention += 1e-4 + 2e-6 * chunk.length + 1e-8 * chunk.length**2
        else:
            attention += (
                4e-4 + 3e-6 * chunk.length + 1e-6 * chunk.start + 3e-8 * chunk.start * chunk.length
            )
    return operators | {"attn": attention}


def calibrated(hybrid: float = 1.0) -> Calibration:
    """The made-up machine, calibrated; its hybrid batches take so much more than their parts."""
    plan = make_plan(2048)
    results = []
    for batch in plan.batches:
        factor = hybrid if batch.chunks and batch.decodes else 1.0
        operators = {name: factor * seconds for name, seconds in law(batch).items()}
        results.append(Result([], sum(operators.values()), operators | {"others": 0.0}))
    return calibrate.calibrate(LLM_OF_LAW, "llama-0.2b", plan, results)


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrated()


@pytest.mark.parametrize(
    "batch",
    [
        make_batch([(0, 700, 700)] * 8),
        make_batch(decodes=5, context=300),
        make_batch([(300, 100, 900)], decodes=6, context=70),
    ],
)
def test_a_known_machine_is_recovered(found, batch):
    cost = CalibratedModel(found)
    truth = law(batch)
    assert cost.operators(batch) == pytest.approx(truth, rel=0.01)
    assert cost.seconds(batch) == pytest.approx(sum(truth.values()), rel=0.003)
    assert sum(cost.operators(batch).values()) == pytest.approx(cost.seconds(batch))


def test_what_a_hybrid_batch_costs_above_its_parts_is_found():
    found = calibrated(hybrid=1.07)
    assert found.hybrid == pytest.approx(1.07, abs=0.003)
    cost = CalibratedModel(found)
    for decodes, factor in ((6, 1.07), (0, 1.0)):
        batch = make_batch([(300, 100, 900)], decodes, context=70)
        seconds = cost.seconds(batch)
        assert seconds == pytest.approx(factor * sum(law(batch).values()), rel=0.006)
        assert sum(cost.operators(batch).values()) == pytest.approx(seconds)


def test_turns_go_on_until_the_time_is_over(monkeypatch):
    """Each point is warmed up, and runs three times or more; its mean counts."""
    plan = make_plan(2048, quick=True)
    clock = iter(range(10**6))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(clock))
    for seconds, turns in ((0, 3), (5, 8), (99, 15)):
        runs = []

        def run(batch: Batch, runs: list = runs) -> Result:
            runs.append(batch)
            return Result([], float(len(runs)), {"attn": 0.5})

        means = calibrate.measure(run, plan, seconds)
        count = len(plan.batches)
        assert len(runs) == (1 + turns) * count and runs[:count] == plan.batches
        last = [1 + place + turn * count for turn in range(1, 1 + turns) for place in (0,)]
        assert means[0].seconds == pytest.approx(sum(last) / turns)


@pytest.mark.usefixtures("sketches")
def test_calibrate_then_validate_for_real(tmp_path, monkeypatch):
    """A model that is small enough for seconds; how well it is predicted is no matter of a test on
    a busy machine.
    """
    monkeypatch.setitem(MODELS, "little", ModelConfig("little", 1, 2, 16, 24, 31, 1200))
    where = tmp_path / "c.json"
    little = ["--quick", "--model", "little", "--device", "cpu", "--json", where]
    assert "a hybrid batch takes" in ran(calibrate, *little)
    flags = ["--quick", "--calibration", where, "--out", tmp_path]
    assert "signed median" in ran(validate, *flags)
    assert (tmp_path / "quick" / "validate.png").read_bytes().startswith(b"\x89PNG")
    rows = read_rows(tmp_path / "quick" / "validate.csv")
    assert [row["source"] for row in rows] == len(compared()) * ["predicted", "measured"]
    assert all(row[quantity] > 0 for row in rows for quantity in validate.QUANTITIES)


def test_decodes_are_taken_apart() -> None:
    times = {
        (count, context): 0.002 + count * (1e-4 + 1e-6 * context)
        for count in (1, 8)
        for context in (16, 512, 1024)
    }
    fixed, curve = calibrate.fit_decodes(times)
    assert fixed == pytest.approx(0.002)
    assert curve.x == [15, 511, 1023]  # cached before the step: a decode attends to itself as well
    assert curve(511) == pytest.approx(1e-4 + 1e-6 * 512)
