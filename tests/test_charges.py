"""docs/what-a-gpu-charges.md shows what experiments/charges.py prints today."""

import re
import sys
from pathlib import Path

import pytest

from configs import GPUS, MODELS
from costmodel import CostModel
from experiments import charges

PAGE = Path(__file__).parent.parent / "docs" / "what-a-gpu-charges.md"


def test_the_page_shows_what_is_printed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    cost = CostModel(MODELS["llama3.1-8b"], GPUS["a100-80gb"], software="vllm")
    parts = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    printed = charges.sections(cost, "vllm")
    assert list(parts) == list(printed)
    for heading, part in parts.items():
        (shown,) = re.findall(r"^```text\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
        assert shown.splitlines() == printed[heading], heading


def test_its_lines_are_short_and_its_links_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if len(line) > 100]
    for link in re.findall(r"\]\((\S+?)\)", text):
        assert (PAGE.parent / link).exists(), link
    for script in re.findall(r"experiments/(\w+\.py)", text):
        assert (PAGE.parent.parent / "experiments" / script).exists(), script


@pytest.mark.parametrize("gpu, model", [("h200", "yi-34b"), ("rtx4090", "llama-33b")])
def test_another_gpu_is_priced_and_its_guess_is_said(
    gpu: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["charges.py", "--gpu", gpu, "--model", model])
    charges.main()
    said = capsys.readouterr().out
    assert f"{model} on {gpu}" in said and "A guess: constants of the" in said


@pytest.mark.parametrize("flag, near", [("--gpu", "h100"), ("--model", "yi-34b")])
def test_a_wrong_name_is_one_line(
    flag: str, near: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["charges.py", flag, near + "0"])
    with pytest.raises(SystemExit) as ended:
        charges.run_main(charges.main)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1 and near in said
