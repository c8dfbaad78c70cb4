"""`make docs`: the numbers of the README and of docs/ are those of results/ and of the code."""

import shutil
import sys
from pathlib import Path

import pytest

from command.checks import UserError
from docs import fill
from experiments.lib import common

ROOT = Path(__file__).parent.parent


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", fill.documents())
def test_filling_changes_nothing(document: str) -> None:
    assert fill.filled(document, text_of(document)) == text_of(document), "make docs"


@pytest.mark.parametrize(
    "document, right, wrong",
    [
        ("README.md", "0.40 s under", "1,040 s under"),  # a sentence over two lines
        ("docs/serving.md", "| P99 TBT | 283 ms |", "| P99 TBT | 1 ms |"),
        ("docs/pipelines.md", "by -10.8 to +4.0 %", "by +1.8 to -40 %"),
        ("docs/pipelines.md", "L20 + 13B          1.24", "L20 + 13B  1.42"),
        ("docs/flags.md", "on which it listens; 0 takes", "on which it listens; 1 takes"),
        ("docs/what-a-gpu-charges.md", "256 tokens   17.14 ms\n257", "256 tokens\n257"),
        ("docs/gpu.md", "weights 6.4 GB;", "weights 3.2 GB;"),  # printed by the Python above it
    ],
)
def test_a_wrong_number_is_mended(document: str, right: str, wrong: str) -> None:
    text = text_of(document)
    assert text.count(right) == 1
    assert fill.filled(document, text.replace(right, wrong)) == text


@pytest.mark.parametrize(
    "text, templates, said",
    [
        ("It gains 1.3x.", ["gains {paper[gain, L=1024 C=256 peak]:g} times"], "stands 0 times:"),
        ("1.3x. 1.2x", ["{paper[gain, L=1024 C=256 peak]:g}x"], "stands 2 times: '{paper["),
        ("It gains 1.3x.", ["gains {paper[no such]:g}x"], "a hole cannot be filled: 'no such: 0"),
        ("<!-- filled: flags -->\n", [], "x.md: a line <!-- filled: ... --> has no line <!-- end"),
        ("<!-- filled: flag -->\n<!-- end -->\n", [], "x.md, filled: flag: unknown block 'flag'"),
        (
            "<!-- filled: report fig9, No -->\n<!-- end -->\n",
            [],
            "x.md, filled: report fig9, No: nothing",
        ),
    ],
)
def test_what_cannot_be_filled_is_one_line(
    text: str, templates: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill.holes, "read_texts", lambda path: {"x.md": {"fig9": templates}})
    with pytest.raises(UserError) as raised:
        fill.filled("x.md", text)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not templates or str(raised.value).startswith("docs/holes.toml, x.md, fig9: ")


def test_all_documents_are_written_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name in ("demo/metrics.json", "README.md", "docs/beams.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    readme, beams = tmp_path / "README.md", tmp_path / "docs" / "beams.md"
    readme.write_text(text_of("README.md").replace("0.40 s", "0.50 s"), encoding="utf-8")
    beams.write_text(text_of("docs/beams.md").replace("best. Batch", "best: batch"), "utf-8")
    monkeypatch.setattr(fill, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fill.py"])
    with pytest.raises(UserError, match=r"docs/beams\.md, segment_attention: a sentence must"):
        fill.main()
    assert "0.50 s" in readme.read_text(encoding="utf-8")
    shutil.copy(ROOT / "docs" / "beams.md", beams)
    fill.main()
    assert capsys.readouterr().out == "filled 2 documents; changed: README.md\n"
    assert readme.read_text(encoding="utf-8") == text_of("README.md")


def test_each_sentence_has_a_document() -> None:
    assert fill.holes.read_texts("docs/holes.toml").keys() <= set(fill.documents())
    assert not common._wide, "what is printed afterwards has its usual width"
