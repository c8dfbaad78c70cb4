"""Ways to spoil a file: values of JSON, cells of CSV, bytes of anything."""

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

DEEP = "[" * 100_000
# Text of JSON, as some of it cannot be made by json.dumps.
VALUES = (
    "null", "true", "false", "0", "1", "-1", "3", "1.5", "-0.0", "NaN", "Infinity", "-Infinity",
    "1e300", "1e-300", "1e400", "9" * 20, "1" + "0" * 30, "9" * 5000, '""', '"x"', '"1"',
    '"\\ud800"',
    '"\\u0000"', '"../x"', "[]", "{}", "[[]]", "[null]", "[1]", '["x"]', "[-1]", '{"a": 1}',
    '["a", {"b": []}]', DEEP, '"' + "a" * 100_000 + '"',
)  # fmt: skip
CELLS = (
    "", " ", "x", "-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "1e308", "1e17", "9" * 25,
    "9" * 5000,
    "\u0663", "\x00", '"', "a" * 200_000, "2023-11-16", "2023-11-16 18:15:46+99:00", "9999-12-31",
    "0001-01-01", "1_0", "+1", "=1+1", "\ud83e", "\ufeff1",
)  # fmt: skip
PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for a value until the text is there

Spoiled = tuple[str, bytes]  # what was done, and the file that came of it


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """All places of a JSON value, lists cut to their first two."""
    yield path
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*path, name))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from places(value[index], (*path, index))


def put(value: object, path: tuple, new: object) -> object:
    """A copy with another value at a place."""
    if not path:
        return new
    found = copy.deepcopy(value)
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = new
    return found


def without(value: object, path: tuple) -> object:
    found = copy.deepcopy(value)
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return found


def spoil_json(text: str, rng: random.Random, most: int) -> list[Spoiled]:
    """One place at a time: every bad value at every place, of which at most `most` are drawn."""
    value = json.loads(text)
    every = [(path, bad) for path in places(value) for bad in VALUES]
    every += [(path, None) for path in places(value) if path]
    found = []
    for path, bad in rng.sample(every, min(most, len(every))):
        name = ".".join(map(str, path)) or "(all)"
        if bad is None:
            made, what = json.dumps(without(value, path)), f"without {name}"
        else:
            made = json.dumps(put(value, path, PLACE), ensure_ascii=False)
            made, what = made.replace(f'"{PLACE}"', bad), f"{name} = {bad[:30]}"
        found.append((what, made.encode("utf-8", "surrogatepass")))
    return found


def spoil_csv(text: str, rng: random.Random, most: int) -> list[Spoiled]:
    """A cell, the header, a row that is too short or too long, quotes that never end."""
    rows = [line.split(",") for line in text.splitlines()]
    found = []
    for _ in range(most):
        changed = [list(row) for row in rows]
        row = rng.choice((0, 1, len(rows) - 1))
        column = rng.randrange(len(rows[row]))
        way = rng.randrange(8)
        if way < 5:
            cell = rng.choice(CELLS)
            changed[row][column] = cell
            what = f"line {row + 1}, column {column + 1} = {cell[:30]!r}"
        elif way == 5:
            del changed[row][column]
            what = f"line {row + 1} without column {column + 1}"
        elif way == 6:
            changed[row] = changed[row] * 50
            what = f"line {row + 1}, 50 times as long"
        else:
            keep = rng.randrange(len(rows))
            changed = changed[:keep]
            what = f"only {keep} lines"
        made = "\n".join(",".join(cells) for cells in changed)
        found.append((what, made.encode("utf-8", "surrogatepass")))
    return found


def spoil_bytes(content: bytes, rng: random.Random, most: int) -> list[Spoiled]:
    """Cut, changed, repeated, in another encoding."""
    ways: tuple[Callable[[], Spoiled], ...] = (
        lambda: (f"cut at {(at := rng.randrange(len(content)))}", content[:at]),
        lambda: flip(content, rng, 1),
        lambda: flip(content, rng, 20),
        lambda: insert(content, rng),
    )
    fixed = [
        ("empty", b""),
        ("one byte", content[:1]),
        ("twice", content + content),
        ("UTF-16", content.decode("latin-1").encode("utf-16")),
        ("a mark of UTF-8 first", b"\xef\xbb\xbf" + content),
        ("zeros", bytes(len(content))),
        ("random", rng.randbytes(1000)),
        ("CRLF", content.replace(b"\n", b"\r\n")),
        ("100,000 brackets", DEEP.encode()),
    ]
    return (fixed + [rng.choice(ways)() for _ in range(max(0, most - len(fixed)))])[:most]


def flip(content: bytes, rng: random.Random, count: int) -> Spoiled:
    made = bytearray(content)
    spots = [rng.randrange(min(len(made), 2000)) for _ in range(count)]  # headers come first
    for spot in spots:
        made[spot] = rng.randrange(256)
    return f"{count} bytes changed, the first at {spots[0]}", bytes(made)


def insert(content: bytes, rng: random.Random) -> Spoiled:
    spot = rng.randrange(len(content))
    piece = rng.choice((b"\0", b"\xff\xfe", b"\n", b'"', b"{", b"," * 10_000, b"\xf0\x9f"))
    return f"{piece[:4]!r} at {spot}", content[:spot] + piece + content[spot:]


def spoil_place(path: Path, way: str) -> None:
    """Something else than a file where a file is wanted."""
    path.unlink(missing_ok=True)
    if way == "folder":
        path.mkdir()
    elif way == "dangling link":
        path.symlink_to("nowhere/at/all")
    elif way == "loop of links":
        path.symlink_to(path.name)
    elif way == "fifo":
        os.mkfifo(path)
    elif way == "endless":
        path.symlink_to("/dev/zero")


PLACES = ("missing", "folder", "dangling link", "loop of links", "fifo", "endless")
