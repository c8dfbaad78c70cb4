"""submission.zip: what a student hands in, from the command line or from the page.

A zip may be hostile. No name in it is a place to write, and no more is unpacked than is read.
"""

import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path

from command.checks import UserError
from course.exercises import EXERCISES

NAMES = tuple(f"{exercise.file}.py" for exercise in EXERCISES.values())
LONGEST_FILE = 64 << 10  # bytes of a file
TOO_LONG = "above {} kB"
Read = Callable[..., bytes]  # of a file; most: bytes of the longest (LONGEST_FILE)
# What a file raises that cannot be read, or a zip that is damaged.
DAMAGED = (OSError, ValueError, RuntimeError, EOFError, ArithmeticError, zipfile.BadZipFile,
           zlib.error)  # fmt: skip


def pack(files: Mapping[str, bytes]) -> bytes:
    """A zip of the files of NAMES. UserError if one is longer than `grade` reads."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in NAMES:
            if len(files.get(name, b"")) > LONGEST_FILE:
                long = TOO_LONG.format(LONGEST_FILE >> 10)
                raise UserError(f"{name} is {long}: nobody could grade it; make it shorter")
            if name in files:
                packed.writestr(name, files[name])
    return data.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """The files of NAMES in a zip, wherever they lie in it. UserError if it is damaged."""
    found = {}
    name = "this zip"
    try:
        for parts, read in members(BytesIO(data)):
            if parts[-1] in NAMES:
                name = parts[-1]
                found[name] = read()
    except DAMAGED as error:
        raise UserError(f"{name} cannot be read: {error}") from None
    if not found:
        raise UserError(f"this zip has none of {NAMES[0]}, ..., {NAMES[-1]}")
    return found


def members(place: Path | BytesIO) -> list[tuple[list[str], Read]]:
    """The files of a zip: the parts of each name, and what reads it. Both raise one of DAMAGED."""
    packed = zipfile.ZipFile(place)
    found = []
    for info in packed.infolist():
        parts = re.split(r"[/\\]", info.filename)
        if parts[-1].strip(".") and not any(map(hidden, parts)):
            found.append(
                ([part for part in parts if part.strip(".")], partial(read_member, packed, info))
            )
    return found


def read_member(packed: zipfile.ZipFile, info: zipfile.ZipInfo, most: int = LONGEST_FILE) -> bytes:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise OSError("packed in an unusual way")  # some take gigabytes to unpack
    if stat.S_ISLNK(info.external_attr >> 16):
        raise OSError("a link")
    with packed.open(info) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(TOO_LONG.format(most >> 10))
    return data


def hidden(name: str) -> bool:
    """What systems add by themselves. ".." is no such name: zips may begin with it."""
    return (name.startswith(".") and name.strip(".") != "") or name == "__MACOSX"
