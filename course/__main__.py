"""The course's commands.

    python -m course start          your copies of the exercises, in course/mine/
    python -m course predict 3      what do you expect of lesson 3? Asked, and written down
    python -m course check 6        does your E6 keep its properties? If not: the smallest case
    python -m course hint 6         the next of three hints
    python -m course picture 6      your attempt beside what it should be: course/mine/e06.png
    python -m course submit         course/mine/submission.zip
    python -m course grade DIR      for instructors: all submissions of a folder
    python -m course selftest       for maintainers: does the course check what it says?
    python -m course map            for maintainers: the line numbers of MAP.md

Exercises: 1 to 12, hunt, final. `make check E=6` does the same.
"""

import argparse
import json
import re
import secrets
import shutil
import sys
import zipfile
from pathlib import Path

from checks import UserError
from cli import claim, run_main
from course.exercises import EXERCISES, HINTS, MINE, STUBS, Exercise, find

BASE = 1  # seed of the cases of `check`: the same each time, so that a failure stays


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see 'python -m course --help'")


def needs_torch(exercise: Exercise) -> None:
    if exercise.torch:
        try:
            import torch  # noqa: F401  (only asked whether it is there)
        except ModuleNotFoundError:
            raise UserError(f"{exercise.name} needs torch: run 'make install' once") from None


def start() -> None:
    MINE.mkdir(exist_ok=True)
    print(f"your files are in {MINE}")
    for exercise in EXERCISES.values():
        path = MINE / f"{exercise.file}.py"
        if path.exists():
            print(f"{path.name} is there: left as it is")
        else:
            shutil.copyfile(STUBS / path.name, path)
            print(f"{path.name}: {exercise.name}, lesson {exercise.lesson}, {exercise.title}")


def check(exercise: Exercise, seed: int) -> bool:
    from course.check.frame import examine, lines
    from course.local import asker, mine_of

    needs_torch(exercise)
    verdict = examine(exercise, asker(exercise, mine_of(exercise)), seed)
    print("\n".join(lines(exercise, verdict)))
    return verdict.failure is None


def hint(exercise: Exercise, level: int | None) -> None:
    """The next hint, or one that is asked for. What was shown is kept in mine/hints.json."""
    text = (HINTS / f"{exercise.file}.md").read_text("utf-8")
    parts = re.split(r"^## \d\n", text, flags=re.MULTILINE)
    shown, path = {}, MINE / "hints.json"
    try:
        shown = dict(json.loads(path.read_text("utf-8")))
        level = level or min(3, int(shown.get(exercise.key, 0)) + 1)
    except (OSError, ValueError, TypeError):
        level = level or 1
    print(f"hint {level} of 3 for {exercise.name}\n\n{parts[level].strip()}")
    if MINE.is_dir():
        path.write_text(json.dumps(shown | {exercise.key: level}) + "\n", "utf-8")


def draw(exercise: Exercise, force: bool) -> None:
    from course.local import mine_of  # matplotlib is slow to start
    from course.picture import picture
    from experiments.lib.look import save_figure

    needs_torch(exercise)
    mine = mine_of(exercise)
    path = claim(MINE / f"{exercise.file}.png", force)
    save_figure(picture(exercise, mine), path)
    print(f"wrote {path}")


def submit() -> None:
    """One zip with the exercises and predictions, no other file. An older one is replaced."""
    files = [MINE / f"{exercise.file}.py" for exercise in EXERCISES.values()]
    files = [path for path in (*files, MINE / "predictions.json") if path.is_file()]
    if not any(path.suffix == ".py" for path in files):
        raise UserError(f"{MINE} has no exercises: run 'python -m course start' once")
    path = MINE / "submission.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for each in files:
            packed.write(each, each.name)
    print(f"wrote {path}: {', '.join(each.name for each in files)}")


def main() -> None:
    parser = Parser("python -m course", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("start")
    for name in ("check", "hint", "picture"):
        sub = commands.add_parser(name)
        sub.add_argument("exercise", help="1 to 12, hunt or final")
        if name == "check":
            sub.add_argument("--seed", type=int, default=BASE, help="draws other cases")
        if name == "hint":
            sub.add_argument("--level", type=int, choices=(1, 2, 3), help="this hint")
        if name == "picture":
            sub.add_argument("--force", action="store_true", help="replace a file of your own")
    sub = commands.add_parser("predict")
    sub.add_argument("lesson", type=int, help="1 to 10")
    commands.add_parser("submit")
    sub = commands.add_parser("grade")
    sub.add_argument("folder", type=Path, help="a folder or .zip for each submission")
    sub.add_argument("--out", type=Path, default=Path("grades.csv"), help="the table (grades.csv)")
    sub.add_argument("--seed", type=int, help="of the cases (default: drawn, and printed)")
    sub.add_argument("--workers", type=int, default=2, help="submissions at a time (2)")
    sub.add_argument("--image", help="of a container: see course/instructor/README.md")
    sub.add_argument("--force", action="store_true", help="replace a file of your own")
    commands.add_parser("selftest")
    commands.add_parser("map")
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
        from course.predictions import predict

        print(f"{predict(options.lesson)} predictions of lesson {options.lesson} are written down")
    elif options.command == "submit":
        submit()
    elif options.command == "grade":
        from course.grade import grade

        seed = secrets.randbits(40) if options.seed is None else options.seed
        grade(options.folder, options.out, seed, options.workers, options.image, options.force)
    elif options.command == "map":
        from course.selftest import MAP, mended_map

        text, lost = mended_map()
        MAP.write_text(text, "utf-8")
        print("\n".join(lost) or f"wrote {MAP}")
        sys.exit(bool(lost))
    else:
        from course.selftest import selftest

        wrong = selftest()
        print("\n".join(wrong) or "the course checks what it says")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    run_main(main)
