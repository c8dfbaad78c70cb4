"""experiments/law_kernels.py: what the data sheet alone would give, and how errors are counted."""

import sys
from pathlib import Path

import pytest

from configs import GPUS
from experiments import law_kernels
from experiments.law_kernels import Priced, median_error, sheet_seconds
from experiments.lib.measured_kernels import Kernel


def test_the_data_sheet_s_time_by_hand() -> None:
    gpu = GPUS["h100"]
    wide = Kernel("h100", "product", (4096, 8192, 8192), 1.0)
    assert sheet_seconds(wide) == pytest.approx(2 * 4096 * 8192 * 8192 / gpu.peak)
    one = Kernel("h100", "product", (1, 8192, 8192), 1.0)  # its weights, 2 bytes each
    assert sheet_seconds(one) == pytest.approx(2 * (8192 * 8192 + 2 * 8192) / gpu.bandwidth)
    # each query meets the keys up to its own: half of the square
    prompt = Kernel("h100", "prefill", (1, 16384, 32, 8), 1.0)
    square = 4 * 128 * 32 * 16384**2 / gpu.peak
    assert sheet_seconds(prompt) == pytest.approx(square / 2, rel=1e-3)
    decodes = Kernel("h100", "decode", (32, 4096, 32, 8), 1.0)  # keys and values, 8 heads
    keys = 32 * 4096 * 8 * 128 * 2 * 2 / gpu.bandwidth
    assert sheet_seconds(decodes) == pytest.approx(keys, rel=2e-3)
    reduce = Kernel("h100", "all-reduce", (4, 2**28), 1.0)
    assert sheet_seconds(reduce) == pytest.approx(1.5 * 2**28 / 450e9)


def test_errors_are_of_what_was_held_out_and_is_no_dwarf() -> None:
    def row(tokens: int, law: float, held_out: bool) -> Priced:
        return Priced(Kernel("h100", "prefill", (1, tokens, 8, 8), 1.0), 0.5, law, held_out)

    rows = [row(64, 1.1, True), row(128, 0.9, True), row(63, 9.0, True), row(64, 9.0, False)]
    assert median_error(rows) == pytest.approx(10)
    assert rows[1].error == pytest.approx(-10)


@pytest.mark.parametrize("gpu", ["a6000", "l20"])
def test_one_picture_alone(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["law_kernels.py", "--gpu", gpu, "--out", str(tmp_path)])
    law_kernels.main()
    assert [path.name for path in tmp_path.iterdir()] == [f"law_kernels_{gpu}.png"]
    assert f"law_kernels_{gpu}.png" in capsys.readouterr().out
