"""Calibration and validation: known laws are recovered, files keep what they hold, and broken ones
say where in one line.
"""

import dataclasses
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ran, run_loop

from batch import Batch, Request
from command.checks import UserError
from command.cli import run_main
from configs import MODELS, ModelConfig
from costmodel import make_batch
from experiments import calibrate, validate
from experiments.calibrate import make_plan
from experiments.lib.measuring import this_machine
from experiments.lib.rows import Rows, read_rows
from experiments.lib.steady import run_priced
from experiments.lib.validation import errors, pairs
from experiments.validate import WORKS, Draw, compare_staged, predict
from loop import Result
from scheduler import POLICIES, make_scheduler
from serving.calibration import CalibratedModel, Calibration
from simulate import CostExecutor

HOP = 1e-5  # s
pytestmark = pytest.mark.usefixtures("sketches")


MODEL = MODELS["laptop"]
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
    plan, results = make_plan(2048), []
    for batch in plan.batches:
        factor = hybrid if batch.chunks and batch.decodes else 1.0
        operators = {name: factor * seconds for name, seconds in law(batch).items()}
        results.append(Result([], sum(operators.values()), operators | {"others": 0.0}))
    return calibrate.calibrate(LLM_OF_LAW, "laptop", plan, results)


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
    cost, truth = CalibratedModel(found), law(batch)
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


class Machine:
    """The made-up machine, on a clock of its own. From `slow_after` s on, all takes twice as long.

    The clock also ticks between iterations: what the engine does there takes time, too.
    """

    def __init__(self, slow_after: float = float("inf")) -> None:
        self.now, self.slow_after, self.longest, self.runs = 0.0, slow_after, 0.0, []

    def clock(self) -> float:
        return self.now

    def run(self, batch: Batch) -> Result:
        factor = 2 if self.now > self.slow_after else 1
        operators = {name: factor * seconds for name, seconds in law(batch).items()}
        seconds = sum(operators.values())
        self.now += seconds + 1e-4
        self.longest = max(self.longest, seconds + 1e-4)
        self.runs.append(batch)
        return Result([], seconds, operators | {"others": 0.0})


@pytest.mark.parametrize("seconds", [7, 12])
def test_a_bound_is_a_bound_and_the_dearest_points_are_left_out(seconds):
    machine, plan = Machine(), make_plan(2048)
    kept, results = calibrate.measure(machine.run, plan, seconds, clock=machine.clock)
    assert 0.5 * seconds < machine.now <= seconds
    left_out = {id(batch) for batch in plan.batches} - {id(batch) for batch in kept.batches}
    assert left_out and plan.beyond(kept).startswith("prompts of ")
    assert {id(batch) for batch in plan.needed}.isdisjoint(left_out)
    assert "4096" in plan.beyond(kept)
    counts = [sum(run is batch for run in machine.runs) for batch in kept.batches]
    assert min(counts) >= 1 + calibrate.FEWEST_TURNS  # it was warmed up, too
    # what is left is a calibration, and it still knows the machine
    cost = CalibratedModel(calibrate.calibrate(LLM_OF_LAW, "laptop", kept, results))
    for batch in (make_batch([(0, 100, 100)]), make_batch([(300, 100, 900)], 6, 700)):
        assert cost.seconds(batch) == pytest.approx(sum(law(batch).values()), rel=0.02)


def test_a_machine_that_slows_down_ends_within_one_iteration_of_the_bound():
    machine = Machine(slow_after=5)
    kept, _ = calibrate.measure(machine.run, make_plan(2048), 12, clock=machine.clock)
    assert machine.now <= 12 + machine.longest and kept.needed


@pytest.mark.parametrize("seconds", [0.1, 2])
def test_a_bound_that_is_too_short_is_refused_before_it_is_over(seconds):
    machine = Machine()
    with pytest.raises(UserError, match=rf"--seconds {seconds} is too short: .* takes about 5 s"):
        calibrate.measure(machine.run, make_plan(2048), seconds, clock=machine.clock)
    assert machine.now <= max(seconds, 0.4)  # a look at two prompts is all that it takes


def test_round_trip(found, tmp_path):
    found.save(tmp_path / "c.json")
    again = Calibration.read(tmp_path / "c.json")
    assert again == dataclasses.replace(found, starts=list(found.starts), chunks=list(found.chunks))
    batch = make_batch([(300, 100, 900)], decodes=6, context=70)
    assert CalibratedModel(again).seconds(batch) == CalibratedModel(found).seconds(batch)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_on_a_calibration(found, policy):
    work = validate.Draw(policy, 3, 64, ((200, 5), (40, 9), (90, 1), (300, 4)))
    trace = validate.calibrated(CalibratedModel(found)).trace(work.requests(), policy, 64, 3)
    assert sorted(number for number, _ in trace.finished) == [0, 1, 2, 3]
    assert trace.num_prefill_tokens == 630 and trace.num_decodes == 4 + 8 + 0 + 3
    executor = CostExecutor(CalibratedModel(found))
    again = run_loop(make_scheduler(policy, 3, 64), executor, work.requests()).trace
    assert again.seconds == trace.seconds > 0


def test_calibrate_then_validate_for_real(tmp_path, monkeypatch):
    """A model that is small enough for seconds; how well it is predicted is no matter of a test on
    a busy machine.
    """
    monkeypatch.setitem(MODELS, "little", ModelConfig("little", 1, 2, 16, 24, 31, 1200))
    where = tmp_path / "c.json"
    little = ["--quick", "--model", "little", "--device", "cpu", "--json", where]
    assert "Hybrid batches" in ran(calibrate, *little)
    flags = ["--quick", "--calibration", where, "--out", tmp_path]
    assert "signed median" in ran(validate, *flags)
    assert (tmp_path / "validate.png").read_bytes().startswith(b"\x89PNG")
    rows = read_rows(tmp_path / "validate.csv")
    assert [row["source"] for row in rows] == len(POLICIES) * ["predicted", "measured"]
    assert all(row[quantity] > 0 for row in rows for quantity in validate.QUANTITIES)


# ------------------------------------------------------------------------------------- a pipeline


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    found = calibrated()
    return dataclasses.replace(
        found, gpu=dataclasses.replace(found.gpu, name=f"{this_machine('cpu')}, bfloat16")
    )


def as_measured(trace) -> dict:
    """A predicted run, written as generate.py writes a measured one."""
    names = ("seconds", "busy", "bubble_share")
    return {name: getattr(trace, name) for name in names} | {"hop": HOP}


def test_one_request_takes_as_long_as_without_a_pipeline(calibration):
    """Its iterations walk through both stages one after the other: cutting the layers costs nothing
    but the hops.
    """
    executor = CostExecutor(CalibratedModel(calibration))
    alone = run_priced(executor, [Request(0, range(300), 7)], "orca", 1, 1).seconds
    run = partial(predict, calibration, Draw("orca", 3, 128, ((300, 7),)))
    assert run(hop=0.0).seconds == pytest.approx(alone)
    assert run(hop=HOP).seconds > alone + 7 * HOP
    assert run(hop=0.0, slower=(1.5, 1.5)).seconds == pytest.approx(1.5 * alone)


def test_errors_are_of_the_median_run(calibration, monkeypatch):
    """Of three runs, one as predicted, one too slow, one far too slow: the middle one counts. All
    work twice as long: `alone` knows.
    """
    works = (("sarathi", ((200, 4), (90, 5), (150, 3))), ("vllm_v0", ((64, 6), (300, 2))))
    workloads = [Draw(policy, 3, 128, lengths) for policy, lengths in works]

    def real(_, asked, repeats):
        factors = (2.0, 1.0, 3.0)
        return [
            [as_measured(predict(calibration, work, HOP, (f, f))) for f in factors]
            for work in asked
        ]

    monkeypatch.setattr(validate, "run_for_real", real)
    rows = compare_staged(calibration, workloads, 3)
    every = zip(pairs(rows), errors(rows, "total time"), workloads, strict=True)
    for (ours, row), error, work in every:
        slow = predict(calibration, work, HOP, (2.0, 2.0))
        seen = row["total time"], row["bubble share"]
        assert seen == pytest.approx((slow.seconds, 100 * slow.bubble_share))
        assert [row[name] for name in WORKS] == pytest.approx([2.0, 2.0])
        assert ours["time alone"] == pytest.approx(slow.seconds)
        fast = predict(calibration, work, HOP)
        assert error == pytest.approx(100 * (fast.seconds / slow.seconds - 1)) and error < -40


def test_rows_of_another_machine_are_kept(calibration, monkeypatch, tmp_path):
    perfect = lambda _, works, repeats: [
        [as_measured(predict(calibration, work, HOP))] * repeats for work in works
    ]
    monkeypatch.setattr(validate, "run_for_real", perfect)
    calibration.save(tmp_path / "here.json")
    flags = ["--calibration", str(tmp_path / "here.json"), "--out", str(tmp_path), "--quick"]
    elsewhere = {"source": "predicted", "model": "laptop", "hardware": "an abacus", "workload": 1}
    Rows([elsewhere | {"time alone": 2.0}], {"time alone": "s"}).write(
        tmp_path / "validate_pipeline.csv"
    )
    monkeypatch.setattr(sys, "argv", ["validate.py", "--pipeline", *flags])
    run_main(validate.main)
    rows = read_rows(tmp_path / "validate_pipeline.csv")
    assert rows[0] == elsewhere | {"time alone": 2.0}, "another machine's rows are kept"
    assert [row["source"] for row in rows[1:]] == 2 * ["predicted", "measured"]
    assert (tmp_path / "validate_pipeline.png").read_bytes().startswith(b"\x89PNG")


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
