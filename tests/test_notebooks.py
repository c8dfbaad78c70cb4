"""The lessons: .py and .ipynb in step, outputs that are fit to be read, numbers of the text that
stand in the lesson, sliders for a reader. `make notebooks` executes them.
"""

import importlib.util
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from course.exercises import LESSONS
from docs import whatif
from experiments.lib.common import paper_numbers

ipywidgets, nbformat = map(pytest.importorskip, ("ipywidgets", "nbformat"))
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def loaded(name: str) -> ModuleType:
    """A file of notebooks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute, lesson = map(loaded, ("execute", "lesson"))
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def committed(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path.with_suffix(".ipynb"), as_version=4)


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_lesson
def test_a_notebook_is_in_step_with_its_source_and_fit_to_be_read(path: Path) -> None:
    notebook, cells = committed(path), execute.convert(path).cells
    assert [(each.cell_type, each.source, each.metadata) for each in cells] == [
        (each.cell_type, each.source, each.metadata) for each in notebook.cells
    ], "run `make notebooks-refresh`; after new words alone, `python notebooks/execute.py --text`"
    nbformat.validate(notebook)
    assert execute.complaints(notebook) == []
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "executed once, from top to bottom"
    )
    tags = [cell.metadata.get("tags", []) for cell in code]
    assert code[0].source.startswith("import enter") and tags[0] == ["hide-input"]
    assert code[0].metadata.jupyter == {"source_hidden": True}
    assert sum("image/png" in each.get("data", {}) for cell in code for each in cell.outputs) >= 3
    assert set(notebook.metadata) == {"jupytext", "kernelspec"}, (
        "no versions or paths of the machine that ran it"
    )


QUESTION = "**Predict first.**"


@each_lesson
def test_an_answer_is_hidden_until_its_reader_has_predicted(path: Path) -> None:
    """From a question to its **Explain**, each output: by the tag on the site, and in Jupyter."""
    cells = committed(path).cells
    questions = [place for place, cell in enumerate(cells) if QUESTION in cell.source]
    answers = []  # the first cell that shows something after each question
    for place in questions:
        after = cells[place + 1 :]
        shown = [*itertools.takewhile(lambda cell: cell.cell_type == "code", after)]
        assert after[len(shown)].source.startswith(("**Explain.**", "#")), (
            "what comes before the explanation is hidden, too: so no other text stands there"
        )
        shown = [cell for cell in shown if cell.outputs]
        assert all(cell.metadata.get("jupyter", {}).get("outputs_hidden") for cell in shown), cells[
            place
        ].source
        answers.append(shown[0].id)
    assert answers == [each.id for each in cells if "predict" in each.metadata.get("tags", [])]
    assert len(answers) >= 2


def said(cell: nbformat.NotebookNode) -> str:
    return "".join(each.get("text", "") for each in cell.outputs)


def timed(cell: nbformat.NotebookNode) -> bool:
    """Whether a clock decides what it says."""
    return "measured" in cell.source or "(emulated)" in cell.source


# How long something takes matters to no test: small models, and few repeats.
QUICK = {
    r'replace\(MODELS\["laptop"\],': 'replace(MODELS["laptop"], hidden=128, n_head=2, n_kv_head=2,',
    "--model laptop": "--model demo",
    r"\bfastest\(": "(lambda measure, **_: measure())(",
    r"working\(range\(\d+\)": "working(range(2)",
    r"= arriving\(rate\)": "= arriving(rate, 0.5)",
    r"\bhigh < 100\b": "high < 4",
}
# In the first of two runs, in which the second one must find nothing of its own.
FIRST = {
    r"\brates = \[0.5, .*\]": "rates = [0.5, 3.5]",
    r"> 1.05 \* low": "> 2 * low",
    r"working\(workloads,": "working([*workloads][:1],",
}


@pytest.mark.slow
@each_lesson
def test_each_cell_may_run_again(path: Path) -> None:
    """As readers do. Where no clock decides, the same comes out, and stands in the .ipynb file."""
    notebook = execute.convert(path)
    for place, cell in reversed([*enumerate(notebook.cells, 1)]):
        if cell.cell_type == "code":
            for usual, quick in QUICK.items():
                cell.source = re.sub(usual, quick, cell.source)
            again = nbformat.v4.new_code_cell(cell.source, id=f"{cell.id}-again")
            notebook.cells.insert(place, again)
            for usual, quick in FIRST.items():
                cell.source = re.sub(usual, quick, cell.source)
    execute.execute(notebook)
    assert execute.complaints(notebook) == []
    code = code_of(notebook)
    for once, again, old in zip(code[::2], code[1::2], code_of(committed(path)), strict=True):
        same = timed(once) or once.source != again.source or once.outputs == again.outputs
        assert same, again.source
        if not timed(again) and "(predicted)" in said(old):
            assert said(again) == said(old), "run `make notebooks-refresh`"


@pytest.mark.parametrize(
    "output",
    [
        {"output_type": "stream", "name": "stderr", "text": "a warning"},
        {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []},
        {"output_type": "stream", "name": "stdout", "text": f"wrote {FOLDER}/x.png"},
    ],
)
def test_complaints_see_errors_warnings_and_paths(output: dict) -> None:
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output(**output)])
    assert execute.complaints(nbformat.v4.new_notebook(cells=[cell]))


def test_text_keeps_outputs_of_the_same_code_only() -> None:
    """A comment may change."""
    cell, book = nbformat.v4.new_code_cell, nbformat.v4.new_notebook
    old = book(cells=[cell("a = 1", outputs=[nbformat.v4.new_output("stream", text="1")])])
    for code, same in (("a = 1  # one", True), ("a = 2", False)):
        new = book(cells=[cell(code)])
        assert (execute.copy_outputs(old, new) == []) == same
        assert not same or new.cells[0].outputs == old.cells[0].outputs
    new = book(cells=[cell("a = 1"), cell("2")])
    assert execute.copy_outputs(old, new), "a cell of code more"


# --------------------------------------------------------------------- the numbers of the text
#
# A number of the text is a decimal (1.42), a number with a unit (7 ms, 5 %, 3 times), or a whole
# number above ten. It must stand, rounded as the text rounds it,
#
#     in a printed output of the lesson, before or after the text;
#     or in the code, as a parameter: there the value must be the same, without rounding;
#     or in experiments/paper_numbers.csv, if its paragraph says "paper".
#
# All else is in EXCEPTIONS, with the reason. Not read: code and links, the numbers of lessons,
# steps, sections and figures, names such as LLaMA-13B, and the minutes that a lesson takes.

# Lesson -> what its text says -> why no output has it.
EXCEPTIONS: dict[int, dict[str, str]] = {
    1: {
        "26": "question 1 gives it: GB of weights",
        "768": "question 1 gives it: GB/s of the A6000",
    },
    2: {
        "5120": "H of LLaMA-13B, in configs/models.py",
        "119": "question 1: 100 + 19",
        "121": "question 1: a wrong choice",
        "19": "question 1: 20 output tokens take 19 decodes",
        "96": "question 3 gives it: twice 48 GB",
    },
    10: {"1550": "the name of a GPU"},
    12: {"12.5": "100 Gb/s, in GB"},
}
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNITS = r"%|[mu]?s\b|[KMGT]?B/s|[KMGT]B\b|[GT]?FLOPs?\b|tokens/m?s\b|times\b|x(?!\w| *[\dA-Z(])"
# One number, or several that share a unit: "200, 100 and 16.7 times".
STATED = re.compile(
    rf"(?<![\w.])({NUMBER}(?:(?:,|,? (?:and|or|to)) {NUMBER})*)(?: ?({UNITS})|(?!\w|\.\d))"
)
UNREAD = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)"  # code, and where links lead
    r"|(?:Sec|Fig|Table|Algorithm|Lesson|Step|Question|cell)s? \d[\w.]*"
    r"(?:(?:,|,? (?:and|or|to)) \d[\w.]*)*"
    r"|[A-Za-z][\w.]*-\d[\w.]*"  # names: LLaMA-13B
    r"|\*\*Time\*\*: [\d to]+ minutes",
    re.DOTALL | re.IGNORECASE,
)
COUNTS = 10  # whole numbers up to here, without a unit, may just count what the text lists


def number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def numbers(text: str) -> list[float]:
    """All numbers of an output or of code: 1,024 and 1_024 are one number."""
    found = re.findall(r"(?<![\w.])\d+(?:[,_]\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?", text)
    return [number(each) for each in found]


def stated(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """The numbers of the text, such as "8.5", each with its paragraph."""
    for cell in notebook.cells:
        for paragraph in re.split(r"\n\s*\n", cell.source if cell.cell_type == "markdown" else ""):
            text = UNREAD.sub(" ", " ".join(paragraph.split()))
            for values, unit in STATED.findall(text):
                for value in re.findall(NUMBER, values):
                    if "." in value or unit or number(value) > COUNTS:
                        yield value, text


def rounds(text: str, values: Iterable[float]) -> bool:
    """Whether one of the values, with as many decimals as the text has, is the text's number."""
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return any(abs(number(text) - value) <= half * (1 + 1e-9) for value in values)


def printed(notebook: nbformat.NotebookNode) -> list[float]:
    """The numbers of all outputs that are text."""
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs]
    return numbers("\n".join(text for text in texts if not text.startswith("<Figure size")))


@each_lesson
def test_numbers_of_the_text_stand_in_the_lesson(path: Path) -> None:
    notebook, exceptions = committed(path), EXCEPTIONS.get(int(path.stem[:2]), {})
    code = "\n".join(cell.source for cell in code_of(notebook))
    parameters = numbers(code)
    outputs, published, found = printed(notebook), paper_numbers().values(), [*stated(notebook)]
    assert [
        (text, paragraph)
        for text, paragraph in found
        if not rounds(text, outputs)
        and number(text) not in parameters
        and not ("paper" in paragraph.lower() and rounds(text, published))
        and text not in exceptions
    ] == [], "no output, parameter or published number"
    assert exceptions.keys() <= {text for text, _ in found}


# ---------------------------------------------------------------------------------- sliders


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[ipywidgets.Widget]:
    """What a live notebook displays."""
    found: list[ipywidgets.Widget] = []
    monkeypatch.setattr(lesson, "widgets", lambda: ipywidgets)
    monkeypatch.setattr(lesson, "display", found.append)
    return found


def test_a_slider_shows_it_again(shown: list) -> None:
    calls = []

    def what_if(size: int = 3, word: str = "b") -> None:
        calls.append((size, word))

    lesson.sliders(what_if, size=(1, 9, 2), word=["a", "b"])
    [box] = shown
    size, word, _ = box.children
    assert (size.value, word.value) == (3, "b") and calls == [(3, "b")]
    size.value = 7
    word.value = "a"
    assert calls == [(3, "b"), (7, "b"), (7, "a")]


def asked(**question: object) -> dict:
    """What the page gets."""
    return json.loads(whatif.in_browser(json.dumps(question)))


# Lesson 7's `what_if` draws arrivals and lengths with numpy, and no browser has it.
@pytest.mark.parametrize(
    "path", [path for path in LESSONS if path.stem[:2] != "07"], ids=lambda path: path.stem
)
def test_the_browser_prints_what_the_lesson_printed(path: Path) -> None:
    """Of the lesson, it runs `what_if` and what that needs."""
    cells = code_of(committed(path))
    excerpt = whatif.excerpt(cell.source for cell in cells)
    assert not re.search("numpy|matplotlib|torch", excerpt)
    controls = asked(lesson=excerpt)["controls"]
    assert all(each["min"] <= each["value"] <= each["max"] for each in controls if "min" in each)
    chosen = {each["name"]: each["value"] for each in controls}
    answer = asked(lesson=excerpt, chosen=chosen)
    [cell] = [cell for cell in cells if "sliders(what_if" in cell.source]
    assert answer["text"] == said(cell)
    drawn = any(each.output_type == "display_data" for each in cell.outputs)
    assert bool(answer["pictures"]) == drawn


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
