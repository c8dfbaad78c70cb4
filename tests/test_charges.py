"""experiments/charges.py. test_fill.py compares what it prints with its page."""

import sys

import pytest

from experiments import charges


@pytest.mark.parametrize("gpu, model", [("h200", "yi-34b"), ("rtx4090", "llama-33b")])
def test_another_gpu_is_priced_and_its_guess_is_said(
    gpu: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["charges.py", "--gpu", gpu, "--model", model])
    charges.main()
    said = capsys.readouterr().out
    assert f"{model} on {gpu}" in said and "A guess: constants of the" in said
