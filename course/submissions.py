"""What students hand in: a folder or a zip for each, or loose files as Canvas names them.

All of it may be hostile. It is read, and never unpacked: no more than LONGEST_FILE bytes of a file
whose name is an exercise's. Links are refused. What is not read is named.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from command.checks import UserError
from course.exercises import EXERCISES, find
from course.handed import DAMAGED, LONGEST_FILE, TOO_LONG, hidden, members

LONGEST_ZIP = 1 << 20  # bytes
DEEPEST, MOST_FILES = 8, 2000  # of a folder: what is below, or beyond, is left alone
# How lib/content_zipper.rb of github.com/instructure/canvas-lms builds a name: the student's, LATE,
# the user's id (anon_... where grading is anonymous), the file's id, and the student's own name.
CANVAS = re.compile(
    r"(?:(?!LATE_)(?P<who>.+?)_)?(?P<late>LATE_)?(?P<user>[1-9]\d*|anon_[^_]+)_(?P<id>[1-9]\d*)_"
    r"(?P<name>.+)",
    re.ASCII | re.DOTALL,
)
# e06.py; e06-1.py (Canvas, handed in again); e06 (1).py (a browser, downloaded again)
KNOWN = re.compile(
    r"(.+?)(?:-(\d+)| ?\((\d+)\))?(\.py|\.json|\.zip)", re.ASCII | re.IGNORECASE | re.DOTALL
)
MOODLE = re.compile(r".+_\d+_assignsubmission_file_", re.ASCII | re.DOTALL)  # and a file, or none
PREDICTIONS = "predictions"
MOST_NOTES = 50
LONGEST_NAME = 100  # letters of a file's name, or of why it was not read


@dataclass
class Submission:
    """name: of its folder or zip, or Canvas's name and number of the student.

    files: texts, by exercise. refused: why a file was not read, by exercise. predictions: answers,
    by question. notes: sentences on what else was there.
    """

    name: str
    files: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    late: bool = False
    predictions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A file of a submission. key: see `ours`. rank: of two with one key, the higher one counts."""

    key: str
    name: str
    rank: tuple[int, ...]
    read: Callable[[], bytes]


def read_regular(path: Path) -> bytes:
    """A small file, and nothing that looks like one: a link, a pipe or a device is refused."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if path.is_symlink():
        raise OSError("a link")
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("no file")
        data = file.read(LONGEST_FILE + 1)
    if len(data) > LONGEST_FILE:
        raise OSError(TOO_LONG)
    return data


def ours(name: str) -> tuple[str, int]:
    """The exercise that a file's name means, or "predictions", or ""; and which copy it is."""
    if not (found := KNOWN.fullmatch(name)):
        return "", 0
    stem, kind = found[1].lower(), found[4].lower()
    copy = int((found[2] or found[3] or "0")[:9])
    if kind == ".json" and stem == PREDICTIONS:
        return PREDICTIONS, copy
    if kind == ".py" and re.fullmatch(r"e\d{1,2}|hunt|final", stem, re.ASCII):
        with suppress(UserError):  # there is no e99
            return find(stem).file, copy
    return "", copy


def in_folder(folder: Path) -> Iterator[Path]:
    """Its files; links to folders, and folders that cannot be read, as if they were files."""
    closed: list[OSError] = []
    for place, folders, names in os.walk(folder, onerror=closed.append):  # it follows no link
        names += [name for name in folders if Path(place, name).is_symlink()]
        deep = len(Path(place).relative_to(folder).parts) + 1
        folders[:] = sorted(name for name in folders if not hidden(name)) if deep < DEEPEST else []
        yield from (Path(place, name) for name in sorted(names) if not hidden(name))
    yield from (Path(error.filename) for error in closed)


def submission(name: str, paths: list[Path], late: bool = False) -> Submission:
    """What one student handed in: all files of some folders, zips, and files, the newest last."""
    told, best = Submission(name, late=late), {}
    for order, path in enumerate(paths):
        inside = in_folder(path) if path.is_dir() else [path]
        for number, each in enumerate(inside):
            if number == MOST_FILES:
                told.notes.append(f"More than {MOST_FILES} files: the others were left alone.")
                break
            for file in found_in(each, path, order, told):
                key, name, old = file.key, file.name[:LONGEST_NAME], best.get(file.key)
                if not key:
                    told.notes.append(f"Not read: {name}. No exercise has this name.")
                elif old is None or file.rank >= old.rank:
                    best[key] = file
                if key and old:
                    told.notes.append(f"{key} came more than once: {best[key].name} counts.")
    for key, file in best.items():
        try:
            data = file.read()
            told.refused.pop(key, None)
            told.files[key] = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            told.refused[key] = "not UTF-8"
        except DAMAGED as bad:
            told.refused[key] = str(bad)[:LONGEST_NAME] or "damaged"
    told.predictions = answers(told.files.pop(PREDICTIONS, ""))
    if PREDICTIONS in best and not told.predictions:
        why = told.refused.get(PREDICTIONS, "it has no answers")
        told.notes.append(f"Not read: {PREDICTIONS}.json: {why}.")
    if len(told.notes) > MOST_NOTES:
        told.notes[MOST_NOTES:] = [f"And {len(told.notes) - MOST_NOTES} other files."]
    return told


def found_in(path: Path, top: Path, order: int, told: Submission) -> Iterator[Found]:
    """A file itself, or what is in a zip. A zip that cannot be read may have held anything.

    Of two zips, the later copy counts; in one of them and in a folder, what lies in `mine`, as in
    a whole clone, then what lies higher, then the later copy.
    """
    canvas = CANVAS.fullmatch(path.name)
    name = canvas["name"] if canvas and not ours(path.name)[0] else path.name
    key, copy = ours(name)
    if path.suffix.lower() != ".zip" or path.is_symlink():
        *place, _ = path.relative_to(top).parts or ("",)
        rank = (order, 0, "mine" in place, -len(place), copy)
        yield Found(key, "/".join((*place, name)), rank, partial(read_regular, path))
        return
    try:
        if not path.is_file():  # a pipe would be waited for
            raise OSError("no file")
        if path.stat().st_size > LONGEST_ZIP:
            raise OSError(f"a zip above {LONGEST_ZIP >> 20} MB")
        for parts, read in members(path):
            own, again = ours(parts[-1])
            rank = (order, copy, "mine" in parts[:-1], 1 - len(parts), again)
            yield Found(own, "/".join((name, *parts)), rank, read)
    except DAMAGED as bad:
        why = f"{path.name}: {bad}"[:LONGEST_NAME]
        told.notes.append(f"Not read: {why}.")
        for exercise in EXERCISES.values():
            told.refused.setdefault(exercise.file, why)


def answers(text: str) -> dict[str, str]:
    """The predictions of a student, by question. What has another form is left out."""
    try:
        kept = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    kept = list(kept.values()) if isinstance(kept, dict) else []
    said = [(each.get("question"), each.get("answer")) for each in kept if isinstance(each, dict)]
    texts = [pair for pair in said if all(isinstance(text, str) for text in pair)]
    return dict(texts)


def canvas_made(paths: list[tuple[int, Path]]) -> bool:
    """Whether these files are of one student: cs_2026_17_doe.zip may be a lecturer's own name.

    Canvas gives no number twice, and no student two files of one name. Two zips are no sign of it.
    """
    names = [CANVAS.fullmatch(path.name)["name"] for _, path in paths]
    zips = sum(path.suffix.lower() == ".zip" for _, path in paths)
    return len(dict(paths)) == len(set(names)) == len(paths) and zips < 2


def listed(path: Path) -> list[list[str]]:
    """The parts of the names in a zip. Of a long one, whose list may be endless, the first name."""
    if path.stat().st_size <= LONGEST_ZIP:
        return [parts for parts, _ in members(path)]
    with open(path, "rb") as file:
        head = file.read(30 + (1 << 16))
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")] if head[:4] == b"PK\3\4" else b""
    return [re.split(r"[/\\]", name.decode("utf-8", "replace"))]


def of_several(path: Path) -> bool:
    """Whether a zip is a whole class's, as Canvas or Moodle gives it to a lecturer.

    Signs of it: names that they have made, of two students if Canvas has named the zip itself; else
    also one such name; an exercise twice, in two folders of one depth; zips, and no exercise. To
    take it apart would be to unpack zips in a zip, and nothing is unpacked.
    """
    places, zips, twice, students = {}, False, False, set()
    with suppress(*DAMAGED):
        for *place, name in listed(path):
            key, canvas, zipped = ours(name)[0], CANVAS.fullmatch(name), name[-4:].lower() == ".zip"
            zips |= zipped
            twice |= bool(key) and places.setdefault((key, len(place)), place) != place
            if moodle := MOODLE.match((place or [name])[0]):
                students.add(moodle[0])
            elif canvas and (zipped or ours(canvas["name"])[0]):
                students.add((canvas["who"], canvas["user"]))
    if CANVAS.fullmatch(path.name):
        return len(students) > 1
    return bool(students or twice or (zips and not places))


def submissions(folder: Path) -> tuple[list[Submission], list[str], list[str], list[list[str]]]:
    """All submissions of a folder; the names of what is none; of zips of a whole class; and of
    files that look like one student's, in groups: each file is a submission.

    A folder or a zip is one. Files with a name of Canvas are one for each student.
    """
    found: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    late, left, classes, apart = set(), [], [], []
    for path in sorted(folder.iterdir()):
        canvas = CANVAS.fullmatch(path.name)
        zipped = path.suffix.lower() == ".zip"
        if path.is_symlink() or hidden(path.name):
            left.append(path.name)
        elif zipped and path.is_file() and of_several(path):
            classes.append(path.name)
        elif path.is_dir():
            found["folder", path.name] = [(0, path)]
        elif canvas and path.suffix.lower() in (".py", ".zip", ".json"):
            key = "canvas", "_".join(filter(None, (canvas["who"], canvas["user"])))
            found.setdefault(key, []).append((int(canvas["id"]), path))
            late |= {key} if canvas["late"] else set()
        elif zipped:
            found["zip", path.name] = [(0, path)]
        else:
            left.append(path.name)
    for key in [
        key for key, paths in found.items() if key[0] == "canvas" and not canvas_made(paths)
    ]:
        paths = found.pop(key)
        apart.append([path.name for _, path in paths])
        found |= {("file", path.name): [(0, path)] for _, path in paths}
        late |= {("file", path.name) for _, path in paths if CANVAS.fullmatch(path.name)["late"]}
    handed = [
        submission(name, [path for _, path in sorted(paths)], late=(kind, name) in late)
        for (kind, name), paths in sorted(found.items(), key=lambda each: each[0][1])
    ]
    return handed, left, classes, apart
