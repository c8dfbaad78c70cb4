"""A made-up class: what each student gets is known beforehand.

Students hand in a folder, the zip of `make submit` (deflated, or stored as a page in the browser
may do), Moodle's folder with a zip, or files as Canvas names them. Each exercise is right, a
planted mistake, an untouched stub or missing. Some submissions are hostile.
"""

import json
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path

from course.exercises import EXERCISES, STUBS
from course.plants import plants, right
from course.predictions import outcomes
from course.submissions import LONGEST_FILE

HOSTILE = {
    "endless": "while True:\n    pass\n",
    "prints gigabytes": "while True:\n    print('x' * (1 << 20))\n",
    "forks": "import os\nwhile True:\n    os.fork()\n",
    "says": "raise ValueError('\\ud800\\u202e</pre><script>alert(1)</script>')\n",
}


def pack(path: Path, files: dict[str | zipfile.ZipInfo, str], how: int) -> None:
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
    bomb = {"e01.py": "#" * (100 << 20), "../../../../tmp/escaped/e02.py": "x = 1\n"}
    pack(folder / "bomb.zip", bomb, zipfile.ZIP_DEFLATED)
    link = zipfile.ZipInfo("e01.py")
    link.external_attr = 0o120777 << 16
    pack(folder / "link in zip.zip", {link: "/etc/passwd"}, zipfile.ZIP_STORED)
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
