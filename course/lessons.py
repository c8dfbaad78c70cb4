"""The lessons: their files, and a table of them out of their heads."""

import re

from command.checks import UserError
from course.exercises import HERE

LESSONS = sorted((HERE.parent / "notebooks").glob("[0-9][0-9]_*.py"))  # 01_..., 02_..., no gap
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
