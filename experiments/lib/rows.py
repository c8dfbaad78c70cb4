"""Results with named columns: a row for each case, a column for each key of it and each quantity.

    source,model,hardware,L,B,C,speedup (x),throughput (tokens/s)

A column with a unit is a quantity; one without is a key of the case. What a row lacks stays empty.
The range of a measured quantity has columns of its own, such as "speedup lowest (x)".
"""

import csv
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from command.checks import UserError
from command.cli import claim
from experiments.lib import common
from experiments.lib.common import foreign, print_table, three_digits

SOURCES = ("paper", "predicted", "measured")
WHERE = ("source", "model", "hardware")  # the first columns of every file
# columns that say something about a row: no keys of its case
ABOUT = ("commit", "files", "versions", "command", "state", "tuning")
SPREAD = (" lowest", " highest")  # what the columns of a measured range end with
Row = dict[str, object]


@dataclass(frozen=True)
class Number:
    """One number of a row, as a page or a table shows it."""

    name: str
    quantity: str
    value: float
    unit: str
    source: str


class Rows(list[Row]):
    """Rows of one study. units: of its quantities, by their names."""

    def __init__(self, rows: Iterable[Row] = (), units: Mapping[str, str] | None = None) -> None:
        super().__init__(rows)
        self.units = dict(units or {})

    def where(self, *columns: str, **wanted: object) -> "Rows":
        """Those that have these columns and these values. A tuple as a value: one of it."""
        allowed = {key: own if isinstance(own, tuple) else (own,) for key, own in wanted.items()}
        having = (row for row in self if all(column in row for column in columns))
        found = (row for row in having if all(row.get(key) in allowed[key] for key in allowed))
        return Rows(found, self.units)

    def by(self, *columns: str) -> "dict[object, Rows]":
        """Groups by the value of a column (of several: by tuples), in order of appearance."""
        found: dict[object, Rows] = {}
        for row in self:
            if all(column in row for column in columns):
                key = tuple(row[column] for column in columns)
                group = found.setdefault(key if len(columns) > 1 else key[0], Rows((), self.units))
                group.append(row)
        return found

    def column(self, name: str) -> list:
        """The values of the rows that have one."""
        return [row[name] for row in self if name in row]

    def one(self, column: str, **wanted: object) -> float:
        """The value of the only row that fits. Raises LookupError where it is not the only one."""
        found = self.where(column, **wanted)
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows have {column} and {wanted}")
        return found[0][column]

    def newest(self) -> "Rows":
        """Without what was measured earlier, of another model or on another machine."""
        measured = self.where(source="measured")
        last = {key: measured[-1][key] for key in WHERE} if measured else {}
        others = [row for row in self if row["source"] != "measured"]
        return Rows([*others, *measured.where(**last)], self.units)

    def add(self, like: Row | None = None, **columns: object) -> None:
        """A row more: what many cases say together. like: of the same engine; None: the first's."""
        self.append({name: (like or self[0])[name] for name in WHERE} | columns)

    def across(self, key: str, quantity: str) -> "Rows":
        """Side by side what differs in `key` alone: a column of the quantity for each value."""
        found: dict[tuple, Row] = {}
        for row in self.where(key, quantity):
            case = {name: value for name, value in self.case(row).items() if name != key}
            place = where(row), *case.items()
            found.setdefault(place, dict(zip(WHERE, where(row), strict=True)) | case)
            found[place][row[key]] = row[quantity]
        return Rows(found.values())

    def sources(self) -> list[str]:
        """Which of predicted and measured are there."""
        return [source for source in SOURCES[1:] if self.where(source=source)]

    def case(self, row: Row) -> Row:
        return {
            column: value
            for column, value in row.items()
            if column not in (*WHERE, *ABOUT) and base(column) not in self.units
        }

    def numbers(self) -> "list[Number]":
        """Every number with its `name_of`.

        Where predicted rows differ in model or hardware, names end with these, without commas.
        """
        places = [row for row in self if row["source"] == "predicted"]
        ends = [name for name in WHERE[1:] if len({row[name] for row in places}) > 1]
        columns = [
            (quantity, column, unit)
            for quantity, unit in self.units.items()
            for column in (quantity, *(quantity + end for end in SPREAD))
            if any(column in row for row in self)
        ]
        found = []
        for row in self:
            rest = name_of("", self.case(row) | {end: row[end].replace(",", "") for end in ends})
            found += [
                Number(column + rest, quantity, row[column], unit, row["source"])
                for quantity, column, unit in columns
                if column in row
            ]
        return found

    def named(self, source: str = "predicted") -> "Numbers":
        """The numbers of one source by their names; of measured ones, the newest."""
        return by_names(self.newest().numbers(), source)

    def write(self, path: Path) -> None:
        """A CSV file: where it was run, keys, quantities with their ranges."""
        every = dict.fromkeys(column for row in self for column in row)
        keys = [name for name in every if name not in WHERE and base(name) not in self.units]
        ends = {name + end: unit for name, unit in self.units.items() for end in ("", *SPREAD)}
        heads = {name: name for name in (*WHERE, *keys)}
        heads |= {name: f"{name} ({unit})" for name, unit in ends.items() if name in every}
        cells = [[cell(row[name]) if name in row else "" for name in heads] for row in self]
        common.write_table(path, list(heads.values()), cells)


def by_names(numbers: Iterable[Number], source: str) -> "Numbers":
    return Numbers({each.name: each.value for each in numbers if each.source == source})


def where(row: Row) -> tuple[str, str, str]:
    return tuple(row[name] for name in WHERE)


def spread(row: Row, quantity: str) -> tuple[float, float]:
    """The lowest and the highest value of a quantity; where it has no range, itself."""
    low, high = (row.get(quantity + end, row[quantity]) for end in SPREAD)
    return low, high


def base(column: str) -> str:
    """The quantity that a column is of: itself, or a range's."""
    for end in SPREAD:
        column = column.removesuffix(end)
    return column


def name_of(column: str, case: Mapping[str, object]) -> str:
    """What captions, documents and tables call a number: "speedup, L=1024 B=18 sarathi".

    A text stands without its key.
    """
    texts = {key: value if isinstance(value, str) else cell(value) for key, value in case.items()}
    words = [text if text is case[key] else f"{key}={text}" for key, text in texts.items()]
    return ", ".join([column, " ".join(words)] if words else [column])


def cell(value: object) -> str:
    """As it stands in a file: numbers with 6 significant digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def value_of(text: str) -> object:
    """A cell of a file: a number if `cell` writes one so. "007", "1e3" and "nan" are texts."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value) and cell(value) == text:
            return value
    return text


def read_rows(path: Path) -> Rows:
    """The rows of a file; none where there is no such file. Raises UserError for another file."""
    if not path.exists():
        return Rows()
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            heads = {head: split_head(head) for head in reader.fieldnames or []}
            lines = list(reader)
            assert tuple(heads)[:3] == WHERE
            assert not any(None in row or None in row.values() for row in lines)
            units = {base(name): unit for name, unit in heads.values() if unit}
            rows = [
                {
                    name: text if name in WHERE else float(text) if unit else value_of(text)
                    for head, (name, unit) in heads.items()
                    if (text := row[head])
                }
                for row in lines
            ]
            assert all(set(WHERE) <= row.keys() and row["source"] in SOURCES for row in rows)
    except (AssertionError, KeyError, ValueError, csv.Error) as error:
        why = f"its columns should begin with {', '.join(WHERE)}, and no line lack a cell"
        raise UserError(f"{path} is there and holds no results: {why}; move it away") from error
    return Rows(rows, units)


def make_directory(
    path: Path, name: str = "", others: Sequence[str] | None = None, force: bool = False
) -> None:
    """Create the place for the results. Whatever is wrong with it is said before any work is done.

    name: of a figure. NAME.csv may hold earlier measurements; they are kept, so it must be
    readable. others: files that will be written, too; None: NAME.png. Files that are there and are
    not ours are refused, or removed with force.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"--out {path} is a file; it must be a directory") from None
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"--out {path}: no permission to write there")
    own = [f"{name}.csv"] if name else []
    for file in [*own, *([f"{name}.png"] if name and others is None else others or [])]:
        claim(path / file, force)
    if name and not (force and foreign(path / f"{name}.csv")):
        read_rows(path / f"{name}.csv")


def split_head(head: str) -> tuple[str, str]:
    """Column and unit of "throughput (tokens/s)"; the unit of a key is ""."""
    name, _, unit = head.rpartition(" (")
    return (name, unit[:-1]) if name and unit.endswith(")") else (head, "")


def with_kept(path: Path, rows: Rows, *keys: str, sources: Sequence[str] = ("measured",)) -> Rows:
    """`rows`, and the measured rows that `path` holds from earlier runs.

    A measurement takes minutes and a machine: a later run without --measure, or on another machine,
    must not lose it. Rows of a model and hardware that this run measured again are replaced; with
    keys, those that have the same values of these, too. A file that is not ours is to be
    overwritten (--force), and holds nothing. sources: predicted, too, where each machine has its
    own prediction. A row that was measured now gets the commit.
    """
    if measured := rows.where(source="measured"):
        now = common.commit()
        for row in measured:
            row.setdefault("commit", now)
    if foreign(path):
        return rows

    def place(row: Row) -> tuple:
        return *where(row), *map(row.get, keys)

    own = rows.where(source=tuple(sources))
    again = {place(row) for row in own}
    kept = [r for r in read_rows(path) if r["source"] in sources and place(r) not in again]
    others = [row for row in rows if row["source"] not in sources]
    return Rows([*others, *kept, *own], rows.units)


class Numbers(dict[str, float]):
    """Numbers by their `name_of`.

    A name may leave out words of the case, as long as one number alone has all that are left:
    "speedup, B=18", "total, decode-maximal", or "total" alone. The full name of a number is always
    its own.
    """

    def __missing__(self, name: str) -> float:
        quantity, comma, words = name.rpartition(", ")
        quantity, words = (quantity, set(words.split())) if comma else (name, set())
        found = [
            full
            for full in self
            if full.rpartition(", ")[0] == quantity
            and words <= set(full.rpartition(", ")[2].split())
        ]
        if len(found) != 1:
            raise KeyError(f"{name}: {len(found)} numbers have such a name")
        return self[found[0]]


COUNTED = ("numbers", "tokens", "requests", "iterations")  # units of whole numbers, mostly


def print_rows(rows: Rows, columns: Sequence[object], title: str = "") -> None:
    """A line for each row. Of quantities the head has the unit."""

    def text(value: object, unit: str | None) -> str:
        if not isinstance(value, float):
            return "-" if value is None else str(value)
        return f"{value:.0f}" if unit in COUNTED and value.is_integer() else three_digits(value)

    units = {name: f"{name} ({unit})" for name, unit in rows.units.items()}
    header = [units.get(column, column) for column in columns]
    cells = [[text(row.get(each), rows.units.get(each)) for each in columns] for row in rows]
    print_table(header, cells, title)


def with_paper(rows: Rows, *quantities: str) -> Rows:
    """All but the published rows.

    Predicted ones have the published quantities of their case, as "paper QUANTITY"; and our error
    in the first of them, as a text in %.
    """

    def place(row: Row) -> tuple:
        return row["model"], row["hardware"], frozenset(rows.case(row).items())

    stated = {place(row): row for row in rows.where(source="paper")}
    found = Rows((row.copy() for row in rows if row["source"] != "paper"), rows.units)
    for row in found.where(source="predicted"):
        paper = stated.get(place(row), {})
        row |= {f"paper {name}": paper[name] for name in quantities if name in paper}
        if (first := quantities[0]) in paper:
            row["error"] = error_text(row[first], paper[first])
    return found


def error_text(ours: float, paper: float) -> str:
    return f"{100 * (ours / paper - 1):+.1f} %"


def print_comparison(rows: Rows, shown: Callable[[Row, str], bool]) -> None:
    """A line for each quantity of each case; the error is that of predicted against paper."""
    places: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    rows = rows.newest()
    keys = dict.fromkeys(key for row in rows for key in rows.case(row))
    same = {  # what most have, and all alike: no line need repeat it
        key
        for key in keys
        if len(set(found := rows.column(key))) == 1 and len(found) > len(rows) / 2
    }
    for row in rows:
        where = f"{row['model']} on {row['hardware']}"
        case = rows.case(row)
        case = {key: value for key, value in case.items() if key not in same}
        for quantity, unit in rows.units.items():
            if quantity in row and shown(row, quantity):
                lines = places.setdefault(where, {})
                line = lines.setdefault((name_of(quantity, case), unit), {})
                line[row["source"]] = row[quantity]
    for where, lines in places.items():
        table = []
        for (what, unit), values in lines.items():
            every = [values.get(source) for source in ("paper", "predicted", "measured")]
            cells = ["-" if value is None else three_digits(value) for value in every]
            both = "paper" in values and "predicted" in values
            error = error_text(values["predicted"], values["paper"]) if both else "-"
            table.append([what, *cells, error, unit])
        header = ["what", "paper", "predicted", "measured", "error", "unit"]
        print_table(header, table, where)
