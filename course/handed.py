"""submission.zip: what a student hands in, from the command line or from the page."""

import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO

from command.checks import UserError
from course.exercises import EXERCISES

NAMES = (*(f"{exercise.file}.py" for exercise in EXERCISES.values()), "predictions.json")
LONGEST_FILE = 64 << 10  # bytes of a file


def pack(files: Mapping[str, bytes]) -> bytes:
    """A zip of the files of NAMES."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in NAMES:
            if name in files:
                packed.writestr(name, files[name])
    return data.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """The files of NAMES in a zip, wherever they lie in it. UserError if it is damaged."""
    found = {}
    try:
        with zipfile.ZipFile(BytesIO(data)) as packed:
            for member in packed.infolist():
                name = member.filename.rpartition("/")[2]
                if name not in NAMES or member.compress_type not in (0, zipfile.ZIP_DEFLATED):
                    continue
                with packed.open(member) as file:
                    found[name] = file.read(LONGEST_FILE + 1)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError) as error:
        raise UserError(f"this zip cannot be read: {error}") from None
    if long := [name for name, text in found.items() if len(text) > LONGEST_FILE]:
        raise UserError(f"{long[0]} is longer than {LONGEST_FILE} bytes")
    if not found:
        raise UserError(f"this zip has none of {NAMES[0]}, ..., {NAMES[-1]}")
    return found
