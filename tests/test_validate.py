"""What validate.py computes of two processes: the prediction, the medians, the errors.
The real run is tests/test_distributed.py's.
"""

import dataclasses
import sys

import pytest
from test_calibrate import calibrated

from batch import Request
from command.cli import run_main
from experiments import validate
from experiments.lib.measuring import this_machine
from experiments.lib.rows import Rows, read_rows
from experiments.lib.steady import run_priced
from experiments.lib.validation import errors, pairs
from experiments.validate import WORKS, Draw, compare_staged, predict
from serving.calibration import CalibratedModel, Calibration
from simulate import CostExecutor

HOP = 1e-5  # s


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    found = calibrated()
    return dataclasses.replace(
        found, gpu=dataclasses.replace(found.gpu, name=f"{this_machine('cpu')}, bfloat16")
    )


def as_measured(trace, work: int = 0) -> dict:
    """A predicted run, written as distributed.py writes a measured one."""
    names = ("seconds", "busy", "bubble_share")
    return {name: getattr(trace, name) for name in names} | {"workload": work, "hop": HOP}


def test_one_request_takes_as_long_as_without_a_pipeline(calibration):
    """Its iterations walk through both stages one after the other: cutting the layers costs nothing
    but the hops.
    """
    work = Draw("orca", 3, 128, ((300, 7),))
    alone = run_priced(
        CostExecutor(CalibratedModel(calibration)), [Request(0, range(300), 7)], "orca", 1, 1
    )
    assert predict(calibration, work, hop=0.0).seconds == pytest.approx(alone.seconds)
    assert predict(calibration, work, hop=HOP).seconds > alone.seconds + 7 * HOP
    assert predict(calibration, work, hop=0.0, slower=(1.5, 1.5)).seconds == pytest.approx(
        1.5 * alone.seconds
    )


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
