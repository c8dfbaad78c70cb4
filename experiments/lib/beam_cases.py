"""The rows of results/bench_beams.csv: made of what was measured, and read again.

A series says all of a case: "next token, transformers, prompt=512 BW=4 response=128 steps=16".
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.lib.beam_engines import ENGINES, Seen, ratio, spread
from experiments.lib.common import SPREAD, Point, Record, foreign, read_csv, series_options
from experiments.lib.measuring import add_spread
from experiments.lib.segment import OURS

TOKENS = {"first token": (1, "s"), "next token": (1e3, "ms")}
"""What is timed -> units in a second, unit."""


@dataclass(frozen=True)
class Case:
    """One batch, as all engines run it. fewer: engine -> output tokens, where it stops early."""

    prompt: int
    batch_size: int
    beam_width: int
    response: int
    fewer: tuple[tuple[str, int], ...] = ()

    def steps(self, engine: str) -> int:
        return min(self.response, dict(self.fewer).get(engine, self.response))

    def series(self, engine: str) -> str:
        steps = self.steps(engine)
        short = f" steps={steps}" if steps < self.response else ""
        options = f"prompt={self.prompt} BW={self.beam_width} response={self.response}"
        return f"{engine}, {options}{short}"


def points_of(found: dict[str, tuple[Case, Seen]], hardware: str, model: str) -> list[Point]:
    """Times with their ranges, tokens/s, peak, and ratios to ours (or of ours, to width 1)."""
    record, ours = Record("bench_beams", model, hardware, "measured"), found.get(OURS)
    for label, (case, seen) in found.items():
        series, size = case.series(label.split(", ")[0]), case.batch_size
        for what, (scale, unit) in TOKENS.items():
            times = spread([scale * seconds for seconds in seen.times(what)])
            add_spread(record, f"{what}, {series}", times, unit, size, "BS")
            if ours is None or label == OURS:
                continue
            over, pair = f"over {OURS}'s", (ours[1], seen)
            if case.beam_width != ours[0].beam_width:
                over, pair = f"of BW {ours[0].beam_width} over BW 1", (seen, ours[1])
            add_spread(record, f"{what} {over}, {series}", ratio(*pair, what), "x", size, "BS")
        rate = seen.throughput(size, case.response)
        record.add(f"tokens/s, {series}", rate, "tokens/s", size, "BS")
        if seen.peak:
            record.add(f"peak, {series}", statistics.median(seen.peak) / 1e6, "MB", size, "BS")
    return record


def key(point: Point) -> tuple:
    """What two measurements of one engine in one case have in common, whenever it stopped."""
    case = re.search(r", (.*BW=\d+ response=\d+)", point.series)[1]
    return case, point.x, point.model, point.hardware


def with_earlier(path: Path, points: Sequence[Point]) -> list[Point]:
    """`points` behind those that the file holds of other cases."""
    if foreign(path):
        return list(points)
    anew = {key(point) for point in points}
    return [point for point in read_csv(path) if key(point) not in anew] + list(points)


@dataclass(frozen=True)
class Row:
    """One engine in one case, read from the file. values: by what they are of."""

    engine: str
    case: Case
    hardware: str
    values: dict[str, float]


def rows_of(points: Sequence[Point]) -> list[Row]:
    """By case, in the order of the engines."""
    found: dict[tuple[str, str, Case], dict[str, float]] = {}
    for point in points:
        what, engine, rest = point.series.split(", ", 2)
        options = series_options(rest)
        shape = options["prompt"], int(point.x), options["BW"], options["response"]
        fewer = ((engine, options["steps"]),) if "steps" in options else ()
        end = next((end for end in SPREAD if rest.endswith(end)), "")
        values = found.setdefault((engine, point.hardware, Case(*shape, fewer)), {})
        values[what + end] = point.y

    def order(row: Row) -> tuple:
        case, place = row.case, ENGINES.index(row.engine)
        shape = case.response, case.prompt, case.batch_size, -case.beam_width
        return row.hardware, *shape, place

    rows = [Row(engine, case, where, values) for (engine, where, case), values in found.items()]
    return sorted(rows, key=order)
