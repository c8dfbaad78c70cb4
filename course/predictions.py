"""Predictions, written down before a lesson answers them: course/mine/predictions.json.

The questions are the lesson's own paragraphs, **Predict first.** So a lesson stays one file.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from command.checks import UserError, check_whole
from command.cli import write_file
from course.exercises import HERE, MINE

LESSONS = sorted((HERE.parent / "notebooks").glob("[0-9][0-9]_*.py"))  # 01_..., 02_..., no gap
MARK = "**Predict first.**"
HOW = "Read each step of the lesson up to **Predict first**, then answer."


def questions(lesson: int) -> list[str]:
    """All that a lesson asks, in order. A UserError if there is no such lesson."""
    check_whole("lesson", lesson, 1, len(LESSONS))
    paragraphs = re.split(r"\n(?:#\n|(?!#))", LESSONS[lesson - 1].read_text("utf-8"))
    texts = [
        " ".join(line.removeprefix("#").strip() for line in p.splitlines()) for p in paragraphs
    ]
    return [text.partition(MARK)[2].strip() for text in texts if MARK in text]


HEAD = re.compile(
    r"# Lesson (\d+): (.+?)\n.*?\*\*Goal\*\*: (.+?)\. \*\*Needs\*\*: (.+?)\."
    r" \*\*Difficulty\*\*: (\d) of 3\. \*\*Time\*\*: (.+?) minutes \((.+?)\);",
    re.DOTALL,
)


def syllabus() -> list[tuple[str, ...]]:
    """Rows on the lessons, out of their heads: a link to each, goal, needs, difficulty, minutes."""
    rows = [("lesson", "afterwards you can", "needs", "difficulty", "minutes")]
    for path in LESSONS:
        text = re.sub(r"\n# (?=\w|\*)", " ", path.read_text("utf-8")).replace("\n# #", "\n#")
        found = HEAD.search(text)
        if not found:
            raise UserError(f"{path}: its head lacks Goal, Needs, Difficulty or Time")
        number, title, goal, needs, difficulty, minutes, source = found.groups()
        link = f"{number}. [{title[0].upper()}{title[1:]}](notebooks/{path.stem}.ipynb)"
        rows.append((link, goal, needs, f"{difficulty} of 3", f"{minutes}, {source}"))
    return rows


@dataclass(frozen=True)
class Outcome:
    """What came out, as the lesson's notebook has it.

    printed: by the cells between a question and the next text. explained: that text, if it
    explains. where: a sentence that says where to look, with the number of pictures.
    """

    question: str
    printed: str
    explained: str
    where: str


def outcomes(lesson: int) -> list[Outcome]:
    """What came out of each question of a lesson, in the order of `questions`."""
    cells = json.loads(LESSONS[lesson - 1].with_suffix(".ipynb").read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    found = []
    for i, cell in enumerate(cells):
        if cell["cell_type"] != "markdown" or MARK not in texts[i]:
            continue
        end = next(j for j in range(i + 1, len(cells)) if cells[j]["cell_type"] == "markdown")
        said = [output for ran in cells[i + 1 : end] for output in ran.get("outputs", [])]
        printed = "".join("".join(output.get("text", "")) for output in said)
        printed = re.sub(r"^your prediction: .*\n", "", printed, flags=re.MULTILINE).strip("\n")
        pictures = sum("image/png" in output.get("data", {}) for output in said)
        where = f"Lesson {lesson} shows it below this question{', in a picture' * (pictures > 0)}."
        mark, _, words = texts[end].partition("\n\n")[0].partition("**Explain.**")
        explained = "" if mark else " ".join(words.split())
        question = texts[i].partition(MARK)[2].partition("\n\n")[0]
        found.append(Outcome(" ".join(question.split()), printed, explained, where))
    return found


def compare(lesson: int) -> list[str]:
    """Each answer of a student beside what came out, in lines. Without an answer, no result."""
    asked, kept = questions(lesson), recorded()
    told, missing = [], []
    for number, outcome in enumerate(outcomes(lesson), 1):
        name = f"{lesson}.{number}"
        if name not in kept:
            missing.append(name)
            continue
        told += [f"{name}  {outcome.question}", f"  you said: {kept[name]['answer']}"]
        told += [f"  | {line}".rstrip() for line in outcome.printed.splitlines()]
        told += [f"  {outcome.explained or outcome.where}", ""]
    told += [f"{len(asked) - len(missing)} of {len(asked)} questions have an answer"]
    return told + ([f"not yet: {' '.join(missing)}"] if missing else [])


def recorded() -> dict[str, dict[str, str]]:
    """What was answered so far: "3.2" -> question and answer. A UserError if it cannot be read."""
    path = MINE / "predictions.json"
    try:
        kept = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        kept = None
    rows = list(kept.values()) if isinstance(kept, dict) else [kept]
    if not all(isinstance(row, dict) and isinstance(row.get("answer"), str) for row in rows):
        raise UserError(f"{path} is damaged: mend it, or move it away")
    return kept


def record(name: str, question: str, answer: str) -> None:
    """Write one answer down. An earlier answer to it stays."""
    MINE.mkdir(exist_ok=True)
    kept = recorded()
    kept.setdefault(name, {"question": question, "answer": answer})
    text = json.dumps(kept, indent=1, ensure_ascii=False)
    write_file(MINE / "predictions.json", text + "\n")


def predict(lesson: int, ask: Callable[[str], str] = input) -> int:
    """Ask what is not yet answered, and keep each answer at once. Returns how many are kept.

    Where nobody can answer (no terminal), it stops, and blocks nothing. An empty answer is skipped.
    """
    kept = recorded()
    asked = questions(lesson)
    print(f"{HOW}\nEnter skips a question. No answer is asked for twice.\n")
    for number, question in enumerate(asked, 1):
        name = f"{lesson}.{number}"
        if name in kept:
            print(f"{name}  {question}\n  you said: {kept[name]['answer']}\n")
            continue
        print(f"{name}  {question}")
        try:
            answer = ask("  your prediction: ").strip() if can_ask(ask) else None
        except EOFError:
            answer = None
        if answer is None:
            print("\nnobody answers: stopped")
            break
        if answer:
            record(name, question, answer)
        print()
    return sum(name.partition(".")[0] == str(lesson) for name in recorded())


def can_ask(ask: Callable[[str], str]) -> bool:
    return ask is not input or (sys.stdin is not None and sys.stdin.isatty())
