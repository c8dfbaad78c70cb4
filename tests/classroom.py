"""A made-up class, graded: what each student gets is known beforehand.

    python -m tests.classroom DIR [--students 100] [--exercises 1 6 9 12]

Students hand in a folder, the zip of `make submit` (deflated, or stored as a page in the browser
may do), Moodle's folder with a zip, or files as Canvas names them. Each exercise is right, a
planted mistake, an untouched stub or missing. Some submissions are hostile. It prints how many
results are not what they must be.
"""

import argparse
import json
import random
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from command.cli import run_main
from course.exercises import EXERCISES, STUBS
from course.grade import grade
from course.plants import plants, right
from course.predictions import outcomes
from course.submissions import LONGEST_FILE

ENDLESS = "while True:\n    pass\n"
PRINTS = "while True:\n    print('x' * (1 << 20))\n"
FORKS = "import os\nwhile True:\n    os.fork()\n"
SAYS = "raise ValueError('\\ud800\\u202e</pre><script>alert(1)</script>')\n"
HOSTILE = {"endless": ENDLESS, "prints gigabytes": PRINTS, "forks": FORKS, "says": SAYS}


def pack(path: Path, files: dict[str, str], how: int) -> None:
    with zipfile.ZipFile(path, "w", how) as packed:
        for name, text in files.items():
            packed.writestr(name, text)


def drawn(rng: random.Random, keys: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """A student's files, and what each exercise must get."""
    files, wanted = {}, {}
    for key, exercise in EXERCISES.items():
        what, name = rng.random() if key in keys else 1.0, f"{exercise.file}.py"
        if what < 0.6:
            files[name], wanted[key] = right(exercise.file), "passed"
        elif what < 0.85:
            plant = rng.choice([each for each in plants() if each.exercise == key])
            files[name], wanted[key] = plant.source, plant.caught_by
        elif what < 0.95:
            files[name], wanted[key] = (STUBS / name).read_text("utf-8"), "stub"
        else:
            wanted[key] = "-"
    asked = rng.choice([outcomes(1), outcomes(3)])
    said = {
        str(i): {"question": outcome.question, "answer": rng.choice(["a tenth", "as long", "<b>"])}
        for i, outcome in enumerate(asked)
    }
    return files | {"predictions.json": json.dumps(said)}, wanted


def hand_in(folder: Path, number: int, files: dict[str, str]) -> str:
    """In one of five ways. Returns the name that the table must have."""
    name, way = f"student{number}", number % 5
    if way == 0:
        pack(folder / f"{name}.zip", files, zipfile.ZIP_DEFLATED)
        return f"{name}.zip"
    if way == 1:
        (folder / name).mkdir()
        for file, text in files.items():
            (folder / name / file).write_text(text, "utf-8")
        return name
    if way == 2:
        name = f"Zoë Student_{number}_assignsubmission_file_"
        (folder / name).mkdir()
        pack(folder / name / "submission (1).zip", files, zipfile.ZIP_STORED)
        return name
    user, late = 10_000 + number, "LATE_" * (number % 2)  # all of one name
    if way == 3:
        pack(folder / f"doejane_{late}{user}_{number}1_submission-2.zip", files, zipfile.ZIP_STORED)
    else:
        for i, (file, text) in enumerate(files.items()):
            stem, _, kind = file.partition(".")
            old = folder / f"doejane_{late}{user}_{number}{100 + i}_{file}"
            old.write_text("raise SystemExit('the older one')\n")
            again = f"doejane_{late}{user}_{number}{200 + i}_{stem}-1.{kind}"
            (folder / again).write_text(text, "utf-8")
    return f"doejane_{user}"


def attack(folder: Path) -> dict[str, dict[str, str]]:
    """Submissions that must lose nobody anything: what E1 of each must get, by name."""
    found = {}
    for name, text in HOSTILE.items():
        (folder / name).mkdir()
        (folder / name / "e01.py").write_text(text)
        found[name] = "answer"
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("e01.py", b"#" * (100 << 20))
        packed.writestr("../../../../tmp/escaped/e02.py", "x = 1\n")
    link = zipfile.ZipInfo("e01.py")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(folder / "link in zip.zip", "w") as packed:
        packed.writestr(link, "/etc/passwd")
    (folder / "no zip.zip").write_bytes(b"PK\3\4" + bytes(99))
    (folder / "big.zip").write_bytes(bytes((1 << 20) + 1))
    (folder / "long").mkdir()
    (folder / "long" / "e01.py").write_text("#" * (LONGEST_FILE + 1))
    (folder / "peeks").mkdir()
    (folder / "peeks" / "e01.py").symlink_to(folder / "student1" / "e01.py")
    (folder / "peeks" / "below").symlink_to(folder / "student1")
    names = ("bomb.zip", "link in zip.zip", "no zip.zip", "big.zip", "long", "peeks")
    found |= dict.fromkeys(names, "refused")
    (folder / "e01.py").write_text(right("e01"))  # whose?
    return {name: {"1": result} for name, result in found.items()}


def make(
    folder: Path, students: int, seed: int, keys: Sequence[str] = tuple(EXERCISES)
) -> dict[str, dict[str, str]]:
    """Write a class. Returns what each exercise of each submission must get."""
    wanted, rng = {}, random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(students):
        files, results = drawn(rng, keys)
        wanted[hand_in(folder, number, files)] = results
    return wanted | attack(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a new one")
    parser.add_argument("--students", type=int, default=100)
    parser.add_argument("--exercises", nargs="+", choices=EXERCISES, default=list(EXERCISES))
    options = parser.parse_args()
    wanted = make(options.folder / "class", options.students, 7, options.exercises)
    start = time.perf_counter()
    out = options.folder / "grades.csv"
    grades = {each.name: each for each in grade(options.folder / "class", out, 5, 2, None, False)}
    took = time.perf_counter() - start
    wrong = [
        f"{name}: {key} is {grades[name].results[key]}, and must be {result}"
        for name, results in wanted.items()
        for key, result in results.items()
        if name not in grades or grades[name].results[key] != result
    ]
    count = sum(map(len, wanted.values()))
    print("\n".join(wrong) or "all as they must be")
    print(f"{len(grades)} submissions, {count} results, {len(wrong)} wrong; {took:.0f} s")


if __name__ == "__main__":
    run_main(main)
