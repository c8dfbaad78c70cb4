"""A figure or table of a paper: what it predicts, what it measures, how it is drawn.

`Figure.main` does the rest in the same way for all: the flags, the table with the columns paper /
predicted / measured / error, results/NAME.csv and results/NAME.png. A script that must do more
calls `flags.start`, then `finish`.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import matplotlib.pyplot as plt

from command.cli import run_main
from command.flags import Flag
from experiments.lib.common import (
    SPREAD,
    Point,
    paper_points,
    print_comparison,
    with_kept,
    write_csv,
)
from experiments.lib.flags import MEASURE, file_name, start
from experiments.lib.look import save_figure, use_style
from experiments.lib.measuring import load_llm


@dataclass(frozen=True)
class Scale:
    """How large a figure is measured on this machine.

    The paper's shapes, cut down to what a laptop runs in minutes.
    """

    lengths: tuple[int, ...]  # L, tokens
    batch_sizes: tuple[int, ...]  # B
    chunk_sizes: tuple[int, ...] = ()  # C, where the figure has chunks
    repeats: int = 5
    budget: float = 0.0  # GB that a batch may take, where the figure looks for the largest

    def __str__(self) -> str:
        shapes = {"L": self.lengths, "B": self.batch_sizes, "C": self.chunk_sizes}
        return "; ".join(
            f"{name} = {', '.join(map(str, sizes))}" for name, sizes in shapes.items() if sizes
        )


@dataclass(frozen=True)
class Figure:
    """One figure or table of a paper.

    paper: id of a published number -> series and x of the predicted point that it is compared with.
    predict(quick, **flags), measure(llm, scale): points; without `measure` there is no --measure.
    Where `flags` has --policy, measure(llm, scale, policy) gets it, too.
    draw(points): the picture, from all points, those kept from earlier measurements included.
    """

    name: str
    description: str  # the script's docstring
    paper: Mapping[str, tuple[str, float]]
    predict: Callable[..., list[Point]]
    measure: Callable[..., list[Point]] | None
    draw: Callable[[list[Point]], plt.Figure]
    scale: Scale = Scale((), ())
    quick_scale: Scale = Scale((), ())
    # which points the terminal's table of comparisons lists; None: no such table
    shown: Callable[[Point], bool] | None = lambda point: True
    # prints more, from all points, after the table
    report: Callable[[list[Point]], None] = lambda points: None
    # flags of its own, which `predict` gets by name
    flags: Mapping[str, Flag] = field(default_factory=dict)
    # GPU -> whose constants it is priced with, where not "sarathi" (`common.guesses`)
    software: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "auto"  # what it is measured in, unless --dtype says otherwise

    def published_and_predicted(self, quick: bool = False, **flags: object) -> list[Point]:
        predicted = self.predict(quick, **flags)
        return predicted + paper_points(self.paper, predicted)

    def main(self) -> None:
        """The script's main program."""
        run_main(self.run)

    def run(self) -> list[Point]:
        """Flags, prediction, measurement if asked for, table, CSV, picture.

        Returns all points, those kept from earlier measurements included.
        """
        options = start(self.name, self.description, **self.all_flags())
        scale = self.chosen_scale(options)
        llm = None
        if self.measure and options.measure:
            llm = load_llm(options, max(scale.batch_sizes), max(scale.lengths))
        given = {name: getattr(options, name) for name in self.flags}
        points = self.published_and_predicted(options.quick, **given)
        if llm is not None:
            begin = time.perf_counter()
            more = {"policy": options.policy} if "policy" in self.flags else {}
            points += self.measure(llm, scale, **more)
            print(
                f"\nmeasured on this machine in {time.perf_counter() - begin:.0f} s: {scale};"
                f" repeated {scale.repeats} times"
            )
        name = file_name(self.name, options)
        points = with_kept(options.out / f"{name}.csv", points)
        if self.shown:
            shown = [point for point in points if self.shown(point)]
            print_comparison([point for point in shown if not point.series.endswith(SPREAD)])
        self.report(points)
        finish(options, name, points, lambda: self.draw(points), self.software)
        return points

    def all_flags(self) -> dict[str, Flag]:
        """Its own, and where it can be measured, those of measuring."""
        if self.measure is None:
            return dict(self.flags)
        full, quick = self.scale, self.quick_scale
        flags = dict(self.flags) | MEASURE
        flags["dtype"] = replace(MEASURE["dtype"], default=self.dtype)
        flags["repeats"] = Flag(
            "runs of each case, whose median is taken", full.repeats, quick.repeats, measure=True
        )
        if full.budget:
            flags["memory"] = Flag("", full.budget, quick.budget, measure=True)
        return flags

    def chosen_scale(self, options: Namespace) -> Scale:
        """How large it is measured under these flags."""
        if self.measure is None:
            return self.scale
        scale = self.quick_scale if options.quick else self.scale
        budget = options.memory if self.scale.budget else 0.0
        return replace(scale, repeats=options.repeats, budget=budget)


def finish(
    options: Namespace,
    name: str,
    points: Sequence[Point],
    draw: Callable[[], plt.Figure],
    software: Mapping[str, str] | None = None,
) -> None:
    """Write NAME.csv and NAME.png to --out. software: as in `Figure`."""
    write_csv(options.out / f"{name}.csv", points, software)
    use_style()
    save_figure(draw(), options.out / f"{name}.png")
    print(f"\nwrote {options.out / name}.png and .csv")
