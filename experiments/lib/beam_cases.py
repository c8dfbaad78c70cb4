"""The rows of results/bench_beams.csv: made of what was measured, and read again.

A series says all of a case: "next token, transformers, prompt=512 BW=4 response=128 steps=16".
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.lib.beam_engines import ENGINES, Seen, ratio, spread
from experiments.lib.common import SPREAD, Point, foreign, read_csv, series_options
from experiments.lib.measuring import gain_points
from experiments.lib.segment import OURS

TOKENS = {"first token": ("first", 1, "s"), "next token": ("next", 1e3, "ms")}
"""What is timed -> field of `Seen`, units in a second, unit."""


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
    points, ours = [], found.get(OURS)
    fixed = {"x_unit": "BS", "source": "measured", "model": model, "hardware": hardware}
    for label, (case, seen) in found.items():
        series = case.series(label.split(", ")[0])
        add = partial(Point, "bench_beams", **fixed)
        for what, (name, scale, unit) in TOKENS.items():
            values = tuple(scale * value for value in spread(getattr(seen, name)))
            named = partial(add, y_unit=unit)
            points += gain_points(named, f"{what}, {series}", case.batch_size, values)
            if ours is None or label == OURS:
                continue
            over = partial(add, y_unit="x")
            title, pair = f"{what} over {OURS}'s, {series}", (ours[1], seen)
            if case.beam_width != ours[0].beam_width:
                title = f"{what} of BW {ours[0].beam_width} over BW 1, {series}"
                pair = seen, ours[1]
            points += gain_points(over, title, case.batch_size, ratio(*pair, name))
        rate = seen.throughput(case.batch_size, case.response)
        points.append(add(f"tokens/s, {series}", x=case.batch_size, y=rate, y_unit="tokens/s"))
        if seen.peak:
            peak = statistics.median(seen.peak) / 1e6
            points.append(add(f"peak, {series}", x=case.batch_size, y=peak, y_unit="MB"))
    return points


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
    found: dict[tuple, dict[str, float]] = {}
    for point in points:
        what, engine, rest = point.series.split(", ", 2)
        options = series_options(rest)
        shape = options["prompt"], int(point.x), options["BW"], options["response"]
        fewer = ((engine, options["steps"]),) if "steps" in options else ()
        ends = [end for end in SPREAD if point.series.endswith(end)]
        values = found.setdefault((point.hardware, *shape, engine, fewer), {})
        values[what + "".join(ends)] = point.y
    rows = [Row(k[5], Case(*k[1:5], k[6]), k[0], values) for k, values in found.items()]
    places = {name: place for place, name in enumerate(ENGINES)}

    def order(row: Row) -> tuple:
        case = row.case
        shape = case.response, case.prompt, case.batch_size
        return row.hardware, *shape, -case.beam_width, places[row.engine]

    return sorted(rows, key=order)
