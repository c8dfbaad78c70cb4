"""What all experiments share: published numbers, result rows and their CSV files, tables.

A number is a `Point` that says what it is: paper, predicted or measured. Above this module stand
`flags` (command lines), `look` (pictures), `steady` (what is run, and what the cost model predicts
for it), `measuring` (the real engine on this machine), `papers` (Sarathi-Serve's set-ups) and
`figure` (what makes a figure of all that).
"""

import csv
import math
import multiprocessing
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass, fields, replace
from io import StringIO
from pathlib import Path
from typing import TypeVar

from command.checks import UserError
from command.cli import claim, interrupts_held, is_ours, progress, write_file
from configs import GPUS
from costmodel import constants
from loading.policyfile import LOADED, load_policies

ROOT = Path(__file__).resolve().parents[2]
Job, Outcome = TypeVar("Job"), TypeVar("Outcome")  # a script's own, see `run_jobs`


def paper_numbers() -> dict[str, float]:
    """Every published number by its id.

    paper_numbers.csv says which paper, which figure, what it means and in which unit.
    """
    with open(ROOT / "experiments" / "paper_numbers.csv", newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["value"]) for row in csv.DictReader(file)}


# ------------------------------------------------------------------------------------------ results

SPREAD = (" lowest", " highest")  # what the series of a measured range end with


@dataclass(frozen=True)
class Point:
    """One point of one curve: a row of results/NAME.csv.

    A number that belongs to no one x (a curve's largest) has x = 0, x_unit = "".
    """

    figure: str
    series: str
    x: float
    x_unit: str
    y: float
    y_unit: str
    source: str  # paper (published), predicted (cost model) or measured (this machine)
    model: str
    hardware: str

    def __post_init__(self) -> None:
        assert self.source in ("paper", "predicted", "measured"), self.source


class Record(list[Point]):
    """Points of one figure. What they share is said once.

    Record("fig8", MODEL, GPU) collects predicted ones. `measured_on(llm)` of lib/measuring.py names
    model, hardware and source of measured ones: Record("fig8", *measured_on(llm)).
    """

    def __init__(self, figure: str, model: str, hardware: str, source: str = "predicted") -> None:
        super().__init__()
        self.figure, self.where = figure, (source, model, hardware)

    def add(self, series: str, y: float, unit: str, x: float = 0, x_unit: str = "") -> None:
        self.append(Point(self.figure, series, x, x_unit, y, unit, *self.where))


def values(points: Iterable[Point], source: str = "predicted") -> dict[str, float]:
    """y of the points of one source by series, of series that have one point each."""
    return {point.series: point.y for point in points if point.source == source}


def values_at(points: Iterable[Point], source: str = "predicted") -> dict[tuple[str, float], float]:
    """y of the points of one source by series and x."""
    return {(point.series, point.x): point.y for point in points if point.source == source}


def guesses(points: Sequence[Point], software: Mapping[str, str]) -> list[str]:
    """The lines that say which predicted points borrow another GPU's constants.

    software: GPU -> whose constants it was priced with, where not "sarathi". A GPU that is left out
    gets a line too many rather than none.
    """
    predicted = {point.hardware for point in points if point.source == "predicted"}
    names = [gpu for gpu in GPUS if any(gpu in hardware.split() for hardware in predicted)]
    lines = [constants(gpu, software.get(gpu, "sarathi"))[1] for gpu in names]
    return [line for line in lines if line]


def write_csv(
    path: Path, points: Sequence[Point], software: Mapping[str, str] | None = None
) -> None:
    """Tidy: one row per point, numbers rounded to 6 significant digits.

    Prints `guesses`: every result passes here, so that none forgets to say them.
    """
    for line in guesses(points, software or {}):
        print("\n" + textwrap.fill(f"A guess: {line}", 100))
    write_table(path, [field.name for field in fields(Point)], map(astuple, points))


def write_table(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence], head: str = ""
) -> None:
    """A CSV file, numbers rounded to 6 significant digits. head: lines above it."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in row])
    write_file(path, head + text.getvalue())


def read_csv(path: Path) -> list[Point]:
    """The rows of a results/NAME.csv; none where there is no such file.

    Raises UserError where the file holds something else.
    """
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return [
                Point(**row | {"x": float(row["x"]), "y": float(row["y"])})
                for row in csv.DictReader(file)
            ]
    except (AssertionError, KeyError, TypeError, ValueError, csv.Error):
        columns = ", ".join(field.name for field in fields(Point))
        raise UserError(
            f"{path} is there and holds no results: its columns should be {columns}; move it away"
        ) from None


def with_kept(path: Path, points: Sequence[Point]) -> list[Point]:
    """`points`, and the measured rows that `path` holds from earlier runs.

    A measurement takes minutes and a machine: a later run without --measure, or on another machine,
    must not lose it. Rows of a model and hardware that this run measured again are replaced. A file
    that is not ours is to be overwritten (--force), and holds nothing.
    """
    if foreign(path):
        return list(points)
    measured = [point for point in points if point.source == "measured"]
    anew = {(point.model, point.hardware) for point in measured}
    kept = [
        p for p in read_csv(path) if p.source == "measured" and (p.model, p.hardware) not in anew
    ]
    return [point for point in points if point.source != "measured"] + kept + measured


def newest_measured(points: Iterable[Point]) -> list[Point]:
    """The measured points of one model and machine: those that were measured last."""
    measured = [point for point in points if point.source == "measured"]
    where = [(point.model, point.hardware) for point in measured]
    return [point for point, place in zip(measured, where, strict=True) if place == where[-1]]


def curves(points: Iterable[Point], source: str) -> dict[str, list[Point]]:
    """The points of one source by series, each in order of x; see `newest_measured`."""
    if source == "measured":
        points = newest_measured(points)
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.source == source:
            found.setdefault(point.series, []).append(point)
    return {series: sorted(curve, key=lambda point: point.x) for series, curve in found.items()}


def paper_points(paper: Mapping[str, tuple[str, float]], predicted: Sequence[Point]) -> list[Point]:
    """The published numbers as points.

    paper: number's id -> series and x of the predicted point that it stands beside.
    """
    numbers, places = paper_numbers(), {(point.series, point.x): point for point in predicted}
    return [
        replace(places[place], y=numbers[name], source="paper")
        for name, place in paper.items()
        if place in places
    ]


# ------------------------------------------------------------------------------------------- tables


NARROW = 80  # columns that a table may take on a terminal, without --wide
SHORT = 16  # letters of a cell that stays on one line
_wide = False


def set_wide(wide: bool) -> None:
    """--wide: from now on, print tables as wide as they are."""
    global _wide
    _wide = wide


def table_width() -> float:
    """Columns that a table may take: those of a terminal, elsewhere 80; with --wide, any number."""
    if _wide:
        return math.inf
    return max(NARROW, shutil.get_terminal_size().columns) if sys.stdout.isatty() else NARROW


def column_widths(rows: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[int]:
    """The width of each column, so that the table fits `table_width` if it can.

    rows: the header first. Where they are too wide, the header's words go below each other, then
    the words of long cells. No number and no word is broken.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max(longest_word(head), *map(len, cells), 0) for head, *cells in columns]
    words = [max(map(longest_word, column)) for column in columns]
    for floors in (least, [max(each, SHORT) for each in words]):
        floors = [least[c] if numeric[c] else min(least[c], floors[c]) for c in range(len(columns))]
        while sum(widths) + 2 * (len(widths) - 1) > table_width() and widths != floors:
            loose = [c for c in range(len(columns)) if widths[c] > floors[c]]
            widths[max(loose, key=lambda c: widths[c])] -= 1
    return widths


def longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def print_table(
    header: Sequence[object], rows: Sequence[Sequence[object]], title: str = ""
) -> None:
    """Columns as wide as they need, below a title, if there is one.

    Words go to the left, everything that starts like a number to the right. A table that is wider
    than the terminal has words below each other. If it is still too wide, its columns are printed
    as several tables, each with the rows' names.
    """
    if title:
        print(f"\n{title}\n")
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    numeric = [all(row[c][:1] in "0123456789+-." for row in cells[1:]) for c in range(len(header))]
    widths = column_widths(cells, numeric)
    for number, columns in enumerate(column_groups(widths, numeric)):
        if number:
            print()
        print_columns(
            [[row[c] for c in columns] for row in cells],
            [widths[c] for c in columns],
            [numeric[c] for c in columns],
        )


def column_groups(widths: Sequence[int], numeric: Sequence[bool]) -> list[list[int]]:
    """Which columns stand side by side: as many as fit. Each group begins with the row's name.

    That is the columns of words at the left, or only the first, where they take half of the width.
    """
    words = numeric.index(True) if True in numeric else 1
    names = list(range(max(1, words)))
    if sum(widths[c] + 2 for c in names) > table_width() / 2:
        names = [0]
    groups = [list(names)]
    for column in range(len(names), len(widths)):
        taken = sum(widths[c] + 2 for c in groups[-1])
        if taken + widths[column] > table_width() and len(groups[-1]) > len(names):
            groups.append(list(names))
        groups[-1].append(column)
    return groups


def print_columns(
    rows: Sequence[Sequence[str]], widths: Sequence[int], numeric: Sequence[bool]
) -> None:
    """rows: the header first."""
    for number, row in enumerate(rows):
        parts = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, parts))
        for line in range(height):
            texts = []
            for column, part in enumerate(parts):
                above = height - len(part) if number == 0 else 0  # a header stands on its line
                text = part[line - above] if 0 <= line - above < len(part) else ""
                width = widths[column]
                texts.append(text.rjust(width) if numeric[column] else text.ljust(width))
            print("  ".join(texts).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def wrap(cell: str, width: int) -> list[str]:
    """The lines of a cell."""
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def print_comparison(points: Sequence[Point]) -> None:
    """One row per series, x, model and hardware; the error is that of predicted against paper."""
    rows: dict[tuple, dict[str, float]] = {}
    for point in points:
        place = f"{point.x_unit} = {point.x:.4g}" if point.x_unit else ""
        key = (f"{point.model} on {point.hardware}", point.series, place, point.y_unit)
        rows.setdefault(key, {})[point.source] = point.y
    table = []
    for (_, series, place, unit), values in rows.items():
        cells = [
            three_digits(values[source]) if source in values else "-"
            for source in ("paper", "predicted", "measured")
        ]
        both = "paper" in values and "predicted" in values
        error = f"{100 * (values['predicted'] / values['paper'] - 1):+.1f} %" if both else "-"
        table.append([series, place, *cells, error, unit])
    for where in dict.fromkeys(key[0] for key in rows):
        print(f"\n{where}\n")
        print_table(
            ["what", "at", "paper", "predicted", "measured", "error", "unit"],
            [row for key, row in zip(rows, table, strict=True) if key[0] == where],
        )


def begin_worker(initializer: Callable[[], object] | None, policies: Sequence[Path]) -> None:
    """What a process of `run_jobs` does first. policies: files of the user's own."""
    threading.Thread(target=end_with_main, daemon=True).start()
    for path in policies:
        load_policies(path)  # where processes are forked, they are there already
    if initializer:
        initializer()


def end_with_main() -> None:
    """End this worker when the process that started the pool is gone, even if it was killed.

    It need not be our parent: a server of multiprocessing may have started us.
    """
    multiprocessing.parent_process().join()
    os._exit(1)


def run_jobs(
    perform: Callable[[Job], Outcome],
    jobs: Sequence[Job],
    processes: int,
    what: str = "runs",
    initializer: Callable[[], object] | None = None,
) -> dict[Job, Outcome]:
    """What `perform` makes of each job. It runs in other processes, unless processes is 1.

    what: the name of the progress bar. initializer: what each of the processes calls first. After
    Ctrl-C or an error, no process is left. Raises OSError if one of them is killed.
    """
    if processes == 1:
        return {job: perform(job) for job in progress(jobs, what)}
    found, begin = {}, (initializer, list(LOADED))
    with ProcessPoolExecutor(processes, None, begin_worker, begin) as pool:
        try:
            with interrupts_held():
                running = {pool.submit(perform, job): job for job in jobs}
            for done in progress(as_completed(running), what, len(running)):
                found[running[done]] = done.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.kill()
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    f"one of {processes} worker processes was killed; the system does that when no"
                    " memory is left"
                ) from None
            raise
    return {job: found[job] for job in jobs}


# -------------------------------------------------------------------------------------------- files


def claim_result(path: Path, force: bool = False) -> Path:
    """`cli.claim` for a file whose name a script chooses. Raises UserError.

    A device may never end, and a pipe waits for its other end: nobody has named them.
    """
    claim(path, force)
    if path.exists() and not path.is_file():
        raise UserError(f"{str(path)!r} is a device or a pipe: move it away, or give another --out")
    return path


def foreign(path: Path) -> bool:
    """Whether a file is there that is not ours, to be overwritten with --force."""
    return path.is_file() and not is_ours(path)
