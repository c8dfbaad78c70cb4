"""What all figures share: the published numbers, flags, tables, CSV files, the look of the pictures, steady-state throughput."""

import argparse
import csv
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from tqdm import tqdm

from cli import Parser
from configs import UserError

matplotlib.use("Agg")  # pictures go to files: no window, no display needed
ROOT = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------------------------------------------- published numbers


def paper_numbers() -> dict[str, float]:
    """Every published number by its id; paper_numbers.csv says which paper, which figure, what it means and in which unit."""
    with open(ROOT / "experiments" / "paper_numbers.csv", newline="", encoding="utf-8") as file:
        return {row["id"]: float(row["value"]) for row in csv.DictReader(file)}


# ---------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Point:
    """One point of one curve: a row of results/figN.csv."""

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


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """Tidy: one row per point, numbers rounded to 6 significant digits."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Point)])
        for point in points:
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in astuple(point)])


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need: words to the left, everything that starts like a number to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(row[column][:1] in "0123456789+-." for row in cells[1:]) for column in range(len(header))]
    for number, row in enumerate(cells):
        columns = zip(row, widths, numeric, strict=True)
        print("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def steady_seconds(finished: Sequence[tuple[int, float]], first: int, last: int) -> float:
    """Seconds from the completion of request number `first` to that of number `last`, counted from 1 in order of completion.

    With identical requests, `first` and `last` multiples of the batch size B, and at least B requests still to come after `last`, start-up
    and drain stay outside and the window holds whole periods: the baseline completes B requests at a time, SARATHI one.
    """
    assert 1 <= first < last <= len(finished), (first, last, len(finished))
    return finished[last - 1][1] - finished[first - 1][1]


def progress(items: Sequence, what: str) -> tqdm:
    """A progress bar that vanishes when it is done; none where stderr is a file or a pipe."""
    return tqdm(items, desc=what, leave=False, disable=None, dynamic_ncols=True)


# ---------------------------------------------------------------------------------------------------- flags


def positive(text: str) -> int:
    """A flag's value that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def make_parser(description: str) -> Parser:
    """The flags that every figure has; description: the script's docstring."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results", metavar="DIR", help="where the .png and .csv go (default: results/)")
    parser.add_argument("--quick", action="store_true", help="fewer points: a smoke test, not a result")
    return parser


def make_directory(path: Path) -> None:
    """Create the place for the results, at the start of a script rather than after minutes of work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None


def this_machine(device: str = "cpu") -> str:
    """The name of the hardware that a measurement ran on."""
    if device.startswith("cuda"):
        import torch  # only a measurement needs it, and it takes seconds to load

        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({os.cpu_count()} cores)"


def median_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median, smallest and largest of first / second over alternating measurements: a machine's drift hits both of a pair."""
    ratios = [first / second for first, second in pairs]
    return statistics.median(ratios), min(ratios), max(ratios)


# ---------------------------------------------------------------------------------------------------- pictures

# Okabe and Ito's palette: told apart with any colour vision. Markers differ as well, for print in grey.
COLOURS = {"orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "blue": "#0072B2", "vermilion": "#D55E00", "purple": "#CC79A7"}
SERIES = [
    (COLOURS["orange"], "^"),
    (COLOURS["blue"], "o"),
    (COLOURS["green"], "s"),
    (COLOURS["vermilion"], "D"),
    (COLOURS["purple"], "v"),
    (COLOURS["sky"], "P"),
]


def use_style() -> None:
    """Sizes that can be read from the last row of a classroom."""
    plt.rcParams.update(
        {
            "font.size": 15,
            "axes.titlesize": 16,
            "axes.labelsize": 15,
            "legend.fontsize": 13,
            "lines.linewidth": 2.2,
            "lines.markersize": 6,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "savefig.dpi": 120,
        }
    )


def save_figure(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
