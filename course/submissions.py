"""What students hand in: a folder or a zip with a folder, a zip or Canvas's files of each student.

All of it may be hostile. It is read, and never unpacked: no more than LONGEST_FILE bytes of a file
whose name is an exercise's. Links are refused. What is not read is named.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from pathlib import Path

from command.checks import UserError
from course.exercises import EXERCISES, find
from course.handed import DAMAGED, LONGEST_FILE, TOO_LONG, Read, hidden, members

LONGEST_ZIP = 1 << 20  # bytes of one student's
# How lib/content_zipper.rb of github.com/instructure/canvas-lms builds a name: the student's, LATE,
# the user's id (anon_... where grading is anonymous), the file's id, and the student's own name.
CANVAS = re.compile(
    r"(?:(?!LATE_)(?P<who>.+?)_)?(?P<late>LATE_)?(?P<user>[1-9]\d*|anon_[^_]+)_(?P<id>[1-9]\d*)_"
    r"(?P<name>.+\.(?:py|zip))",
    re.ASCII | re.DOTALL | re.IGNORECASE,
)
# e06.py; e06-1.py (Canvas, handed in again); e06 (1).py (a browser, downloaded again)
KNOWN = re.compile(
    r"(.+?)(?:-(\d+)| ?\((\d+)\))?\.(?:py|zip)", re.ASCII | re.IGNORECASE | re.DOTALL
)
MOODLE = re.compile(r".+_\d+_assignsubmission_file_", re.ASCII | re.DOTALL)  # and a file, or none
LONGEST_NAME = 100  # letters of a file's name, or of why it was not read


@dataclass
class Submission:
    """name: of its folder or zip, or Canvas's name and number of the student.

    files: texts, by exercise. refused: why a file was not read, by exercise. notes: sentences on
    what else was there.
    """

    name: str
    files: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    late: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A file that was handed in. parts: of its name. order: of two, the later one counts."""

    parts: list[str]
    read: Read
    order: int = 0


def read_regular(path: Path, most: int = LONGEST_FILE) -> bytes:
    """A small file, and nothing that looks like one: a link, a pipe or a device is refused."""
    if path.is_symlink():
        raise OSError("a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("no file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(TOO_LONG.format(most >> 10))
    return data


def ours(name: str) -> tuple[str, int]:
    """The exercise that a file's name means, or ""; and which copy of a file it is."""
    if not (found := KNOWN.fullmatch(name)):
        return "", 0
    copy = int((found[2] or found[3] or "0")[:9])
    if name[-3:].lower() == ".py" and re.fullmatch(r"(?i)e\d{1,2}|hunt|final", found[1], re.ASCII):
        with suppress(UserError):  # there is no e99
            return find(found[1]).file, copy
    return "", copy


def files_of(place: Path) -> list[Found]:
    """All files of a folder or a zip. A link to a folder is as if it were a file."""
    if not place.is_dir():
        return [Found(parts, read) for parts, read in members(place)]
    found = []
    for path in sorted(place.rglob("*")):
        parts = list(path.relative_to(place).parts)
        if (path.is_symlink() or not path.is_dir()) and not any(map(hidden, parts)):
            found.append(Found(parts, partial(read_regular, path)))
    return found


def submission(name: str, files: Iterable[Found], late: bool = False) -> Submission:
    """What one student handed in.

    Of two files of one exercise, that of the later order counts, or of the later copy of a zip.
    Else it is what lies in `mine`, as in a whole clone, then what lies higher, then the later copy.
    """
    told, best = Submission(name, late=late), {}
    for file in files:
        for parts, read, *rank in inside(file, told):
            key, copy = ours(parts[-1])
            shown = "/".join(parts)[:LONGEST_NAME]
            rank += "mine" in parts[:-1], -len(parts), copy
            if not key:
                told.notes.append(f"Not read: {shown}. No exercise has this name.")
                continue
            old = best.get(key)
            if old is None or rank >= old[0]:
                best[key] = rank, shown, read
            if old:
                told.notes.append(f"{key} came more than once: {best[key][1]} counts.")
    for key, (_, _, read) in best.items():
        try:
            data = read()
            told.refused.pop(key, None)
            told.files[key] = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            told.refused[key] = "not UTF-8"
        except DAMAGED as bad:
            told.refused[key] = str(bad)[:LONGEST_NAME] or "damaged"
    return told


def inside(file: Found, told: Submission) -> Iterator[tuple]:
    """The file itself, or what is in a zip: parts, what reads it, order, and which copy of a zip.

    A zip that cannot be read may have held anything.
    """
    name = file.parts[-1]
    if name[-4:].lower() != ".zip":
        yield file.parts, file.read, file.order, 0
        return
    try:
        for parts, read in members(BytesIO(file.read(LONGEST_ZIP))):
            yield [name, *parts], read, file.order, ours(name)[1]
    except DAMAGED as bad:
        why = f"{name}: {bad}"[:LONGEST_NAME]
        told.notes.append(f"Not read: {why}.")
        for exercise in EXERCISES.values():
            told.refused.setdefault(exercise.file, why)


def of_a_class(zipped: Found) -> bool:
    """Whether a zip has names in it that Canvas or Moodle gives: then it is no student's."""
    with suppress(*DAMAGED):
        names = [parts[0] for parts, _ in members(BytesIO(zipped.read(LONGEST_ZIP)))]
        return any(CANVAS.fullmatch(name) or MOODLE.match(name) for name in names)
    return False


def submissions(place: Path) -> tuple[list[Submission], list[str]]:
    """All submissions of a folder or a zip; and what is none, in words.

    A folder or a zip in it is one; so are the files whose names Canvas or Moodle has put together
    of one student.
    """
    groups: dict[tuple[str, str], list[tuple[str, Found]]] = {}
    left, late = [], set()
    for each in place.iterdir() if place.is_dir() else ():  # also one with nothing in it
        if each.is_dir() and not each.is_symlink() and not each.name.startswith("."):
            groups["folder", each.name] = []
    for file in files_of(place):
        top = file.parts[0]
        canvas, moodle = CANVAS.fullmatch(top), MOODLE.match(top)
        if len(file.parts) > 1:
            key, own = ("folder", top), replace(file, parts=file.parts[1:])
        elif canvas:
            key = "canvas", "_".join(filter(None, (canvas["who"], canvas["user"])))
            own = Found([canvas["name"]], file.read, int(canvas["id"]))
            late |= {key[1], top} if canvas["late"] else set()
        elif moodle:
            key, own = ("moodle", moodle[0]), replace(file, parts=[top[moodle.end() :]])
        elif top[-4:].lower() == ".zip" and not of_a_class(file):
            key, own = ("zip", top), file
        else:
            is_zip = top[-4:].lower() == ".zip"
            left.append(f"{top}: a whole class's, to be graded by itself" if is_zip else top)
            continue
        groups.setdefault(key, []).append((top, own))
    handed = []
    for (kind, name), group in groups.items():
        if kind == "canvas" and not canvas_made([file for _, file in group]):
            handed += [submission(top, [file], top in late) for top, file in group]
        else:
            files = [file for _, file in group]
            handed.append(submission(name, files, kind == "canvas" and name in late))
    return sorted(handed, key=lambda each: each.name), left


def canvas_made(files: list[Found]) -> bool:
    """Whether these files are of one student: cs_2026_17_doe.zip may be a lecturer's own name.

    Canvas gives no number twice, and no student two files of one name. Two zips are no sign of it.
    """
    orders, names = {file.order for file in files}, {file.parts[-1] for file in files}
    zips = sum(name[-4:].lower() == ".zip" for name in names)
    return len(orders) == len(names) == len(files) and zips < 2
