"""The course's commands.

    python -m course doctor         what is missing on this machine?
    python -m course start          your copies of the exercises, in course/mine/
    python -m course predict 3      what do you expect of lesson 3? Asked, and written down
                                    (afterwards, with --compare: beside what came out)
    python -m course check 6        does your E6 keep its properties? If not: the smallest case
    python -m course hint 6         the next of three hints
    python -m course picture 6      your attempt beside what it should be: course/mine/e06.png
    python -m course submit         course/mine/submission.zip
    python -m course grade DIR      for instructors: all submissions of a folder
    python -m course page           the exercises for a browser, in a folder: build/exercises
    python -m course slides         for instructors: the lecture's pictures, large: build/slides/
    python -m course plant 12       for instructors: a wrong solution, to see what its check says
    python -m course selftest       for maintainers: does the course check what it says?

Exercises: 1 to 13, hunt, final. `make check E=6` does the same.
To predict: read each step of the lesson up to **Predict first**, then answer.
"""

from course.doctor import TOO_OLD, doctor

if TOO_OLD:  # it could not read what follows
    raise SystemExit(not doctor())

import argparse
import json
import secrets
import sys
from pathlib import Path

from command.checks import UserError
from command.cli import claim, run_main, write_file
from course import handed
from course.exercises import BASE, EXERCISES, MINE, STUBS, Exercise, find, hints
from course.predictions import HOW, LESSONS, compare, predict

HINTED, CHECKED = "hints.json", "checks.json"  # in mine/: the last hint, and whether it passed
BUILD = Path("build")
# by command: a folder
WRITES = {"page": BUILD / "exercises", "slides": BUILD / "slides"}


class Parser(argparse.ArgumentParser):
    def parse_args(self) -> argparse.Namespace:
        for word in sys.argv[1:]:
            if word.startswith("--") and word.endswith("=--"):  # argparse 3.11 makes it a list
                self.error(f"argument {word[:-3]}: '--' is not a value")
        return super().parse_args()

    def error(self, message: str):
        raise UserError(f"{message}; see 'python -m course --help'")


def folder(text: str) -> Path:
    """A path. An empty text would mean the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no name")
    return Path(text)


def needs_torch(exercise: Exercise) -> None:
    if exercise.torch:
        try:
            import torch  # noqa: F401  (only asked whether it is there)
        except ModuleNotFoundError:
            raise UserError(
                f"{exercise.name} needs torch: make install, or pip install -r requirements.txt"
            ) from None


def start() -> None:
    MINE.mkdir(exist_ok=True)
    print(f"your files are in {MINE}")
    for exercise in EXERCISES.values():
        path = MINE / f"{exercise.file}.py"
        if path.exists():
            print(f"{path.name} is there: left as it is")
        else:
            write_file(path, (STUBS / path.name).read_bytes())
            print(f"{path.name}: {exercise.name}, lesson {exercise.lesson}, {exercise.title}")


def plant(text: str) -> None:
    """Put a planted mistake in the place of a student's file. What somebody has written stays."""
    from course.plants import named, plants

    mistake = named(text)
    exercise = find(mistake.exercise)
    needs_torch(exercise)
    path = MINE / f"{exercise.file}.py"
    ours = {each.source.encode() for each in plants() if each.exercise == exercise.key}
    ours.add((STUBS / path.name).read_bytes())
    there = path.is_symlink() or path.exists()
    if there and (path.is_symlink() or not path.is_file() or path.read_bytes() not in ours):
        raise UserError(f"{path} is not as we wrote it: move it away, then plant again")
    MINE.mkdir(exist_ok=True)
    write_file(path, mistake.source)
    print(f"wrote {path}: mistake {mistake.name}")  # and not what it is: a class may be looking on


def check(exercise: Exercise, seed: int) -> bool:
    from course.check.frame import examine, lines
    from course.local import asker, mine_of

    needs_torch(exercise)
    verdict = examine(exercise, asker(exercise, mine_of(exercise)), seed)
    print("\n".join(lines(exercise, verdict)))
    keep(CHECKED, exercise, verdict.failure is None)
    return verdict.failure is None


def kept(name: str) -> dict:
    """What `keep` wrote: by exercise. Nothing if the file is missing or damaged."""
    try:
        found = json.loads((MINE / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(name: str, exercise: Exercise, value: int) -> None:
    if MINE.is_dir():
        text = json.dumps(kept(name) | {exercise.key: value})
        write_file(MINE / name, text + "\n")


def hint(exercise: Exercise, level: int | None) -> None:
    """The next hint, or one that is asked for. What was shown is kept in mine/hints.json."""
    last = kept(HINTED).get(exercise.key)
    last = last if last in (1, 2, 3) else 0
    again = " (you have seen all three: this is the last)" if last == 3 and level is None else ""
    level = level or min(3, last + 1)
    print(f"hint {level} of 3 for {exercise.name}{again}\n\n{hints(exercise)[level - 1]}")
    keep(HINTED, exercise, level)


def draw(exercise: Exercise, force: bool) -> None:
    from course.local import mine_of  # matplotlib is slow to start
    from course.paint import figure_of
    from course.picture import picture
    from experiments.lib.look import save_figure

    needs_torch(exercise)
    mine = mine_of(exercise)
    path = claim(MINE / f"{exercise.file}.png", force)
    save_figure(figure_of(f"{exercise.name}: {exercise.title}", picture(exercise, mine)), path)
    print(f"wrote {path}")


def submit() -> None:
    """One zip with the exercises and predictions, no other file. An older one is replaced."""
    found = {name: MINE / name for name in handed.NAMES if (MINE / name).is_file()}
    if not any(name.endswith(".py") for name in found):
        raise UserError(f"{MINE} has no exercises: run 'python -m course start' once")
    path = MINE / "submission.zip"
    write_file(path, handed.pack({name: each.read_bytes() for name, each in found.items()}))
    print(f"wrote {path}")
    print("\n".join(state()))


def state() -> list[str]:
    """How far a student is: of the exercises that are there, and of the predictions."""
    groups: dict[str, list[str]] = {
        name: [] for name in ("passed when last checked", "not passed yet", "not written yet")
    }
    passed = kept(CHECKED)
    for exercise in EXERCISES.values():
        path = MINE / f"{exercise.file}.py"
        if not path.is_file() or path.read_bytes() == (STUBS / path.name).read_bytes():
            groups["not written yet"].append(exercise.name)
        elif passed.get(exercise.key) is True:
            groups["passed when last checked"].append(exercise.name)
        else:
            groups["not passed yet"].append(exercise.name)
    told = [f"{name}: {' '.join(names)}" for name, names in groups.items() if names]
    answered = kept("predictions.json")
    numbers = range(1, len(LESSONS) + 1)
    lessons = [str(n) for n in numbers if any(key.startswith(f"{n}.") for key in answered)]
    return [*told, f"predictions: lessons {', '.join(lessons) or 'none'}"]


def main() -> None:
    parser = Parser("python -m course", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("start")
    for name in ("check", "hint", "picture"):
        sub = commands.add_parser(name)
        sub.add_argument("exercise", help="1 to 13, hunt or final")
        if name == "check":
            sub.add_argument("--seed", type=int, default=BASE, help="draws other cases")
        if name == "hint":
            sub.add_argument("--level", type=int, choices=(1, 2, 3), help="this hint")
        if name == "picture":
            sub.add_argument("--force", action="store_true", help="replace a file of your own")
    sub = commands.add_parser("predict", description=HOW)
    sub.add_argument("lesson", type=int, help=f"1 to {len(LESSONS)}")
    sub.add_argument(
        "--compare", action="store_true", help="afterwards: your answers beside what came out"
    )
    commands.add_parser("submit")
    sub = commands.add_parser("grade")
    sub.add_argument("folder", type=folder, help="a folder or .zip for each submission")
    sub.add_argument(
        "--out", type=folder, default=Path("grades.csv"), help="the table (grades.csv)"
    )
    sub.add_argument("--seed", type=int, help="of the cases (default: drawn, and printed)")
    sub.add_argument("--workers", type=int, default=2, help="submissions at a time (2)")
    sub.add_argument("--image", help="of a container: see course/instructor/README.md")
    sub.add_argument("--feedback", type=folder, help="a page of each student (grades_feedback/)")
    sub.add_argument("--only", nargs="+", metavar="E", help="the exercises that were set, as 1 9")
    sub.add_argument("--one", action="store_true", help="the folder is one submission")
    sub.add_argument("--force", action="store_true", help="replace a file of your own")
    for name, place in WRITES.items():
        sub = commands.add_parser(name)
        sub.add_argument("--out", type=folder, default=place, help=f"a folder ({place})")
        sub.add_argument("--force", action="store_true", help="replace files of your own")
        if name == "page":
            sub.add_argument("--pyodide", type=folder, help="node_modules/pyodide: it is copied")
            sub.add_argument("--pyodide-at", help="Pyodide's address, also relative to the page")
    sub = commands.add_parser("plant")
    sub.add_argument("mistake", help="its name in course/planted.toml: 12, p12, 13a")
    commands.add_parser("doctor")
    commands.add_parser("selftest")
    options = parser.parse_args()
    if options.command == "start":
        start()
    elif options.command == "check":
        sys.exit(not check(find(options.exercise), options.seed))
    elif options.command == "hint":
        hint(find(options.exercise), options.level)
    elif options.command == "picture":
        draw(find(options.exercise), options.force)
    elif options.command == "predict":
        if options.compare:
            print("\n".join(compare(options.lesson)))
            return
        print(f"{predict(options.lesson)} predictions of lesson {options.lesson} are written down")
    elif options.command == "submit":
        submit()
    elif options.command == "grade":
        from course.grade import grade

        only = [find(key).key for key in options.only or EXERCISES]
        seed = secrets.randbits(40) if options.seed is None else options.seed
        grade(options.folder, options.out, seed, options.workers, options.image, options.force,
              options.feedback, options.one, only)  # fmt: skip
    elif options.command == "page":
        from course.page import EDITOR, write

        names = write(options.out, options.pyodide or options.pyodide_at, force=options.force)
        print(f"{len(names)} files in {options.out}")
        if EDITOR not in names:
            print("without npm's packages (make browser), the editor is a plain text field")
        print(
            f"to look: python -m http.server --directory {options.out}, then http://localhost:8000"
        )
    elif options.command == "slides":
        try:
            from course.slides import slides  # all figures are slow to load
        except ModuleNotFoundError as error:
            raise UserError(f"slides need {error.name}: pip install -e '.[room]'") from None
        slides(options.out, options.force)
    elif options.command == "plant":
        plant(options.mistake)
    elif options.command == "doctor":
        sys.exit(not doctor())
    else:
        from course.selftest import selftest

        wrong = selftest()
        print("\n".join(wrong) or "the course checks what it says")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    run_main(main)
