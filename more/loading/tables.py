"""The header and the cells of a CSV, JSON or JSONL file. No torch."""

import csv
import io
import json
from pathlib import Path

from command.checks import UserError, shown
from command.cli import read_text


def is_json(path: Path | str) -> bool:
    """Whether a file has objects: NAME.json, or NAME.jsonl with one on each line."""
    return isinstance(path, Path | str) and str(path).lower().endswith((".json", ".jsonl"))


def read_table(path: Path | str, most: int) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The header of a CSV file, and of each line below it where it stands, and its cells.

    A JSON file is a list of objects: their keys are the header, and the values are cells, empty
    where an object lacks one. What an object in an object has is a column of both names, with a dot
    between them. most: bytes of the file. Raises UserError.
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
    if str(path).lower().endswith("l"):
        lines = [(f"line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(place, parsed(f"{path}, {place}", line)) for place, line in lines]
    else:
        listed = parsed(path, text)
        if not isinstance(listed, list) or not listed:
            raise UserError(f"{path}: {shown(listed)} is no list of objects, one for each request")
        rows = [(f"row {number}", row) for number, row in enumerate(listed, 1)]
    for place, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{path}, {place}: {shown(row)} is no object with names and values")
    rows = [(place, flat(row)) for place, row in rows]
    header = list(dict.fromkeys(key for _, row in rows for key in row))
    return header, [(place, [row.get(key, "") for key in header]) for place, row in rows]


def flat(row: dict) -> dict[str, str]:
    """Texts, without objects in the object: {"a": {"b": 1}} becomes {"a.b": "1"}."""
    every = {}
    for key, value in row.items():
        own = value if isinstance(value, dict) else {}
        every |= {f"{key}.{name}": each for name, each in own.items()} or {key: value}
    return {
        key: json.dumps(value) if isinstance(value, list | dict) else str(value)
        for key, value in every.items()
        if value is not None
    }


def parsed(where: Path | str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None
