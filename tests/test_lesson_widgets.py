"""Sliders and boxes of the lessons: only for a reader. An earlier answer stays."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from course import predictions

ipywidgets = pytest.importorskip("ipywidgets")
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
spec = importlib.util.spec_from_file_location("lesson", FOLDER / "lesson.py")
lesson = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lesson)
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ipywidgets.Widget]:
    """What a live notebook displays. The answers go to a folder of the test."""
    found: list[ipywidgets.Widget] = []
    monkeypatch.setattr(predictions, "MINE", tmp_path)
    monkeypatch.setattr(lesson, "widgets", lambda: ipywidgets)
    monkeypatch.setattr(lesson, "display", found.append)
    return found


def what_if(size: int = 3, word: str = "b") -> None:
    CALLS.append((size, word))


CALLS: list[tuple[int, str]] = []


def test_without_a_reader_the_default_is_shown_and_nobody_is_asked(
    capsys: pytest.CaptureFixture,
) -> None:
    CALLS.clear()
    assert lesson.widgets() is None, "no kernel, nobody to ask"
    lesson.sliders(what_if, size=(1, 9), word=["a", "b"])
    lesson.predict("1.1")
    assert CALLS == [(3, "b")] and "in Jupyter" in capsys.readouterr().out


def test_a_slider_shows_it_again(shown: list) -> None:
    CALLS.clear()
    lesson.sliders(what_if, size=(1, 9, 2), word=["a", "b"])
    [box] = shown
    size, word, _ = box.children
    assert (size.value, word.value) == (3, "b") and CALLS == [(3, "b")]
    size.value = 7
    word.value = "a"
    assert CALLS == [(3, "b"), (7, "b"), (7, "a")]


def test_a_box_keeps_one_answer(shown: list, tmp_path: Path, capsys) -> None:
    lesson.predict("3.2")
    [box] = shown
    box.value = "  "
    assert not (tmp_path / "predictions.json").exists()
    box.value = "a triangle"
    assert box.disabled
    kept = json.loads((tmp_path / "predictions.json").read_text("utf-8"))
    assert kept["3.2"]["answer"] == "a triangle"
    assert kept["3.2"]["question"] == predictions.questions(3)[1]
    lesson.predict("3.2")
    assert len(shown) == 1 and "you said: a triangle" in capsys.readouterr().out
    predictions.record("3.2", "?", "a square")
    assert predictions.recorded()["3.2"]["answer"] == "a triangle"
    (tmp_path / "predictions.json").write_text("{")
    lesson.predict("3.2")
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_each_box_follows_its_question(path: Path) -> None:
    """`predict("3.2")` stands right after the second question of lesson 3."""
    text = path.read_text("utf-8")
    names = re.findall(r'^predict\("([\d.]+)"\)$', text, re.MULTILINE)
    assert len(names) >= 2
    for name in names:
        number, place = map(int, name.split("."))
        before = text[: text.index(f'predict("{name}")')]
        assert (number, place) == (int(path.stem[:2]), before.count(predictions.MARK))
        since = before.rpartition(predictions.MARK)[2]
        assert since.count("# %%") == 1, "no other cell between them"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_argument_has_a_slider(path: Path) -> None:
    text = path.read_text("utf-8")
    [definition] = re.findall(r"^def what_if\((.+)\):$", text, re.MULTILINE)
    arguments = re.findall(r"(\w+)=", definition)
    assert len(arguments) == definition.count("=") and len(arguments) >= 2
    [call] = re.findall(r"^sliders\(what_if, (.+)\)$", text, re.MULTILINE)
    known = set(re.findall(r"(\w+)=", call)) | set(re.findall(r'"(\w+)": \(', text))
    assert set(arguments) <= known
