"""What students hand in: a folder or a zip, with a folder or a zip of each student.

All of it may be hostile. It is read, and never unpacked: no more than LONGEST_FILE bytes of a file
whose name is an exercise's. Links are refused. What is not read is named.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path

from command.checks import UserError
from course.exercises import EXERCISES, find
from course.handed import DAMAGED, LONGEST_FILE, TOO_LONG, Read, hidden, members

LONGEST_ZIP = 1 << 20  # bytes of one student's
# e06.py; e06 (1).py (a browser, downloaded again)
KNOWN = re.compile(r"(.+?)(?: ?\((\d+)\))?\.(?:py|zip)", re.ASCII | re.IGNORECASE | re.DOTALL)
LONGEST_NAME = 100  # letters of a file's name, or of why it was not read
File = tuple[list[str], Read]  # that was handed in: the parts of its name, and what reads it


@dataclass
class Submission:
    """name: of its folder or zip. files: texts, by exercise.

    refused: why a file was not read, by exercise. notes: sentences on what else was there.
    """

    name: str
    files: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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
    copy = int((found[2] or "0")[:9])
    if name[-3:].lower() == ".py" and re.fullmatch(r"(?i)e\d{1,2}|hunt|final", found[1], re.ASCII):
        with suppress(UserError):  # there is no e99
            return find(found[1]).file, copy
    return "", copy


def files_of(place: Path) -> list[File]:
    """All files of a folder or a zip. A link to a folder is as if it were a file."""
    if not place.is_dir():
        return members(place)
    found = []
    for path in sorted(place.rglob("*")):
        parts = list(path.relative_to(place).parts)
        if (path.is_symlink() or not path.is_dir()) and not any(map(hidden, parts)):
            found.append((parts, partial(read_regular, path)))
    return found


def submission(name: str, files: Iterable[File]) -> Submission:
    """What one student handed in.

    Of two files of one exercise, that of the later copy of a zip counts. Else it is what lies in
    `mine`, as in a whole clone, then what lies higher, then the later copy.
    """
    told = Submission(name)
    best = {}
    for file in files:
        for parts, read, *rank in inside(*file, told):
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


def inside(parts: list[str], read: Read, told: Submission) -> Iterator[tuple[list[str], Read, int]]:
    """The file itself, or what is in a zip: parts, what reads it, and which copy of a zip.

    A zip that cannot be read may have held anything.
    """
    name = parts[-1]
    if name[-4:].lower() != ".zip":
        yield parts, read, 0
        return
    try:
        for below, reads in members(BytesIO(read(LONGEST_ZIP))):
            yield [name, *below], reads, ours(name)[1]
    except DAMAGED as bad:
        why = f"{name}: {bad}"[:LONGEST_NAME]
        told.notes.append(f"Not read: {why}.")
        for exercise in EXERCISES.values():
            told.refused.setdefault(exercise.file, why)


def submissions(place: Path) -> tuple[list[Submission], list[str]]:
    """All submissions of a folder or a zip, a folder or a zip each; and what is none, in words."""
    handed: dict[str, list[File]] = {}
    left = []
    for each in place.iterdir() if place.is_dir() else ():  # also one with nothing in it
        if each.is_dir() and not each.is_symlink() and not each.name.startswith("."):
            handed[each.name] = []
    for parts, read in files_of(place):
        top = parts[0]
        if len(parts) > 1:
            handed.setdefault(top, []).append((parts[1:], read))
        elif top[-4:].lower() == ".zip":
            handed.setdefault(top, []).append((parts, read))
        else:
            left.append(top)
    return [submission(name, handed[name]) for name in sorted(handed)], left
