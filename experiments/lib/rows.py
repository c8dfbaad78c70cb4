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

from command.checks import UserError, lookup
from command.cli import claim
from experiments.lib import common
from experiments.lib.common import foreign, print_table, three_digits

SOURCES = ("paper", "predicted", "measured")
WHERE = ("source", "model", "hardware")  # the first columns of every file
# columns that say something about a row: no keys of its case
ABOUT = ("commit", "files", "versions", "command", "state", "tuning")
SPREAD = (" lowest", " highest")  # what the columns of a measured range end with
NO_CASE = "the constants at the top of its script leave no case"
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
    """Rows of one study. units: of its quantities, by their names.

        engine = {"source": "predicted", "model": "llama-13b", "hardware": "a6000"}
        rows = Rows([engine | {"L": 1024, "B": B, "speedup": 18 / B} for B in (2, 4)])
        rows.units["speedup"] = "x"
        rows.where("speedup", L=1024)       the rows that have a speedup, and this L
        rows.by("B")                        {2: Rows, 4: Rows}
        rows.column("speedup")              [9.0, 4.5]
        rows.one("speedup", B=2)            9.0
        rows.across("B", "speedup")         one line, with the columns L, 2 and 4

    L and B have no unit: they are the case of a row. `where` and `by` refuse a column that no row
    has, since it is misspelt. Where a column is optional, `column` tells whether it is there.
    whole: all rows, where these are a part of them. What one of these has is no unknown column.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        units: Mapping[str, str] | None = None,
        whole: "Rows | None" = None,
    ) -> None:
        super().__init__(rows)
        self.units = dict(units or {})
        self.whole = whole or self

    def part(self, rows: Iterable[Row]) -> "Rows":
        """Some of these rows."""
        return Rows(rows, self.units, self.whole)

    def columns(self) -> list[str]:
        """The columns of all rows, in order of appearance."""
        found: Row = {}
        for row in self:
            found |= row
        return list(found)

    def check(self, *columns: str) -> None:
        """Raises UserError for a column that no row has, and no unit. No rows refuse nothing."""
        for column in columns:
            if self.whole and column not in self.units and not self.known(column):
                names = [*self.whole.columns(), *self.units]
                lookup(dict.fromkeys(names), column, "column")

    def known(self, column: str) -> bool:
        """Whether a row has it, of all rows that these are a part of."""
        return any(column in row for row in self.whole)

    def where(self, *columns: str, **wanted: object) -> "Rows":
        """Those that have these columns and these values. A tuple as a value: one of it.

        None as a value: those that lack the column. Raises UserError for an unknown column.
        """
        allowed = {key: several(value) for key, value in wanted.items()}
        self.check(*columns)
        for key, values in allowed.items():
            if None not in values:
                self.check(key)
        return self.part(row for row in self if fits(row, columns, allowed))

    def by(self, *columns: str) -> "dict[object, Rows]":
        """Groups by the value of a column (of several: by tuples), in order of appearance."""
        found: dict[object, Rows] = {}
        for row in self.where(*columns):
            key = tuple(row[column] for column in columns)
            if len(columns) == 1:
                key = key[0]
            found.setdefault(key, self.part(())).append(row)
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
        others = [row for row in self if row["source"] != "measured"]
        measured = self.where(source="measured")
        last = [row for row in measured if where(row) == where(measured[-1])]
        return self.part(others + last)

    def add(self, like: Row | None = None, **columns: object) -> None:
        """A row more: what many cases say together. like: of the same engine; None: the first's."""
        like = like or self[0]
        self.append({name: like[name] for name in WHERE} | columns)

    def across(self, key: str, quantity: str) -> "Rows":
        """Side by side what differs in `key` alone: a column of the quantity for each value."""
        found: dict[tuple, Row] = {}
        for row in self.where(key, quantity):
            line = {name: row[name] for name in WHERE}
            for name, value in self.case(row).items():
                if name != key:
                    line[name] = value
            line = found.setdefault(tuple(line.items()), line)
            line[row[key]] = row[quantity]
        return Rows(found.values())

    def sources(self) -> list[str]:
        """Which of predicted and measured are there."""
        return [source for source in SOURCES[1:] if self.where(source=source)]

    def case(self, row: Row) -> Row:
        """The keys of a row, which have no unit: {"L": 1024, "B": 2}."""
        found = {}
        for column, value in row.items():
            if column not in (*WHERE, *ABOUT) and base(column) not in self.units:
                found[column] = value
        return found

    def numbers(self) -> "list[Number]":
        """Every number with its `name_of`.

        Where predicted rows differ in model or hardware, names end with these, without commas.
        """
        predicted = self.where(source="predicted")
        ends = [name for name in WHERE[1:] if len(predicted.by(name)) > 1]
        found = []
        for row in self:
            case = self.case(row)
            for end in ends:
                case[end] = row[end].replace(",", "")
            rest = name_of("", case)
            for quantity, unit in self.units.items():
                for column in columns_of(quantity):
                    if column in row:
                        name = column + rest
                        found.append(Number(name, quantity, row[column], unit, row["source"]))
        return found

    def named(self, source: str = "predicted") -> "Numbers":
        """The numbers of one source by their names; of measured ones, the newest."""
        return by_names(self.newest().numbers(), source)

    def write(self, path: Path) -> None:
        """A CSV file: where it was run, keys, quantities with their ranges.

        Raises UserError, and writes nothing, if there are no rows.
        """
        if not self:
            raise UserError(f"{path.stem} has no rows, so nothing is written: {NO_CASE}")
        used = self.columns()
        heads = {name: name for name in WHERE}
        for name in used:
            if base(name) not in self.units:
                heads[name] = name
        for quantity, unit in self.units.items():
            for name in columns_of(quantity):
                if name in used:
                    heads[name] = f"{name} ({unit})"
        cells = []
        for row in self:
            cells.append([cell(row.get(name, "")) for name in heads])
        common.write_table(path, list(heads.values()), cells)


def several(names: object) -> tuple:
    """A tuple as it is; all else as a tuple of one."""
    return names if isinstance(names, tuple) else (names,)


def fits(row: Row, columns: Iterable[str], allowed: Mapping[str, tuple]) -> bool:
    """Whether a row has all these columns, and of each key one of the allowed values."""
    for column in columns:
        if column not in row:
            return False
    for key, values in allowed.items():
        if row.get(key) not in values:
            return False
    return True


def by_names(numbers: Iterable[Number], source: str) -> "Numbers":
    return Numbers({each.name: each.value for each in numbers if each.source == source})


def where(row: Row) -> tuple[str, str, str]:
    """Source, model and hardware."""
    return row["source"], row["model"], row["hardware"]


def spread(row: Row, quantity: str) -> tuple[float, float]:
    """The lowest and the highest value of a quantity; where it has no range, itself."""
    _, lowest, highest = columns_of(quantity)
    return row.get(lowest, row[quantity]), row.get(highest, row[quantity])


def columns_of(quantity: str) -> list[str]:
    """A quantity has up to three columns: itself, and its range where it was measured."""
    return [quantity, quantity + SPREAD[0], quantity + SPREAD[1]]


def base(column: str) -> str:
    """The quantity that a column is of: itself, or a range's."""
    for end in SPREAD:
        column = column.removesuffix(end)
    return column


def name_of(column: str, case: Mapping[str, object]) -> str:
    """What captions, documents and tables call a number: "speedup, L=1024 B=18 sarathi".

    A text stands without its key.
    """
    words = []
    for key, value in case.items():
        words.append(value if isinstance(value, str) else f"{key}={cell(value)}")
    return f"{column}, {' '.join(words)}" if words else column


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
            lines = list(reader)
        heads = {head: split_head(head) for head in reader.fieldnames or []}
        if tuple(heads)[:3] != WHERE:
            raise ValueError("other columns")
        rows = Rows()
        for name, unit in heads.values():
            if unit:
                rows.units[base(name)] = unit
        for line in lines:
            rows.append(row_of(line, heads))
    except (ValueError, csv.Error) as error:
        why = f"its columns should begin with {', '.join(WHERE)}, and no line lack a cell"
        raise UserError(f"{path} is there and holds no results: {why}; move it away") from error
    return rows


def row_of(line: Mapping[str, str], heads: Mapping[str, tuple[str, str]]) -> Row:
    """A line of a file. heads: its columns as names and units. Raises ValueError."""
    if None in line or None in line.values():
        raise ValueError("more cells than columns, or fewer")
    row: Row = {}
    for head, (name, unit) in heads.items():
        text = line[head]
        if not text:
            continue
        if name in (*WHERE, *ABOUT):  # texts, also a commit that has digits alone
            row[name] = text
        elif unit:
            row[name] = float(text)
        else:
            row[name] = value_of(text)
    if not set(WHERE) <= row.keys() or row["source"] not in SOURCES:
        raise ValueError("no source, model or hardware")
    return row


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
    files = list(others or ())
    if name:
        table = path / f"{name}.csv"
        files.insert(0, table.name)
        if others is None:
            files.append(f"{name}.png")
    for file in files:
        claim(path / file, force)
    if name and not (force and foreign(table)):
        read_rows(table)


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
    measured = rows.where(source="measured")
    if measured:
        now = common.commit()
        for row in measured:
            row.setdefault("commit", now)
    if foreign(path):
        return rows

    def place(row: Row) -> tuple:
        return where(row) + tuple(row.get(key) for key in keys)

    own = rows.where(source=tuple(sources))
    again = {place(row) for row in own}
    earlier = read_rows(path).where(source=tuple(sources))
    kept = [row for row in earlier if place(row) not in again]
    others = [row for row in rows if row["source"] not in sources]
    return Rows(others + kept + own, rows.units)


class Numbers(dict[str, float]):
    """Numbers by their `name_of`.

    A name may leave out words of the case, as long as one number alone has all that are left:
    "speedup, B=18", "total, decode-maximal", or "total" alone. The full name of a number is always
    its own.
    """

    def __missing__(self, name: str) -> float:
        wanted, words = parts_of(name)
        found = []
        for full in self:
            quantity, case = parts_of(full)
            if quantity == wanted and words <= case:
                found.append(full)
        if len(found) != 1:
            raise KeyError(f"{name}: {len(found)} numbers have such a name")
        return self[found[0]]


def parts_of(name: str) -> tuple[str, set[str]]:
    """Quantity and case: "speedup" and {"L=1024", "B=18"} of "speedup, L=1024 B=18"."""
    quantity, comma, words = name.rpartition(", ")
    return (quantity, set(words.split())) if comma else (name, set())


COUNTED = ("numbers", "tokens", "requests", "iterations")  # units of whole numbers, mostly


def print_rows(rows: Rows, columns: Sequence[object], title: str = "", keys: int = 0) -> None:
    """A line for each row. Of quantities the head has the unit.

    keys: as in `print_table`; 0: the columns before the first quantity.
    """
    header = []
    for column in columns:
        unit = rows.units.get(column)
        header.append(f"{column} ({unit})" if unit else column)
    cells = []
    for row in rows:
        cells.append([as_shown(row.get(each), rows.units.get(each)) for each in columns])
    places = [place for place, column in enumerate(columns) if column in rows.units]
    print_table(header, cells, title, keys or min(places, default=1))


def as_shown(value: object, unit: str | None) -> str:
    """A cell of a terminal's table. None: what a row lacks."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if unit in COUNTED and value.is_integer():
        return f"{value:.0f}"
    return three_digits(value)


def with_paper(rows: Rows, *quantities: str) -> Rows:
    """All but the published rows.

    Predicted ones have the published quantities of their case, as "paper QUANTITY"; and our error
    in the first of them, as a text in %.
    """

    def place(row: Row) -> tuple:
        return row["model"], row["hardware"], frozenset(rows.case(row).items())

    stated = {place(row): row for row in rows.where(source="paper")}
    found = Rows((row.copy() for row in rows if row["source"] != "paper"), rows.units)
    first = quantities[0]
    for row in found.where(source="predicted"):
        paper = stated.get(place(row), {})
        for name in quantities:
            if name in paper:
                row[f"paper {name}"] = paper[name]
        if first in paper:
            row["error"] = error_text(row[first], paper[first])
    return found


def error_text(ours: float, paper: float) -> str:
    return f"{100 * (ours / paper - 1):+.1f} %"


def print_comparison(rows: Rows, shown: Callable[[Row, str], bool]) -> None:
    """A line for each quantity of each case; the error is that of predicted against paper."""
    rows = rows.newest()
    dull = alike(rows)
    # title of a table -> (what, unit) -> source -> value
    tables: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in rows:
        case = {key: value for key, value in rows.case(row).items() if key not in dull}
        for quantity, unit in rows.units.items():
            if quantity in row and shown(row, quantity):
                table = tables.setdefault(f"{row['model']} on {row['hardware']}", {})
                values = table.setdefault((name_of(quantity, case), unit), {})
                values[row["source"]] = row[quantity]
    header = ["what", *SOURCES, "error", "unit"]
    for title, table in tables.items():
        lines = [compared(what, unit, values) for (what, unit), values in table.items()]
        print_table(header, lines, title)


def alike(rows: Rows) -> list[str]:
    """Keys that most rows have, and all with one value: no line need repeat it."""
    found = []
    for key in rows.case(dict.fromkeys(rows.columns())):
        values = rows.column(key)
        if len(set(values)) == 1 and len(values) > len(rows) / 2:
            found.append(key)
    return found


def compared(what: str, unit: str, values: Mapping[str, float]) -> list[str]:
    """A line of that table. values: by source."""
    cells = [what]
    for source in SOURCES:
        cells.append(three_digits(values[source]) if source in values else "-")
    error = "-"
    if "paper" in values and "predicted" in values:
        error = error_text(values["predicted"], values["paper"])
    return [*cells, error, unit]
