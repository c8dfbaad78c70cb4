"""The header and the cells of a CSV, JSON or JSONL file. No torch."""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from json.decoder import WHITESPACE
from pathlib import Path

from command.checks import UserError, shown
from command.cli import BLOCK, progress, read_blocks, read_text

LEVELS = 4  # of objects in objects
LONGEST = 10**8  # letters of one object
Row = dict[str, object]


def is_json(path: Path | str) -> bool:
    """Whether a file has objects: NAME.json, or NAME.jsonl with one on each line."""
    return isinstance(path, Path | str) and str(path).lower().endswith((".json", ".jsonl"))


def is_jsonl(path: Path | str) -> bool:
    return str(path).lower().endswith(".jsonl")


def read_table(
    path: Path | str, most_kept: int, change: Callable[[Row], Row] = lambda row: row
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The header of a CSV file, and of each line below it where it stands, and its cells.

    A JSON file is a list of objects: their keys are the header, and the values are cells, empty
    where an object lacks one. What an object in an object has is a column of both names, with a dot
    between them. Objects are read one by one, so that only cells stay in memory. most_kept: letters
    of the cells of objects. change: makes of such a flat object what is kept of it. Raises
    UserError.
    """
    if is_json(path):
        return objects(path, most_kept, change)
    text = read_text(path)
    try:
        reader = csv.reader(io.StringIO(text, newline=""))
        header = [name.strip() for name in next(reader, [])]
        return header, [(f"line {reader.line_num}", row) for row in reader if row]
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV file in UTF-8 ({error})") from None


def objects(
    path: Path | str, most_kept: int, change: Callable[[Row], Row]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    rows = []
    kept = 0
    count = os.path.getsize(path) // BLOCK + 1 if os.path.exists(path) else None
    blocks = progress(read_blocks(path), f"reading {path}, MB", count)
    for place, row in (lines_of if is_jsonl(path) else items_of)(path, blocks):
        if not isinstance(row, dict):
            raise UserError(f"{path}, {place}: {shown(row)} is no object with names and values")
        cells = {
            key: json.dumps(value) if isinstance(value, list | dict) else str(value)
            for key, value in change(flat(row)).items()
        }
        kept += sum(map(len, cells.values()))
        if kept > most_kept:
            shorter = "head -n 1000" if is_jsonl(path) else "jq '.[:1000]'"
            raise UserError(
                f"{path}: its cells have more than {most_kept / 1e6:g} MB; cut it, such as with"
                f" {shorter} {path} > short.{'jsonl' if is_jsonl(path) else 'json'}"
            )
        rows.append((place, cells))
    if not rows and not is_jsonl(path):
        raise UserError(f"{path}: [] is no list of objects, one for each request")
    header = list(dict.fromkeys(key for _, row in rows for key in row))
    return header, [(place, [row.get(key, "") for key in header]) for place, row in rows]


def lines_of(path: Path | str, blocks: Iterable[str]) -> Iterator[tuple[str, object]]:
    """What each line of a JSONL file has, and where it stands."""
    number = 0
    rest = ""
    for block in chain(blocks, ["\n"]):
        *lines, rest = (rest + block).split("\n")
        if len(rest) > LONGEST:
            raise UserError(f"{path}: one line has more than {LONGEST / 1e6:g} MB: is it JSONL?")
        for line in lines:
            number += 1
            if line.strip():
                yield f"line {number}", parsed(f"{path}, line {number}", line)


def items_of(path: Path | str, blocks: Iterable[str]) -> Iterator[tuple[str, object]]:
    """What a JSON list has, one by one, and where it stands.

    Where an item does not end in what is read so far, as much again is read.
    """
    blocks = iter(blocks)
    decoder = json.JSONDecoder()
    number = 1
    text = next(filter(None, (block.lstrip() for block in blocks)), "")
    if not text.startswith("["):
        value = parsed(path, text + "".join(blocks))
        raise UserError(f"{path}: {shown(value)} is no list of objects, one for each request")
    at = WHITESPACE.match(text, 1).end()
    sign = ","
    if text[at : at + 1] == "]":
        at = at + 1
        sign = "]"
    while sign == ",":
        at = WHITESPACE.match(text, at).end()
        try:
            item, end = decoder.raw_decode(text, at)
            end = WHITESPACE.match(text, end).end()
            sign = text[end : end + 1]
            if sign not in {",", "]"}:
                raise ValueError("neither a comma nor the end of the list is behind it")
        except (ValueError, RecursionError) as error:
            rest = text[at:]
            sign = ","
            more = "".join(islice(blocks, 1 + len(rest) // BLOCK))
            if not more or len(rest) > LONGEST:
                raise UserError(f"{path}, row {number}: not JSON ({error})") from None
            text = rest + more
            at = 0
            continue
        yield f"row {number}", item
        number = number + 1
        at = end + 1
    if (text[at:] + "".join(blocks)).strip():
        raise UserError(f"{path}: not JSON (more stands behind the list)")


def flat(row: Row) -> Row:
    """Without nulls, and without objects in the object: {"a": {"b": 1}} becomes {"a.b": 1}."""
    for _ in range(LEVELS):
        every = {}
        for key, value in row.items():
            own = value if isinstance(value, dict) else {}
            every |= {f"{key}.{name}": each for name, each in own.items()} or {key: value}
        row = every
    return {key: value for key, value in row.items() if value is not None}


def parsed(where: Path | str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None
