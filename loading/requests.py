"""Requests that a user hands in, or one line that says what is wrong with them. No torch."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from batch import Request
from command.checks import UserError, shown
from command.cli import read_text


def listed(requests: Iterable[Request]) -> list[Request]:
    """The requests as a list, or a UserError if something else is among them."""
    try:
        each = iter(requests)
    except TypeError:  # a single request, for example
        each = iter([requests])
    found = []
    for request in each:  # an error of the user's own generator is shown as it is
        if not isinstance(request, Request):
            raise UserError(f"a list of requests is needed, and {shown(request)} is no Request")
        found.append(request)
    return found


def refuse_beams(requests: Iterable[Request], instead: str) -> None:
    """Raise a UserError if one is a beam search. instead: what a user should do, in words."""
    for request in requests:
        if request.decode_size:
            raise UserError(f"request {request.request_id} is a beam search: {instead}")


def check_requests(
    requests: Sequence[Request], most: int, whose: str, what: str = "request"
) -> None:
    """Raise a UserError if two requests share an id, or one is too long for its slot.

    most: tokens of a slot. The last output token needs no place, because it is not fed back.
    whose, what: words for the error: what sets the limit, and what a request is called.
    """
    ids: set[int] = set()
    for request in requests:
        name = f"{what} {request.request_id}"
        if request.slot_tokens > most:
            raise UserError(
                f"{name}: {len(request.prompt)} prompt tokens + max_tokens {request.max_tokens} - 1"
                f" exceed the {most} tokens that {whose} allows"
            )
        if request.request_id in ids:
            raise UserError(f"two requests have the id {request.request_id}: give each its own")
        ids.add(request.request_id)


def is_json(path: Path | str) -> bool:
    return str(path).lower().endswith(".json")


def read_table(path: Path | str, most: int) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The header of a CSV file, and of each line below it where it stands, and its cells.

    A JSON file (NAME.json) is a list of objects: the keys of the first are the header, and the
    values are cells. Other keys are left out. most: bytes of the file. Raises UserError.
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
    header = list(rows[0])
    return header, [
        (f"row {number}", ["" if row.get(key) is None else str(row[key]) for key in header])
        for number, row in enumerate(rows, 1)
    ]
