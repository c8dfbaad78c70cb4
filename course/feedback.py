"""What a student gets back: a page, and Gradescope's results.json. For the lecturer: predictions.

Names, messages and predictions are a stranger's text. In a page they are escaped, and the page
loads and runs nothing. Gradescope gets them as plain text.
"""

import html
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from string import Template

from command.checks import UserError
from command.cli import MARK, as_cell, is_ours, write_file
from course.exercises import EXERCISES, HERE
from course.predictions import LESSONS, Outcome, outcomes
from course.submissions import Submission

RUBRIC = HERE / "instructor" / "rubric.md"
BLANK = "\N{NO-BREAK SPACE}"
MOST_NOTES, LONGEST_LINE = 10, 1000  # an answer may have megabytes
LONGEST_SAID = 300  # letters that are shown of a prediction
WHY = {
    "-": "not handed in",
    "stub": "not written yet: it is the file that you were given",
    "time": "not tried: the earlier exercises had used up the time of the whole submission",
    "refused": "not read",
    "passed": "passed",
    "answer": "not yet: no valid answer",
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
pre {{ overflow-x: auto; white-space: pre; font-size: .85rem; padding: .7rem;
  border: 1px solid #8888; border-radius: .4rem; }}
@media print {{ pre {{ white-space: pre-wrap; }} }}
table {{ border-collapse: collapse; }}
td, th {{ text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0;
  border-bottom: 1px solid #8888; }}
td:last-child {{ overflow-wrap: anywhere; }}
td:nth-child(3) {{ overflow-wrap: normal; }}
section {{ break-inside: avoid; }}
</style></head><body>
$body
</body></html>
"""
)


@dataclass
class Grade:
    """results: for each exercise "passed", a property's name, or "-"; scores: of those passed.

    told: the check's lines, of what was tried. seconds: on the clock, for all.
    """

    handed: Submission
    results: dict[str, str] = field(default_factory=dict)
    scores: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    told: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

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


def marked(text: str) -> str:
    """The project's own Markdown in a line, as HTML: *this* and `that`."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def rubric() -> dict[str, float]:
    """Points for passing each exercise's check, from the table in instructor/rubric.md."""
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|", RUBRIC.read_text("utf-8"), re.MULTILINE)
    points = {each.key: dict(rows).get(each.name) for each in EXERCISES.values()}
    try:
        return {key: float(found) for key, found in points.items()}
    except (TypeError, ValueError):
        lost = next(key for key in points if not re.fullmatch(r"\d+(\.\d+)?", points[key] or ""))
        name = EXERCISES[lost].name
        raise UserError(f"{RUBRIC}: no row '| {name} | POINTS |' with a number") from None


def results_json(grade: Grade, points: dict[str, float], seed: int, first: str) -> dict:
    """What Gradescope reads: https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    return {
        "execution_time": round(grade.seconds, 1),
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
    found = (["Handed in late."] if grade.handed.late else []) + grade.handed.notes
    found += [f"... and {len(found) - MOST_NOTES} more."] if len(found) > MOST_NOTES else []
    return [clean(note) for note in [*found[:MOST_NOTES], *found[MOST_NOTES:][-1:]]]


def write_feedback(
    folder: Path, grades: list[Grade], points: dict[str, float], seed: int, first: str
) -> None:
    """For each student NUMBER_NAME.html and .json; for the lecturer predictions.html.

    folder: it exists. Pages of an earlier run go: their numbers may be others'.
    """
    for old in filter(is_ours, folder.glob("[0-9][0-9][0-9]*_*.html")):
        old.unlink()
        old.with_suffix(".json").unlink(missing_ok=True)
    came_out = {
        outcome.question: (f"{lesson}.{number}", outcome)
        for lesson in range(1, len(LESSONS) + 1)
        for number, outcome in enumerate(outcomes(lesson), 1)
    }
    for number, grade in enumerate(grades, 1):
        path = folder / grade.page(number)
        write_file(Path(f"{path}.html"), page(grade, points, seed, came_out))
        written = json.dumps(results_json(grade, points, seed, first), indent=1)
        write_file(Path(f"{path}.json"), written + "\n")
    write_file(folder / "predictions.html", predicted(grades, came_out))


def html_table(rows: Iterable[Iterable[object]]) -> str:
    """The first row is the header."""
    head, *others = [[html.escape(str(cell)) for cell in row] for row in rows]
    lines = ["<tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in others]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def page(
    grade: Grade, points: dict[str, float], seed: int, came_out: dict[str, tuple[str, Outcome]]
) -> str:
    """A student's page."""
    name = html.escape(harmless(re.sub(r"\.zip$", "", grade.name, flags=re.IGNORECASE)))
    total = sum(points.values())
    rows = [("exercise", "points", "result")]
    parts = []
    for key, most in points.items():
        each, result = EXERCISES[key], grade.results[key]
        got = f"{grade.got(key, points):g} of {most:g}".replace(" ", BLANK)
        came = WHY.get(result, f"not yet: {result}".replace(" ", BLANK))
        rows.append((f"{each.name} {each.title}", got, came))
        if key in grade.told or result == "refused":
            told = "".join(paragraphs(grade.says(key)))
            parts.append(f"<section><h2>{html.escape(each.name)}</h2>{told}</section>\n")
    again = next((key for key in grade.told if grade.results[key] != "passed"), next(iter(points)))
    body = f"<h1>{name}</h1>\n<p><b>{grade.points(points):g} of {total:g} points</b>"
    body += " by the checks.</p>\n"
    body += "".join(f"<p>{html.escape(note)}</p>\n" for note in notes(grade))
    body += html_table(rows) + "\n" + "\n".join(parts)
    body += f"<p>To try the same cases again (here for {EXERCISES[again].name}):</p>\n"
    body += f"<pre>python -m course check {again} --seed {seed}</pre>\n"
    said = grade.handed.predictions
    if said.keys() & came_out.keys():
        body += "<h1>Your predictions, and what came out</h1>\n"
        body += "<p>The pictures that a question or an answer speaks of are in its lesson: those of"
        body += " 3.2 are in lesson 3.</p>\n"
    for question, (number, outcome) in came_out.items():
        if question in said:
            answer = html.escape(clean(said[question])[:LONGEST_SAID])
            body += f"{shown(number, outcome)}<p><b>You said:</b> {answer}</p>\n"
            body += result_of(outcome)
    return PAGE.substitute(title=name, body=body)


def paragraphs(text: str) -> Iterator[str]:
    """A check's words: sentences as paragraphs, and what is set in, such as a table, as it is."""
    for start, lines in groupby(html.escape(text).split("\n"), lambda line: line[:1].isspace()):
        told, kind = "\n".join(lines).strip("\n"), "pre" if start else "p"
        yield from (f"<{kind}>{each}</{kind}>" for each in told.split("\n\n") if each)


def shown(number: str, outcome: Outcome) -> str:
    return f"<h2>{number}</h2><p>{marked(outcome.question)}</p>\n"


def result_of(outcome: Outcome) -> str:
    text = f"<pre>{html.escape(outcome.printed)}</pre>\n" if outcome.printed else ""
    return text + f"<p>{marked(outcome.explained or outcome.where)}</p>\n"


def predicted(grades: list[Grade], came_out: dict[str, tuple[str, Outcome]]) -> str:
    """What the class expected, beside what came out: for the lecturer, without names."""
    said: dict[str, Counter[str]] = defaultdict(Counter)
    for grade in grades:
        for question, answer in grade.handed.predictions.items():
            said[question][answer] += 1
    body = "<h1>What the class expected, and what came out</h1>\n"
    body += f"<p>{len(grades)} submissions. The results are those of the lessons' notebooks.</p>\n"
    for question, (number, outcome) in came_out.items():
        if question in said:
            rows = [("students", "expected")]
            common = said[question].most_common()
            rows += [(count, clean(answer)[:LONGEST_SAID]) for answer, count in common]
            body += shown(number, outcome) + html_table(rows) + result_of(outcome)
    others = sum(sum(counts.values()) for q, counts in said.items() if q not in came_out)
    if others:
        body += f"<p>{others} answers are to questions that no lesson asks today.</p>\n"
    if not said:
        body += "<p>Nobody has handed in predictions.</p>\n"
    return PAGE.substitute(title="Predictions", body=body)
