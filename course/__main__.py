"""The course's commands.

    python -m course doctor         what is missing on this machine?
    python -m course start          your copies of exercises (course/mine/) and lessons (notebooks/)
    python -m course check 6        does your E6 keep its properties? If not: the smallest case
    python -m course check          all exercises, a line for each
    python -m course hint 6         the first of three hints; then hint 6 2, hint 6 3
    python -m course picture 6      your attempt beside what it should be: course/mine/e06.png
    python -m course submit         course/mine/submission.zip
    python -m course grade DIR      for instructors: all submissions of a folder or a zip
    python -m course page           the exercises for a browser, in a folder: build/exercises
    python -m course slides         for instructors: the lecture's pictures, large: build/slides/
    python -m course prove          that chunks are the full prefill, for all lengths
    python -m course plant 12       for instructors: a wrong solution, to see what its check says

Exercises: 1 to 13, hunt, final. `make check E=6` does the same.
"""

from course.doctor import TOO_OLD, doctor

if TOO_OLD:  # it could not read what follows
    raise SystemExit(not doctor())

import argparse
import json
import os
import secrets
import sys
from pathlib import Path

from command.checks import UserError
from command.cli import claim, run_main, write_file
from course import handed
from course.exercises import (
    BASE,
    EXERCISES,
    LESSONS,
    MINE,
    NOTEBOOKS,
    STUBS,
    UNWRITTEN,
    Exercise,
    find,
    hints,
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see 'python -m course'")


def start() -> None:
    MINE.mkdir(exist_ok=True)
    print(f"your files are in {MINE}")
    for exercise in EXERCISES.values():
        name = f"{exercise.file}.py"
        what = f"{exercise.name}, lesson {exercise.lesson}, {exercise.title}"
        give(MINE / name, (STUBS / name).read_bytes(), what)
    print(f"your lessons are in {NOTEBOOKS}. To run them: make install, then")
    print(".venv/bin/jupyter lab notebooks")
    for number, lesson in enumerate(LESSONS, 1):
        blank = without_outputs(lesson.with_suffix(".ipynb"))
        give(NOTEBOOKS / f"my_{lesson.stem}.ipynb", blank, f"lesson {number}, without outputs")


def give(path: Path, content: str | bytes, what: str) -> None:
    """Write a student's file, if it is not there."""
    if path.exists():
        print(f"{path.name} is there: left as it is")
    else:
        write_file(path, content)
        print(f"{path.name}: {what}")


def without_outputs(path: Path) -> str:
    """A lesson's notebook as it is before its first run, with all outputs unfolded."""
    notebook = json.loads(path.read_text("utf-8"))
    del notebook["metadata"]["jupytext"]  # so that Jupyter writes no .py file when the reader saves
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
            cell["metadata"].get("jupyter", {}).pop("outputs_hidden", None)
    return json.dumps(notebook, indent=1)


def plant(text: str) -> None:
    """Put a planted mistake in the place of a student's file. What somebody has written stays."""
    from course.plants import named, plants

    mistake = named(text)
    exercise = find(mistake.exercise)
    path = MINE / f"{exercise.file}.py"
    ours = {each.source.encode() for each in plants() if each.exercise == exercise.key}
    ours.add((STUBS / path.name).read_bytes())
    if path.exists() and path.read_bytes() not in ours:
        raise UserError(f"{path} is not as we wrote it: move it away, then plant again")
    MINE.mkdir(exist_ok=True)
    write_file(path, mistake.source)
    print(f"wrote {path}: mistake {mistake.name}")  # and not what it is: a class may be looking on


def check(exercise: Exercise, seed: int) -> bool:
    from course.check.frame import examine, lines
    from course.local import asker, mine_of

    verdict = examine(exercise, asker(exercise, mine_of(exercise)), seed)
    told = "\n".join(lines(exercise, verdict))
    print(told.replace(UNWRITTEN, f"{UNWRITTEN}: {MINE / exercise.file}.py"))
    return verdict.failure is None


def check_all(seed: int) -> None:
    """A line for each exercise, and how many are passed."""
    from course.check.frame import examine
    from course.local import asker, mine_of

    passed = 0
    unwritten = 0
    for exercise in EXERCISES.values():
        try:
            failure = examine(exercise, asker(exercise, mine_of(exercise)), seed).failure
        except UserError as error:
            told = f"not tried: {error}"
        else:
            if failure is None:
                told = "passed"
                passed += 1
            elif failure.says == UNWRITTEN:
                told = "not written yet"
                unwritten += 1
            else:
                why = failure.says or exercise.check.PROPERTIES[failure.prop]
                told = f"not yet: {failure.prop}, {why}"
        print(f"{exercise.name:6} {told}", flush=True)
    print(f"{passed} of {len(EXERCISES)} passed, {unwritten} not written yet")
    if passed + unwritten < len(EXERCISES):
        print("make check E=6 shows the smallest case that fails")


def draw(exercise: Exercise, force: bool) -> None:
    from course.local import mine_of  # matplotlib is slow to start
    from course.paint import figure_of
    from course.picture import picture
    from experiments.lib.look import save_figure

    mine = mine_of(exercise)
    path = claim(MINE / f"{exercise.file}.png", force)
    save_figure(figure_of(f"{exercise.name}: {exercise.title}", picture(exercise, mine)), path)
    print(f"wrote {path}")


def submit() -> None:
    """One zip with the exercises, and no other file. An older one is replaced."""
    found = {name: (MINE / name).read_bytes() for name in handed.NAMES if (MINE / name).is_file()}
    if not found:
        raise UserError(f"{MINE} has no exercises: run 'python -m course start' once")
    path = MINE / "submission.zip"
    write_file(path, handed.pack(found))
    print(f"wrote {path}")
    stubs = [name for name in found if found[name] == (STUBS / name).read_bytes()]
    print(f"not written yet: {' '.join(stubs)}" if stubs else "all exercises are written")


def parsed() -> argparse.Namespace:
    parser = Parser(
        "python -m course",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names = "start doctor submit check hint picture plant grade page slides prove"
    subs = {name: commands.add_parser(name) for name in names.split()}
    for name in ("check", "hint", "picture"):
        optional = "?" if name == "check" else None
        subs[name].add_argument("exercise", nargs=optional, help="1 to 13, hunt or final")
    subs["hint"].add_argument("number", type=int, nargs="?", default=1, choices=(1, 2, 3))
    subs["check"].add_argument("--seed", type=int, default=BASE, help="draws other cases")
    subs["plant"].add_argument("mistake", help="its name in course/planted.toml: 12, p12, 13a")
    grading = subs["grade"].add_argument
    grading("place", type=Path, help="a folder or a zip, with a folder or a .zip of each student")
    grading("--seed", type=int, help="of the cases (default: drawn, and printed)")
    grading("--only", nargs="+", metavar="E", help="the exercises that were set, as 1 9")
    grading("--one", action="store_true", help="the folder is one submission")
    places = {"grade": "grades.csv", "page": "build/exercises", "slides": "build/slides"}
    for name, place in places.items():
        subs[name].add_argument("--out", type=Path, default=Path(place), help=f"({place})")
    for name in ("picture", "grade", "page", "slides"):
        subs[name].add_argument("--force", action="store_true", help="replace a file of your own")
    subs["page"].add_argument("--pyodide", type=Path, help="node_modules/pyodide: it is copied")
    return parser.parse_args(sys.argv[1:] or ["--help"])


def main() -> None:
    options = parsed()
    if options.command == "start":
        start()
    elif options.command == "doctor":
        sys.exit(not doctor())
    elif options.command == "submit":
        submit()
    elif options.command == "check":
        if options.exercise is None:
            check_all(options.seed)
        else:
            sys.exit(not check(find(options.exercise), options.seed))
    elif options.command == "hint":
        exercise = find(options.exercise)
        number = options.number
        print(f"hint {number} of 3 for {exercise.name}\n\n{hints(exercise)[number - 1]}")
    elif options.command == "picture":
        draw(find(options.exercise), options.force)
    elif options.command == "plant":
        plant(options.mistake)
    elif options.command == "grade":
        if os.name != "posix":
            raise UserError("grade needs Linux or macOS: on Windows, run it in WSL")
        from course.grade import grade

        only = [find(key).key for key in options.only or EXERCISES]
        seed = secrets.randbits(40) if options.seed is None else options.seed
        grade(options.place, options.out, seed, options.force, options.one, only)
    elif options.command == "page":
        from course.page import EDITOR, write

        names = write(options.out, options.pyodide, force=options.force)
        print(f"{len(names)} files in {options.out}")
        if EDITOR not in names:
            print("without npm's packages (make browser), the editor is a plain text field")
        at = "http://localhost:8000"
        print(f"to look: python -m http.server --directory {options.out}, then {at}")
    elif options.command == "prove":
        try:
            from course.prove import prove
        except ModuleNotFoundError as error:
            package = "z3-solver" if error.name == "z3" else error.name
            raise UserError(f"prove needs {error.name}: pip install {package}") from None
        prove()
    else:
        try:
            from course.slides import slides  # all figures are slow to load
        except ModuleNotFoundError as error:
            raise UserError(f"slides need {error.name}: pip install -e '.[room]'") from None
        slides(options.out, options.force)


if __name__ == "__main__":
    run_main(main)
