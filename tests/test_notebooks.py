"""The lessons: .py and .ipynb in step, outputs that are fit to be read, numbers of the text that
stand in the lesson, sliders for a reader. `make notebooks` executes them.
"""

import ast
import importlib.util
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import matplotlib.pyplot as plt
import pytest

from configs import MODELS
from course.exercises import LESSONS
from docs import site, whatif
from experiments.lib.common import paper_numbers
from scheduler import POLICIES

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
    notebook = committed(path)
    cells = execute.convert(path).cells
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
    r'MODELS\["llama-0.2b"\],': 'MODELS["llama-0.2b"], hidden=128, n_head=2, n_kv_head=2,',
    "--model llama-0.2b": "--model demo",
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
    cell = nbformat.v4.new_code_cell
    book = nbformat.v4.new_notebook
    old = book(cells=[cell("a = 1", outputs=[nbformat.v4.new_output("stream", text="1")])])
    for code, same in (("a = 1  # one", True), ("a = 2", False)):
        new = book(cells=[cell(code)])
        assert (execute.copy_outputs(old, new) == []) == same
        assert not same or new.cells[0].outputs == old.cells[0].outputs
    new = book(cells=[cell("a = 1"), cell("2")])
    assert execute.copy_outputs(old, new), "a cell of code more"


# ------------------------------------------------------------------------------- now break it
#
# The test reads out of the text what a reader changes and runs, and does it. So a text that says it
# in other words fails, and so does a sentence that no claim below quotes.

BREAK = "**Now break it.**"
EXPLAIN = "**Explain.**"
CHANGE = re.compile(
    r"[Ll]et `(?P<function>\w+)` return `(?P<value>[^`]+)`"
    r"|(?:`(?P<name>\w+)`|\w), (?:write `(?P<new>[^`]+)` in place of|leave out) `(?P<old>[^`]+)`"
)
RUN = re.compile(r"Run it(?: and ([\w ]+))?")
CELLS = {"": 1, "the next cell": 2, "the next two cells": 3}
ALL = "all cells below it"


@dataclass
class Ran:
    """Cells of a lesson that ran, and what they left, printed and raised."""

    code: list[str]
    names: dict[str, Any]
    said: str
    error: Exception | None


def every(cells: list[str], *operations: str) -> set[str]:
    """The global names that cells load or store."""
    nodes = [node for cell in cells for node in ast.parse(cell).body]
    return set().union(*(whatif.names_of(node, *operations) for node in nodes))


def run_cells(before: list[str], told: list[str]) -> Ran:
    """Run cells of a lesson, and of those before them what they need."""
    loads = "LOAD_NAME", "LOAD_GLOBAL"
    needed = every(told, *loads) - every(told, "STORE_NAME")
    kept = []
    for cell in reversed(before):
        stored = every([cell], "STORE_NAME")
        if stored & needed or cell is before[0]:
            needed = (needed - stored) | every([cell], *loads)
            kept.insert(0, cell)
    names = {"__name__": "lesson"}
    printed = io.StringIO()
    error = None
    with patch.dict(POLICIES), patch.dict(MODELS), redirect_stdout(printed):  # they add their own
        for cell in kept:
            exec(cell, names)  # noqa: S102  (our own lesson)
        printed.seek(0)
        printed.truncate()
        try:
            for cell in told:
                exec(cell, names)  # noqa: S102
        except Exception as raised:  # noqa: BLE001  (the text says which)
            error = raised
    if "server" in names:
        names["server"].terminate()
    plt.close("all")
    return Ran(told, names, printed.getvalue(), error)


def changed(cells: list[str], change: re.Match) -> tuple[int, str]:
    """The cell that a text tells to change: its place, and its new code."""
    old = re.escape(change["old"] or "")
    new = change["new"] or ""
    if change["function"]:
        old = "return .*"
        new = f"return {change['value']}"
    name = change["function"] or change["name"] or ""
    found = [
        place
        for place, cell in enumerate(cells)
        if re.search(old, cell) and re.search(rf"\bdef {name}\(|^{name}.* = ", cell, re.MULTILINE)
    ]
    assert len(found) == 1, f"cells that have {old} of {name}: {found}"
    [place] = found
    assert len(re.findall(old, cells[place])) == 1, f"{old} of {name} stands in one place"
    return place, re.sub(old, lambda _: new, cells[place])


def text_of(begin: str, source: str) -> str:
    """The paragraphs from this word to a heading, or to one that begins with another such word."""
    text = source[source.index(begin) + len(begin) :]
    return " ".join(re.split(r"\n\n(?=#|\*\*)", text)[0].split())


def experiments(path: Path) -> Iterator[tuple[str, Ran, Ran]]:
    """The text of each experiment, and what runs without and with what it changes.

    Some lessons have the broken code in a cell of their own. Then both runs are one, and the text
    goes on in the explanation.
    """
    cells = execute.convert(path).cells
    [here] = [place for place, cell in enumerate(cells) if BREAK in cell.source]
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    above = sum(cell.cell_type == "code" for cell in cells[:here])
    text = text_of(BREAK, cells[here].source)
    if not CHANGE.search(text):
        after = cells[here + 1 :]
        own = [*itertools.takewhile(lambda cell: cell.cell_type == "code", after)]
        assert after[len(own)].source.startswith(EXPLAIN), f"no change was read in: {text}"
        both = run_cells(code[:above], [cell.source for cell in own])
        yield f"{text} {text_of(EXPLAIN, after[len(own)].source)}", both, both
        return
    for part in re.split(r"(?<=\.) (?=Then )", text):
        [change], [told] = CHANGE.finditer(part), RUN.findall(part)
        place, new = changed(code, change)
        usual = code[place : above if told == ALL else place + CELLS[told]]
        without, broken = (
            run_cells(code[:place], [first, *usual[1:]]) for first in (usual[0], new)
        )
        yield part, without, broken


def linear(ran: Ran) -> list[dict[str, float]]:
    rows = ran.names["intensity"].values()
    return [{name: row[name] for name in row if name != "attn"} for row in rows]


def gap(ran: Ran) -> float:
    """The longest gap of W and X, in lesson 6."""
    lives = ran.names["mine"].lives
    return max(lives[0].tbt + lives[1].tbt)


def bubbles(ran: Ran, policy: str) -> float:
    return ran.names[policy].bubble_share


def better(ran: Ran) -> bool:
    """Whether vllm_v0 serves more, in lesson 7."""
    return ran.names["found"]["vllm_v0"] > ran.names["found"]["sarathi_serve"]


def listed(ran: Ran) -> list[int]:
    """Requests in the lists of each micro-batch, in lesson 9."""
    return [len(each) for each in ran.names["own"]]


def perplexities(ran: Ran) -> list[float]:
    return [float(each) for each in re.findall(r"perplexity +([\d.]+)", ran.said)]


def wrong_from(ran: Ran) -> int:
    """The first step of the response with a wrong logit, in lesson 10."""
    errors = ran.names["errors"][1]
    width = ran.names["WIDTH"]
    return next(number for number, each in enumerate(errors) if each > 1e-10) // width


def longest_batch(ran: Ran) -> dict:
    """Of sarathi_serve, in lesson 11. Its seconds are the cost model's: no clock decides."""
    return max(ran.names["runs"]["sarathi_serve"][1], key=lambda batch: batch["seconds"])


# Of each experiment: words of its text -> whether they are true of a run without the change, and of
# one with it.
BROKEN: dict[int, list[dict[str, Callable[[Ran, Ran], bool]]]] = {
    1: [
        {
            "alike in all four cases": lambda a, b: [linear(b)[0]] * 4 == linear(b) != linear(a),
            "Attention does not change": lambda a, b: all(
                row["attn"] == a.names["intensity"][case]["attn"]
                for case, row in b.names["intensity"].items()
            ),
        }
    ],
    2: [
        {
            "The fifth run fails": lambda a, b: "5 of 7" in b.said and "6 of 7" not in b.said,
            "there are four": lambda a, b: b.names["llm"].cache.slots == 4 and not a.error,
            "The first line": lambda a, b: b.code[0].startswith("llm.cache.reset()"),
        }
    ],
    3: [
        {
            "predictions are only worse": lambda a, b: perplexities(b)[0] < perplexities(b)[1],
        }
    ],
    4: [
        {
            "Riding now costs nearly as much as decoding alone": lambda a, b: (
                a.names["riding"] < 0.5 * b.names["riding"]
                and 0.8 < b.names["riding"] / (b.names["fitted"]["decode"] / 4) < 1
            ),
            "The 3 rows beyond 1024": lambda a, b: (
                b.names["table2"]["hybrid"].num_tokens == 1024 + 3
            ),
        }
    ],
    5: [
        {
            "most of the gain is lost": lambda a, b: (
                max(b.names["gains"][257]) - 1 < 0.5 * (max(a.names["gains"][256]) - 1)
            )
        }
    ],
    6: [
        {
            "less than half as long": lambda a, b: gap(b) < 0.5 * gap(a),
            "Y's first token takes a minute": lambda a, b: (
                round(b.names["mine"].lives[2].ttft / 60) == 1 and a.names["mine"].seconds < 2
            ),
        },
        {"the engine stops": lambda a, b: bool(b.error)},
    ],
    7: [
        {
            "looks better": lambda a, b: better(b) and not better(a),
            "thousands of short gaps": lambda a, b: len(b.names["traces"]["vllm_v0"].tbts) > 2000,
        }
    ],
    8: [
        {
            "Most of Orca's bubbles are back": lambda a, b: (
                bubbles(a, "sarathi") < 0.5 * bubbles(a, "orca") < bubbles(b, "sarathi")
            ),
        }
    ],
    9: [
        {
            "Batch 0 ends with 80 requests, all others with 114": lambda a, b: (
                listed(b) == [80, 114, 114, 114] and listed(a) == [114] * 4
            ),
            "The other 34 are in no list": lambda a, b: (
                b.names["total"] - sum(listed(b)) == 34 and b.names["withheld"] == []
            ),
        }
    ],
    10: [
        {
            "Beam 0's last parent was beam 2, but beam 2 read the key of step 0 at place 0": (
                lambda a, b: b.names["PARENTS"][1][0] == 2 and b.names["PARENTS"][0][2] == 0
            ),
            "from step 2 on": lambda a, b: wrong_from(b) == 2,
            "most columns hold one number": lambda a, b: (
                sum(len({*column}) == 1 for column in b.names["tables"]["whole history"].T.tolist())
                > b.names["tables"]["whole history"].shape[1] / 2
            ),
        }
    ],
    11: [
        {
            "more than twice as long": lambda a, b: (
                longest_batch(b)["seconds"] > 2 * longest_batch(a)["seconds"]
                and longest_batch(b)["rows"] > 4000
                and longest_batch(a)["rows"] <= 512
            )
        }
    ],
    12: [
        {
            "D finds no block": lambda a, b: a.names["memory"].hits == b.names["memory"].hits + 8,
            "13 tokens run": lambda a, b: "13 prompt tokens of D" in b.said,
            "A's first words are lost": lambda a, b: (
                ["You", "are", "a", "kind"] in a.names["held"].values()
                and ["You", "are", "a", "kind"] not in b.names["held"].values()
            ),
        }
    ],
}
LONG = {2, 3, 7, 10, 11}  # they run a model or a server, or search


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if number in LONG else ())
        for number, path in enumerate(LESSONS, 1)
    ],
)
def test_now_break_it_does_what_its_text_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setitem(sys.modules, "lesson", lesson)
    found = [*experiments(path)]
    for (text, without, broken), claims in zip(found, BROKEN[int(path.stem[:2])], strict=True):
        assert claims, text
        for words, true in claims.items():
            assert words in text and true(without, broken), words
        assert without.error is None or without is broken
        if broken.error:
            said = f": `{broken.error}`" if f"{broken.error}" else "."
            assert f"`{type(broken.error).__name__}`{said}" in text
        else:
            assert "Error`" not in text


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
    notebook = committed(path)
    exceptions = EXCEPTIONS.get(int(path.stem[:2]), {})
    code = "\n".join(cell.source for cell in code_of(notebook))
    parameters = numbers(code)
    outputs = printed(notebook)
    published = paper_numbers().values()
    found = [*stated(notebook)]
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


def test_the_browser_computes_all_lessons_but_one() -> None:
    """It has none of site.PACKAGES: nothing that their sliders import may need one."""
    assert {path.stem for path in LESSONS} - set(site.sliders()) == {"07_latency"}
