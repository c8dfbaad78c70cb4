"""Sliders and boxes of the lessons: only for a reader. An earlier answer stays."""

import importlib.util
import json
import re
import sys
import time
from itertools import count
from pathlib import Path

import jupytext
import nbformat
import pytest
from torch import Tensor

from course import predictions
from docs import whatif
from engine import LLM
from executor import ModelExecutor
from experiments import policies
from scheduler import make_scheduler

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


def test_who_waits_for_a_cell_is_told(capsys: pytest.CaptureFixture) -> None:
    found, told = [], []
    for item in lesson.working("abc", "measuring"):
        found.append(item)
        told.append(capsys.readouterr().out)
    assert found == ["a", "b", "c"] and ["measuring: 2 of 3" in each for each in told] == [0, 1, 0]


def test_in_lesson_6_a_stall_of_the_machine_is_no_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three runs of a batch are disturbed. The clock is made up."""
    cells = jupytext.read(next(FOLDER.glob("06_*.py"))).cells
    (code,) = [cell.source for cell in cells if "class Undisturbed" in cell.source]
    clock, calls, forward = [0.0], count(), ModelExecutor.forward

    def disturbed(self: ModelExecutor, *rows: object) -> Tensor:
        clock[0] += 0.1 if next(calls) % 3 else 0.01
        return forward(self, *rows)

    monkeypatch.setitem(sys.modules, "lesson", lesson)
    names = {"LLM": LLM, "make_scheduler": make_scheduler}
    exec(code, names)  # noqa: S102
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(ModelExecutor, "forward", disturbed)
    trace = names["measured"]("sarathi_serve", policies.workload(48, 0.06))
    assert {round(each.seconds, 6) for each in trace.iterations} == {0.01}
    assert trace.lives[2].arrival == 0.06 and len(trace.finished) == 4


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


# Its `what_if` draws arrivals and lengths with numpy, and no browser has it.
IN_BROWSER = [path for path in SOURCES if not path.stem.startswith("07")]


@pytest.mark.parametrize("path", IN_BROWSER, ids=lambda path: path.stem)
def test_the_browser_prints_what_the_lesson_printed(path: Path) -> None:
    """Of the lesson, it runs `what_if` and what that needs."""
    cells = [
        cell
        for cell in nbformat.read(path.with_suffix(".ipynb"), as_version=4).cells
        if cell.cell_type == "code"
    ]
    excerpt = whatif.excerpt(cell.source for cell in cells)
    assert not re.search("numpy|matplotlib|torch", excerpt)
    controls = whatif.controls(excerpt)
    answer = whatif.run(excerpt, {each["name"]: each["value"] for each in controls})
    [cell] = [cell for cell in cells if "sliders(what_if" in cell.source]
    printed = [each.text for each in cell.outputs if each.output_type == "stream"]
    drawn = [each for each in cell.outputs if each.output_type == "display_data"]
    assert answer["text"] == "".join(printed)
    assert bool(answer["pictures"]) == bool(drawn)


def test_an_excerpt_has_the_last_definition_before_the_sliders() -> None:
    cells = [
        "import numpy as np\nfrom os import path, sep\na = 1\nprint(a)",
        "a, unused = 2, 3\nb = lambda x: x + a",
        "def what_if(n=1):\n    print(b(n), sep)\n\nsliders(what_if, n=[1, 2])",
        "a = 4",
    ]
    assert whatif.excerpt(cells) == (
        "from os import sep\na, unused = (2, 3)\nb = lambda x: x + a\n"
        "def what_if(n=1):\n    print(b(n), sep)\nsliders(what_if, n=[1, 2])"
    )


def test_a_choice_of_the_page_is_the_argument() -> None:
    code = """def what_if(size=3, word="y"):
    print(size, word)
sliders(what_if, size=(1, 9, 2), word=[("a", "x"), ("b", "y")])"""
    size, word = whatif.controls(code)
    assert size == {"name": "size", "min": 1, "max": 9, "step": 2, "value": 3}
    assert (word["labels"], word["value"]) == (("a", "b"), 1)
    question = json.dumps({"lesson": code, "chosen": {"size": 5, "word": 0}})
    assert json.loads(whatif.in_browser(question)) == {"text": "5 x\n", "pictures": []}
