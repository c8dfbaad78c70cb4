"""experiments/charges.py. test_fill.py compares what it prints with its page."""

import sys

import pytest

from experiments import charges


def test_another_gpu_is_priced_and_its_guess_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["charges.py", "--gpu", "rtx4090", "--model", "llama-33b"])
    charges.main()
    said = capsys.readouterr().out
    assert "llama-33b on rtx4090" in said and "Note: constants of the" in said
