"""A number in a lesson's text stands in the lesson: in an output, in the code, or in the paper.

The rule. A number of the text is a decimal (1.42), a number with a unit (7 ms, 5 %, 3 times), or a
whole number above ten. It must stand, rounded as the text rounds it,

    in a printed output of the lesson, before or after the text;
    or in the code, as a parameter: there the value must be the same, without rounding;
    or in experiments/paper_numbers.csv, if its paragraph says "paper".

All else is in EXCEPTIONS, with the reason. Not read: code and links, the numbers of lessons, steps,
sections and figures, names such as LLaMA-13B, and the minutes that a lesson takes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.lib.common import paper_numbers

FOLDER = Path(__file__).parent.parent / "notebooks"
LESSONS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))

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


@dataclass(frozen=True)
class Stated:
    """A number as the text of a lesson states it."""

    cell: int
    text: str  # "8.5"
    unit: str  # "" without one
    paragraph: str

    def rounds(self, value: float) -> bool:
        """Whether `value`, with as many decimals as the text has, is the text's number."""
        half = 0.5 * 10.0 ** -len(self.text.partition(".")[2])
        return abs(number(self.text) - value) <= half * (1 + 1e-9)


def number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def numbers(text: str) -> list[float]:
    """All numbers of an output or of code: 1,024 and 1_024 are one number."""
    found = re.findall(r"(?<![\w.])\d+(?:[,_]\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?", text)
    return [number(each) for each in found]


def stated(notebook: dict) -> Iterator[Stated]:
    """The numbers of the text, cell by cell."""
    for place, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "markdown":
            continue
        for paragraph in re.split(r"\n\s*\n", "".join(cell["source"])):
            text = UNREAD.sub(" ", " ".join(paragraph.split()))
            for values, unit in STATED.findall(text):
                for value in re.findall(NUMBER, values):
                    if "." in value or unit or number(value) > COUNTS:
                        yield Stated(place, value, unit, text)


def printed(notebook: dict) -> list[float]:
    """The numbers of all outputs that are text."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    parts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs]
    texts = ["".join(part) for part in parts]
    return numbers("\n".join(text for text in texts if not text.startswith("<Figure size")))


def parameters(notebook: dict) -> set[float]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    return set(numbers(re.sub(r'^predict\("[\d.]+"\)$', "", code, flags=re.MULTILINE)))


def without_source(notebook: dict) -> list[Stated]:
    """The numbers of the text that stand nowhere in the lesson."""
    outputs, code = printed(notebook), parameters(notebook)
    published = list(paper_numbers().values())
    return [
        each
        for each in stated(notebook)
        if not any(map(each.rounds, outputs))
        and number(each.text) not in code
        and not ("paper" in each.paragraph.lower() and any(map(each.rounds, published)))
    ]


def read(lesson: Path) -> dict:
    return json.loads(lesson.read_text(encoding="utf-8"))


def exceptions(lesson: Path) -> dict[str, str]:
    return EXCEPTIONS.get(int(lesson.stem[:2]), {})


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_numbers_of_the_text_stand_in_the_lesson(lesson: Path) -> None:
    wrong = [
        f"cell {each.cell}: {each.text} {each.unit} ... {each.paragraph[:80]}"
        for each in without_source(read(lesson))
        if each.text not in exceptions(lesson)
    ]
    assert not wrong, "no output, parameter or published number:\n" + "\n".join(wrong)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_every_exception_is_in_the_text(lesson: Path) -> None:
    assert exceptions(lesson).keys() <= {each.text for each in stated(read(lesson))}


# ------------------------------------------------------------------------------- the checker itself


def made(text: str, output: str = "", code: str = "") -> dict:
    """A notebook of one cell of text above one cell of code."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": output.splitlines(True)}]
    return {
        "cells": [
            {"cell_type": "markdown", "source": text.splitlines(True)},
            {"cell_type": "code", "source": code.splitlines(True), "outputs": outputs},
        ]
    }


def missed(text: str, output: str = "", code: str = "") -> list[str]:
    return [each.text for each in without_source(made(text, output, code))]


@pytest.mark.parametrize(
    "text, output, wrong",
    [
        ("The gain is 8.6 x.", "gain 8.49", "8.6"),
        ("The gain is 8.48 x.", "gain 8.49", "8.48"),
        ("It takes 9 times as long.", "ratio: 8.49x", "9"),
        ("It takes 7 ms.", "8 ms", "7"),
        ("It takes 16 to 23 ms.", "16 ms, 24 ms", "23"),
        ("The share is 5 %.", "share 5.6 %", "5"),
        ("All of the 119 tokens.", "120 tokens", "119"),
        ("| chunk | gain |\n|---|---|\n| 64 | 1.42 |", "64 1.41", "1.42"),
        ("<details>\n\nIt is 1.42.\n\n</details>", "1.24", "1.42"),
    ],
)
def test_a_planted_wrong_number_fails(text: str, output: str, wrong: str) -> None:
    assert missed(text, output) == [wrong]


def test_a_parameter_is_no_rounding() -> None:
    assert missed("At C = 256 ...", code="chunk_size = 256") == []
    assert missed("At 1.3 s ...", code="limit = 1.31") == ["1.3"]


def test_a_published_number_needs_the_word_paper() -> None:
    assert missed("A decode takes 12.49 ms (paper).") == []
    assert missed("A decode takes 12.49 ms.") == ["12.49"]
    assert missed("This is the paper's Table 2.\n\nA decode takes 12.49 ms.") == ["12.49"]
    assert missed("A decode takes 12.59 ms (paper).") == ["12.59"]


def test_a_wrong_decimal_is_seen_in_the_lessons() -> None:
    """By chance, a wrong number may stand in an output, too: seldom, if it is a decimal."""
    seen = []
    for lesson in LESSONS:
        notebook = read(lesson)
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for each in [each for each in stated(notebook) if "." in each.text]:
            decimals = len(each.text.partition(".")[2])
            for factor in (0.7, 0.9, 1.1, 1.3):
                text = f"{factor * number(each.text):.{decimals}f} {each.unit}"
                cell = {"cell_type": "markdown", "source": [text]}
                seen.append(bool(without_source({"cells": [cell, *code]})))
    assert len(seen) > 20 and sum(seen) / len(seen) > 0.6
