"""The header and the cells of a CSV or JSON file. No torch."""

import csv
import io
import json
from pathlib import Path

from command.checks import UserError, shown
from command.cli import read_text


def is_json(path: Path | str) -> bool:
    return isinstance(path, Path | str) and str(path).lower().endswith(".json")


def read_table(path: Path | str, most: int) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The header of a CSV file, and of each line below it where it stands, and its cells.

    A JSON file (NAME.json) is a list of objects: their keys are the header, and the values are
    cells, empty where an object lacks one. most: bytes of the file. Raises UserError.
    """
    text = read_text(path, most)
    if is_json(path):
        return objects(path, text)
    try:
        reader = csv.reader(io.StringIO(text, newline=""))
        header = [name.strip() for name in next(reader, [])]
        return header, [(f"line {reader.line_num}", row) for row in reader if row]
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV file in UTF-8 ({error})") from None


def objects(path: Path | str, text: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: {shown(rows)} is no list of objects, one for each request")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, row {number}: {shown(row)} is no object with names and values"
            )
    header = list(dict.fromkeys(key for row in rows for key in row))
    return header, [
        (f"row {number}", ["" if row.get(key) is None else str(row[key]) for key in header])
        for number, row in enumerate(rows, 1)
    ]
