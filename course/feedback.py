"""What a student gets back: a page, or Gradescope's results.json.

Names and messages are a stranger's text. In a page they are escaped, and the page loads and runs
nothing. Gradescope gets them as plain text.
"""

import html
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from command.checks import UserError
from command.cli import MARK, as_cell, is_ours, write_file
from course.exercises import EXERCISES, HERE
from course.submissions import Submission

RUBRIC = HERE / "instructor" / "rubric.md"
# an answer may have megabytes
MOST_NOTES = 10
LONGEST_LINE = 1000
WHY = {
    "-": "not handed in",
    "stub": "not written yet: it is the file that you were given",
    "time": "not tried: the earlier exercises had used up the time of the whole submission",
    "refused": "not read",
    "passed": "passed",
    "answer": "not yet: no valid answer",
    "empty": "the file is empty",
    "syntax": "not yet: the file is no valid Python",
    "load": "not yet: the file cannot be loaded",
    "endless": "not yet: no answer in time",
}
PAGE = Template(
    f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{MARK}">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 52rem; margin: auto;
  padding: 0 1rem 3rem; overflow-wrap: break-word; }}
pre {{ white-space: pre-wrap; font-size: .85rem; }}
table {{ border-collapse: collapse; }}
td, th {{ text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid #8888; }}
td:nth-child(2), td:nth-child(3) {{ white-space: nowrap; }}
section {{ break-inside: avoid; }}
</style></head><body>
$body
</body></html>
"""
)


@dataclass
class Grade:
    """results: for each exercise "passed", a property's name, or "-"; scores: of those passed.

    told: the check's lines, of what was tried.
    """

    handed: Submission
    results: dict[str, str] = field(default_factory=dict)
    scores: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    told: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.handed.name

    def got(self, key: str, rubric: dict[str, float]) -> float:
        return rubric[key] if self.results[key] == "passed" else 0.0

    def points(self, rubric: dict[str, float]) -> float:
        return sum(self.got(key, rubric) for key in self.results)

    def page(self, number: int) -> str:
        """A file's name, without .html: the number keeps apart what a file system may not."""
        return f"{number:03}_{re.sub(r'[^A-Za-z0-9.-]+', '_', harmless(self.name)).strip('._')}"

    def says(self, key: str) -> str:
        """The check's words on an exercise, or why there are none."""
        if key in self.told:
            told = "\n".join(line[:LONGEST_LINE] for line in self.told[key])
            return clean(told.replace(f"{HERE.parent}{os.sep}", ""))
        result = self.results[key]
        why = self.handed.refused.get(EXERCISES[key].file, "") if result == "refused" else ""
        return clean(WHY[result] + (f": {why}" if why else ""))


def clean(text: str) -> str:
    """Without letters that a terminal obeys, that turn a line round, or that are none."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def harmless(name: str) -> str:
    """A name as it is shown: without its middle if it is long. Two names may look the same."""
    text = as_cell(name)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-29:]}"


def rubric() -> dict[str, float]:
    """Points for passing each exercise's check, from the table in instructor/rubric.md."""
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", RUBRIC.read_text("utf-8"), re.MULTILINE))
    for each in EXERCISES.values():
        if not re.fullmatch(r"\d+(\.\d+)?", rows.get(each.name, "")):
            raise UserError(f"{RUBRIC}: no row '| {each.name} | POINTS |' with a number")
    return {key: float(rows[each.name]) for key, each in EXERCISES.items()}


def results_json(grade: Grade, points: dict[str, float], seed: int, first: str) -> dict:
    """What Gradescope reads: https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    return {
        "output": f"{first}\nseed {seed}" + "".join(f"\n{note}" for note in notes(grade)),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "tests": [
            {
                "name": f"{EXERCISES[key].name} {EXERCISES[key].title}",
                "score": grade.got(key, points),
                "max_score": points[key],
                "status": "passed" if grade.results[key] == "passed" else "failed",
                "output": grade.says(key),
                "tags": [grade.results[key]],
            }
            for key in points
        ],
    }


def notes(grade: Grade) -> list[str]:
    found = [*grade.handed.notes]
    found += [f"... and {len(found) - MOST_NOTES} more."] if len(found) > MOST_NOTES else []
    return [clean(note) for note in [*found[:MOST_NOTES], *found[MOST_NOTES:][-1:]]]


def write_feedback(folder: Path, grades: list[Grade], points: dict[str, float], seed: int) -> None:
    """A page for each student, NUMBER_NAME.html.

    folder: it exists. Pages of an earlier run go: their numbers may be others'.
    """
    for old in filter(is_ours, folder.glob("[0-9][0-9][0-9]*_*.html")):
        old.unlink()
    for number, grade in enumerate(grades, 1):
        write_file(folder / f"{grade.page(number)}.html", page(grade, points, seed))


def page(grade: Grade, points: dict[str, float], seed: int) -> str:
    name = html.escape(harmless(re.sub(r"\.zip$", "", grade.name, flags=re.IGNORECASE)))
    rows = ["<tr><th>exercise</th><th>points</th><th>result</th></tr>"]
    parts = []
    for key, most in points.items():
        each = EXERCISES[key]
        result = grade.results[key]
        came = html.escape(WHY.get(result, f"not yet: {result}"))
        rows.append(
            f"<tr><td>{each.name} {html.escape(each.title)}</td>"
            f"<td>{grade.got(key, points):g} of {most:g}</td><td>{came}</td></tr>"
        )
        if key in grade.told or result == "refused":
            told = html.escape(grade.says(key))
            parts.append(f"<section><h2>{each.name}</h2><pre>{told}</pre></section>")
    again = next((key for key in grade.told if grade.results[key] != "passed"), next(iter(points)))
    body = [
        f"<h1>{name}</h1>",
        f"<p><b>{grade.points(points):g} of {sum(points.values()):g} points</b> by the checks.</p>",
        *(f"<p>{html.escape(note)}</p>" for note in notes(grade)),
        "<table>",
        *rows,
        "</table>",
        *parts,
        f"<p>To try the same cases again (here for {EXERCISES[again].name}):</p>",
        f"<pre>python -m course check {again} --seed {seed}</pre>",
    ]
    return PAGE.substitute(title=name, body="\n".join(body))
