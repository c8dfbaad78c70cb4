"""`make docs`: the numbers of the README and of docs/ are those of results/ and of the code."""

import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import lines
import pytest

from command.checks import UserError
from docs import fill
from experiments import fidelity
from experiments.lib import common

gallery = import_module("experiments.all")
ROOT = Path(__file__).parent.parent


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", fill.documents())
def test_filling_changes_nothing(document: str) -> None:
    assert fill.filled(document, text_of(document)) == text_of(document), "make docs"


GENERATE = "docs/generate.md"
LOSS = r"its loss is ([\d.]+) nats"  # a sentence over two lines
PEAK = "{paper[gain, llama-13b L=1024 C=256 peak]:g}"


def spoiled(document: str, number: str) -> str:
    """The text of a document with another number where this pattern has its group."""
    text = text_of(document)
    (found,) = re.finditer(number, text)
    start, end = found.span(1)
    other = re.sub(r"\d", lambda digit: str(9 - int(digit[0])), found[1])
    return text[:start] + other + text[end:]


@pytest.mark.parametrize(
    "document, number",
    [
        ("docs/serving.md", r"\| P99 TBT \| ([\d.]+) ms \|"),
        ("docs/pipelines.md", r"throughput by ([-+][\d.]+) to"),
        ("docs/flags.md", r"on which it listens; (\d) takes"),
    ],
)
def test_a_wrong_number_is_mended(document: str, number: str) -> None:
    assert fill.filled(document, spoiled(document, number)) == text_of(document)


def test_all_documents_are_written_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    book = [f"{name}.py" for name in lines.BOOK]
    for name in ("demo/metrics.json", "README.md", GENERATE, "docs/beams.md", *book):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    generate = tmp_path / GENERATE
    beams = tmp_path / "docs" / "beams.md"
    generate.write_text(wrong := spoiled(GENERATE, LOSS), encoding="utf-8")
    beams.write_text(text_of("docs/beams.md").replace("| throughput:", "| rate:"), "utf-8")
    monkeypatch.setattr(fill, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fill.py"])
    with pytest.raises(UserError, match=r"docs/beams\.md, segment_throughput: a sentence must"):
        fill.main()
    assert generate.read_text(encoding="utf-8") == wrong
    shutil.copy(ROOT / "docs" / "beams.md", beams)
    fill.main()
    assert capsys.readouterr().out == f"filled 3 documents; changed: {GENERATE}\n"
    assert generate.read_text(encoding="utf-8") == text_of(GENERATE)


def test_each_sentence_has_a_document() -> None:
    pages = {gallery.PAGE, fidelity.PAGE}
    assert fill.holes.read_texts().keys() - pages <= set(fill.documents())
    assert not common._wide, "what is printed afterwards has its usual width"
