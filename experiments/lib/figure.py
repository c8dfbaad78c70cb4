"""A figure or table of the paper: what it predicts, what it measures, how it is drawn.

`run_figure` does the rest in the same way for all: the flags, the table with the columns paper /
predicted / measured / error, results/NAME.csv and results/NAME.png.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from experiments.lib.common import (
    MEASURE_DEFAULTS,
    SPREAD,
    Point,
    make_directory,
    make_figure_parser,
    make_parser,
    paper_points,
    parse_options,
    positive,
    print_comparison,
    with_kept,
    write_csv,
)
from experiments.lib.look import save_figure, use_style
from experiments.lib.measuring import load_llm
from pictures import perfetto
from timeline import Trace

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM


@dataclass(frozen=True)
class Scale:
    """How large a figure is measured on this machine.

    The paper's shapes, cut down to what a laptop runs in minutes.
    """

    lengths: tuple[int, ...]  # L, tokens
    batch_sizes: tuple[int, ...]  # B
    chunk_sizes: tuple[int, ...] = ()  # C, where the figure has chunks
    repeats: int = 5
    requests: int = 0  # how many, where they arrive over time
    budget: float = 0.0  # GB that a batch may take, where the figure looks for the largest

    def __str__(self) -> str:
        shapes = {"L": self.lengths, "B": self.batch_sizes, "C": self.chunk_sizes}
        return "; ".join(
            f"{name} = {', '.join(map(str, sizes))}" for name, sizes in shapes.items() if sizes
        )


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper.

    paper: id of a published number -> series and x of the predicted point that it is compared with.
    predict(quick), measure(llm, scale): points; without `measure` there is no --measure.
    draw(points): the picture, from all points, those kept from earlier measurements included.
    shown: which points the terminal table lists.
    """

    name: str
    description: str  # the script's docstring
    paper: Mapping[str, tuple[str, float]]
    predict: Callable[[bool], list[Point]]
    measure: Callable[["LLM", Scale], list[Point]] | None
    draw: Callable[[list[Point]], plt.Figure]
    scale: Scale = Scale((), ())
    quick_scale: Scale = Scale((), ())
    shown: Callable[[Point], bool] = lambda point: True
    # GPU -> whose constants it is priced with, where not "sarathi" (`common.guesses`)
    software: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "auto"  # what it is measured in, unless --dtype says otherwise
    # where `predict` and `measure` leave their runs by name, for --perfetto; None: no such flag
    traces: dict[str, Trace] | None = None

    def published_and_predicted(self, quick: bool = False) -> list[Point]:
        predicted = self.predict(quick)
        return predicted + paper_points(self.paper, predicted)


def run_figure(figure: Figure) -> list[Point]:
    """A figure's main: flags, prediction, measurement if asked for, table, CSV, picture.

    Returns all points, those kept from earlier measurements included.
    """
    if figure.measure is None:
        options = make_parser(figure.description).parse_args()
        make_directory(options.out, figure.name, force=options.force)
        print(figure.description.splitlines()[0])
        return save_results(options.out, figure, figure.published_and_predicted(options.quick))
    parser, group = make_figure_parser(figure.description)
    full, quick = figure.scale, figure.quick_scale
    group.add_argument(
        "--repeats",
        type=positive,
        metavar="N",
        help=f"turns whose median is taken (default: {full.repeats})",
    )
    if full.budget:
        group.add_argument(
            "--budget",
            type=gigabytes,
            metavar="GB",
            help=f"that a batch may take, weights apart (default: {full.budget:g})",
        )
    if figure.traces is not None:
        parser.add_output("--perfetto", "write the runs for https://ui.perfetto.dev (JSON)")
    defaults = MEASURE_DEFAULTS | {"dtype": figure.dtype, "repeats": full.repeats}
    quick_defaults = {"repeats": quick.repeats}
    if full.budget:
        defaults["budget"], quick_defaults["budget"] = full.budget, quick.budget
    options = parse_options(parser, defaults, quick_defaults)
    budget = options.budget if full.budget else 0.0
    scale = replace(quick if options.quick else full, repeats=options.repeats, budget=budget)
    make_directory(options.out, figure.name, force=options.force)
    llm = load_llm(options, max(scale.batch_sizes), max(scale.lengths)) if options.measure else None
    print(figure.description.splitlines()[0])
    points = figure.published_and_predicted(options.quick)
    if llm is not None:
        begin = time.perf_counter()
        points += figure.measure(llm, scale)
        print(
            f"\nmeasured on this machine in {time.perf_counter() - begin:.0f} s: {scale}; repeated"
            f" {scale.repeats} times"
        )
    points = save_results(options.out, figure, points)
    if figure.traces is not None and options.perfetto:
        perfetto.save(options.perfetto, figure.traces)
        print(f"wrote {options.perfetto}: open it on https://ui.perfetto.dev")
    return points


def gigabytes(text: str) -> float:
    """A flag's value in GB, that must be above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GB above 0")
    return value


def save_results(out: Path, figure: Figure, points: Sequence[Point]) -> list[Point]:
    """Table, CSV and picture, with the measured rows of earlier runs. Returns all points."""
    points = with_kept(out / f"{figure.name}.csv", points)
    print_comparison(
        [point for point in points if figure.shown(point) and not point.series.endswith(SPREAD)]
    )
    write_csv(out / f"{figure.name}.csv", points, figure.software)
    use_style()
    save_figure(figure.draw(points), out / f"{figure.name}.png")
    print(f"\nwrote {out / figure.name}.png and .csv")
    return points
