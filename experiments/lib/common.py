"""What all experiments share: published numbers, tables, jobs in several processes, files.

Above this module stand `rows` (results with columns), `flags` (command lines), `look` (pictures),
`measuring` (the real engine on this machine), `engines` (what a study asks: priced or real),
`claims`, `papers` (Sarathi-Serve's set-ups) and `study` (what makes a script of all that).
"""

import csv
import gc
import math
import multiprocessing
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from hashlib import sha256
from importlib.metadata import version  # numpy itself would keep two lessons off the browser
from io import StringIO
from pathlib import Path
from typing import TypeVar

from command.browser import find_browser
from command.cli import cores, interrupts_held, is_ours, progress, write_file
from experiments.lib.published import paper_numbers  # noqa: F401  (as all scripts know it)
from more.loading.policyfile import LOADED, load_policies

ROOT = Path(__file__).resolve().parents[2]
# a script's own, see `run_jobs`
Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence]) -> None:
    """A CSV file, numbers rounded to 6 significant digits."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in row)
    write_file(path, text.getvalue())


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by column. Lines that begin with # are no rows."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if line[0] != "#"))


# ------------------------------------------------------------------------------------------- tables


NARROW = 80  # columns that a table may take on a terminal, without --wide
SHORT = 16  # letters of a cell that stays on one line
_wide = False
_open = False


def set_wide(wide: bool) -> None:
    """--wide: from now on, print tables as wide as they are."""
    global _wide
    _wide = wide


def set_open(open: bool) -> None:
    """--open: from now on, open what `print_link` names."""
    global _open
    _open = open


def print_link(picture: Path) -> None:
    """Print the link of a picture or a page. Many terminals open a link at a click."""
    link = picture.resolve().as_uri()
    print(f"to look: {link}", flush=True)
    if not _open:
        return
    if browser := find_browser():
        browser.open(link)
    else:
        print("no browser with a window was found: open the link yourself")


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
    broken_heads = []  # least widths: a word of the header on a line, cells as they are
    broken_cells = []  # ... and long cells, too, over several lines
    for column, is_number in zip(columns, numeric, strict=True):
        head, *cells = column
        least = max(longest_word(head), *map(len, cells), 0)
        broken_heads.append(least)
        if not is_number:
            longest = max(map(longest_word, column))
            least = min(least, max(longest, SHORT))
        broken_cells.append(least)
    shrink(widths, broken_heads)
    shrink(widths, broken_cells)
    return widths


def shrink(widths: list[int], least: Sequence[int]) -> None:
    """Take from the widest columns, in place, until the table fits or all have their least."""
    while sum(widths) + 2 * (len(widths) - 1) > table_width() and widths != least:
        loose = [c for c, width in enumerate(widths) if width > least[c]]
        widths[max(loose, key=lambda c: widths[c])] -= 1


def longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def print_table(
    header: Sequence[object], rows: Sequence[Sequence[object]], title: str = "", keys: int = 1
) -> None:
    """Columns as wide as they need, below a title, if there is one.

    Words go to the left, everything that starts like a number to the right. A table that is wider
    than the terminal has words below each other. If it is still too wide, its columns are printed
    as several tables, each with the rows' names. keys: as in `column_groups`.
    """
    if title:
        print(f"\n{title}\n")
    cells = [list(map(str, row)) for row in (header, *rows)]
    numeric = []
    for c in range(len(header)):
        numeric.append(all(row[c][:1] in "0123456789+-." for row in cells[1:]))
    widths = column_widths(cells, numeric)
    for number, columns in enumerate(column_groups(widths, numeric, keys)):
        if number:
            print()
        part = []
        for row in cells:
            part.append([row[c] for c in columns])
        print_columns(part, [widths[c] for c in columns], [numeric[c] for c in columns])


def column_groups(widths: Sequence[int], numeric: Sequence[bool], keys: int) -> list[list[int]]:
    """Which columns stand side by side: as many as fit. Each group begins with the row's name.

    That is the first `keys` columns, and those of words at the left, as far as they take no more
    than half of the width; the first in any case.
    """
    words = numeric.index(True) if True in numeric else 1
    names = list(range(max(keys, words)))
    while len(names) > 1 and sum(widths[c] + 2 for c in names) > table_width() / 2:
        names.pop()
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
    if len(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)


def three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def error_summary(errors: Sequence[float]) -> list[str]:
    """Median, 90th percentile and maximum of the absolute errors in %, and the signed median."""
    sizes = [abs(error) for error in errors]
    shown = [statistics.median(sizes), quantile(sizes, 0.9), max(sizes)]
    return [*(f"{size:.1f} %" for size in shown), f"{statistics.median(errors):+.1f} %"]


def begin_worker(policies: Sequence[Path]) -> None:
    """What a process of `run_jobs` does first. policies: files of the user's own."""
    gc.disable()  # a run leaves many small objects and no cycles: looking takes a fifth of its time
    for path in policies:
        load_policies(path)  # where processes are forked, they are there already


_executor: Executor | None = None


def set_executor(executor: Executor | None) -> None:
    """From now on, `run_jobs` gives its jobs to this executor, such as a cluster's. None: to none.

    Its machines need this folder and the files of --policy-file at the same paths.
    """
    global _executor
    _executor = executor


def perform_there(perform: Callable[[Job], Outcome], policies: Sequence[Path], job: Job) -> Outcome:
    """One job, where nothing of this process is known. policies: files of the user's own."""
    for path in policies:
        load_policies(path)
    return perform(job)


def run_jobs(
    perform: Callable[[Job], Outcome], jobs: Sequence[Job], what: str = "runs", most: int = 0
) -> dict[Job, Outcome]:
    """What `perform` makes of each job, in at most `most` processes; 1: this one.

    what: the name of the progress bar. most: 0: one for each core. After Ctrl-C or an error, no
    process is left. Raises OSError if one of them is killed. With `set_executor`, the executor says
    how many jobs run at once, and where.
    """
    if _executor is not None:
        there = partial(perform_there, perform, list(LOADED))
        found = progress(_executor.map(there, jobs), what, len(jobs))
        return dict(zip(jobs, found, strict=True))
    if (processes := min(most or cores(), len(jobs))) <= 1:
        return {job: perform(job) for job in progress(jobs, what)}
    found = {}
    with ProcessPoolExecutor(processes, None, begin_worker, [list(LOADED)]) as pool:
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


def git(*words: str) -> str:
    """What git says of this clone; "" where there is no clone, or no git."""
    if not shutil.which("git"):
        return ""
    command = ["git", *words]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip()


def commit() -> str:
    """Of this clone; it ends with -dirty where any file differs from it, or is not in it."""
    found = git("describe", "--always")
    if not found:
        return "unknown"
    return f"{found}-dirty" if git("status", "--porcelain") else found


def origin(script: str, words: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """Who made a row: commit, versions, command; and how the SHA-256 of a user's files begins."""
    found = {"commit": commit()}
    if files:
        hashes = [f"{path.name}:{sha256(path.read_bytes()).hexdigest()[:8]}" for path in files]
        found["files"] = " ".join(hashes)
    found["versions"] = f"python {platform.python_version()}, numpy {version('numpy')}"
    return found | {"command": shlex.join(["python", f"experiments/{script}.py", *words])}


def foreign(path: Path) -> bool:
    """Whether a file is there that is not ours, to be overwritten with --force."""
    return path.is_file() and not is_ours(path)
