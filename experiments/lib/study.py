"""A study: a function over an engine, a table of cases, and what of its rows is printed and drawn.

    def speedup(engine, L, B, C) -> dict[str, float]: ...          quantities of one case
    STUDY = Study("fig8", __doc__, Sweep(speedup, [Priced("llama-13b", "a6000")], cases), ...)

The engine is priced, or real with --measure (lib/engines.py): the function cannot tell. A row of
results/NAME.csv has a column for each key of its case and for each quantity (lib/rows.py).
"""

import math
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from command.checks import UserError
from command.cli import run_main
from command.flags import Flag
from experiments.lib import look, measuring
from experiments.lib.claims import Claims
from experiments.lib.common import origin, paper_numbers, print_link
from experiments.lib.engines import ANY, Priced, Real, Sweep
from experiments.lib.flags import DRAWS, MEASURE, ScriptParser, file_name
from experiments.lib.panels import Panel
from experiments.lib.rows import (
    NO_CASE,
    Row,
    Rows,
    make_directory,
    print_comparison,
    read_rows,
    with_kept,
)
from more.loading.policyfile import LOADED, knows_end

if TYPE_CHECKING:  # predicting needs no torch
    from nano_sarathi import LLM


LONGEST = 1024  # tokens of the cases that a GPU measures, so that they take minutes


def one_engine(llm: "LLM", repeats: int) -> Generator[Real]:
    yield Real(llm, repeats)


@dataclass(frozen=True)
class Study:
    """An experiment: `main` does the flags, the table, results/NAME.csv and results/NAME.png.

        STUDY = Study(
            "NAME",
            __doc__,
            [Sweep(speedup, [Priced("llama-13b", "a6000")], cases(L=1024, B=(2, 4)))],
            units={"speedup": "x"},
            title="What a decode gains",
            panels=[Panel("B", "speedup")],
        )

    sweeps: a list, or a function of `quick` and the study's own flags that gives one.
    units: of all quantities; the columns' order.
    paper: id of a published number -> quantity and keys of the predicted row that it stands beside.
    `paper_table` (lib/published.py) makes it of a table. A third part gives what else the paper
    states there, and None for a key of ours that it does not state. Where all keys name model and
    hardware, they stand beside a user's, too, if these are the paper's.
    derive: adds columns and rows to those that are predicted; derive_measured: to the measured.
    shown(row, quantity): what the terminal's table lists; None: no table. report: prints more.
    panels, columns of them (0: all of one source), or draw(rows): the picture. Without `draw`, what
    was measured has a picture of its own, NAME_measured.png.
    claims(rows): what a test holds the predicted rows to (lib/claims.py).
    more: files beside results/NAME.csv and .png: how they end -> what writes one.
    repeats: turns of a measurement; with --quick, one. 0: nothing is measured. real: the real
    engines, one after the other, from the model that --model loads and the turns.
    slow: it takes minutes; torch: even its predictions need torch. printed: for a paper: a PDF,
    too, and columns of the CSV that say which code made it, and how.
    """

    name: str
    description: str  # the script's docstring
    sweeps: Sequence[Sweep] | Callable[..., Sequence[Sweep]]
    units: Mapping[str, str]
    title: str
    panels: Sequence[Panel] = ()
    columns: int = 0
    draw: Callable[[Rows], plt.Figure] | None = None
    paper: Mapping[str, tuple] = field(default_factory=dict)
    derive: Callable[[Rows], None] = lambda rows: None
    derive_measured: Callable[[Rows], None] = lambda rows: None
    predicted: str = "predicted"  # or "fitted": what the picture calls it
    shown: Callable[[Row, str], bool] | None = lambda row, quantity: True
    report: Callable[[Rows], None] = lambda rows: None
    claims: Callable[[Rows], Claims] = lambda rows: {}
    flags: Mapping[str, Flag] = field(default_factory=dict)
    more: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    real: Callable[["LLM", int], Generator[Real]] = one_engine
    repeats: int = 0
    slow: bool = False
    printed: bool = False
    torch: bool = False

    def swept(self, quick: bool = False, **flags: object) -> Sequence[Sweep]:
        return self.sweeps(quick, **flags) if callable(self.sweeps) else self.sweeps

    def predict(self, quick: bool = False, **flags: object) -> Rows:
        """Predicted rows, and published ones beside them. flags: the study's own.

        Raises UserError if it has no case, unless it only measures.
        """
        rows = Rows((), self.units)
        sweeps = self.swept(quick, **flags)
        for sweep in sweeps:
            rows += sweep.predict(quick)
        if not rows and any(sweep.on for sweep in sweeps):
            raise UserError(f"{self.name} has no rows, so nothing is written: {NO_CASE}")
        self.derive(rows)
        if not self.own(flags, rows):
            rows += self.published(rows)
        return rows

    def own(self, flags: Mapping[str, object], rows: Rows) -> bool:
        """Whether a user's own model, GPU or requests are priced: nothing is published of these."""
        names = ("model", "gpu", "tp", "max_batch_size", "software", "requests_file")
        given = any(flags.get(name) and self.flags[name].default is None for name in names)
        named = all({"model", "hardware"} <= case.keys() for _, case, *_ in self.paper.values())
        return given and not (named and self.places(rows))

    def places(self, rows: Rows) -> dict[str, Row]:
        """The predicted row beside each published number whose case is there, by its id."""
        predicted = rows.where(source="predicted")
        found = {}
        for number, (quantity, case, *_) in self.paper.items():
            beside = predicted.where(quantity, **case)
            if len(beside) > 1:
                raise UserError(
                    f"{self.name}: the published number {number!r} fits {len(beside)} rows, of"
                    f" {', '.join(beside.by('model'))}: say more of its case"
                )
            if beside:
                found[number] = beside[0]
        return found

    def numbers(self, rows: Rows) -> dict[str, float]:
        """Our number for each published one, by its id."""
        found = {}
        for number, row in self.places(rows).items():
            quantity = self.paper[number][0]
            found[number] = row[quantity]
        return found

    def published(self, rows: Rows) -> list[Row]:
        """Rows with the published numbers: those of one case together."""
        found: dict[int, Row] = {}  # by the row of ours that they stand beside
        for number, row in self.places(rows).items():
            quantity, _, *others = self.paper[number]
            place = {"source": "paper", "model": row["model"], "hardware": row["hardware"]}
            stated = found.setdefault(id(row), place | rows.case(row))
            stated[quantity] = paper_numbers()[number]
            for more in others:
                stated |= more
        return [{key: y for key, y in row.items() if y is not None} for row in found.values()]

    def main(self) -> None:
        """The script's main program."""
        run_main(self.run)

    def run(self, args: Sequence[str] | None = None) -> Rows:
        """Flags, prediction, measurement if asked for, table, CSV, picture. Returns all rows.

        args: the flags; None: those of the command line.
        """
        options = ScriptParser(self.description, self.all_flags() | DRAWS).parse_args(args)
        path = options.out / f"{file_name(self.name, options)}.csv"
        pictures = [".png", ".pdf"] if self.printed else [".png"]
        others = [path.stem + end for end in (*pictures, *self.more)]
        make_directory(options.out, path.stem, others, options.force)
        given = {name: getattr(options, name) for name in self.flags}
        quick = options.quick
        measure = self.repeats and options.measure
        if measure and "model" in given:  # it is what runs
            given["model"] = None
        sweeps = self.swept(quick, **given)  # refuses flags before any work
        notes = [note for sweep in sweeps for note in sweep.notes]
        if measure:
            sweeps = self.here(options, sweeps)
            llm = self.load(options, sweeps, given)
        print(self.description.splitlines()[0])
        files = [*(given.get("policy_file") or ()), given.get("requests_file")]
        words = map(str, sys.argv[1:] if args is None else args)
        made = origin(self.name, words, list(filter(None, files)))  # before the code may change
        rows = self.predict(quick, **given)
        if measure:
            begin = time.perf_counter()
            rows += self.measured(llm, options.repeats, quick, sweeps)
            seconds = time.perf_counter() - begin
            print(f"\nmeasured on this machine in {seconds:.0f} s, {options.repeats} times each")
        if self.printed:
            for row in rows:
                row.update(made)
        rows = with_kept(path, rows)
        rows.write(path)  # at once: what follows may fail, and a measurement takes minutes
        for note in notes:
            print(note)
        self.show(rows)
        title = self.title
        if self.own(given, rows):
            title = title.rpartition(": ")[-1]  # without the paper's figure
        drawn = replace(self, title=title).picture
        finish(path, rows, drawn, guesses(self.swept(quick, **given)), pictures)
        self.draw_measured(path)
        for end, write in self.more.items():
            write(path.with_suffix(end))
        return rows

    def show(self, rows: Rows) -> None:
        """Print the table and the report."""
        if self.shown:
            print_comparison(rows, self.shown)
        self.report(rows)

    def here(self, options: Namespace, sweeps: Sequence[Sweep]) -> list[Sweep]:
        """What --measure runs: the paper's cases on a GPU that holds them, else a CPU's.

        On a GPU: the paper's model, unless --model names another; its cases of up to LONGEST tokens
        and of as many requests as fit. With --quick, or where flags say the case, a CPU's.
        Sets options.model to what runs.
        """
        small = [each for each in sweeps if each.measured_cases(options.quick)]
        measured = [each.run for each in small]
        paper = []
        for each in sweeps:
            kinds = {type(engine) for engine in each.on}
            if each.run in measured and kinds == {Priced}:
                paper.append(each)
        asked = options.quick
        for name, flag in self.flags.items():
            if flag.measure and getattr(options, name) != flag.default:
                asked = True
        if paper and not asked:
            models = [each.on[0].model for each in paper]
            model = options.model or models[0]
            own = model if model in models else models[0]
            paper = [each.up_to(LONGEST) for each in paper if each.on[0].model == own]
            sizes = {case.get("B", 1) for each in paper for case in each.measured}
            most = measuring.most_that_fit(options, model, sizes, LONGEST + 1)
            if most:
                print(f"{model} runs the paper's cases of up to {LONGEST} tokens, up to B = {most}")
                options.model = model
                return [each.up_to(LONGEST, most) for each in paper]
            if options.device.type == "cuda":
                print(f"{model} does not fit this GPU with the paper's cases; we take a CPU's")
        options.model = options.model or MEASURE["model"].default
        return small

    def load(
        self, options: Namespace, sweeps: Sequence[Sweep], given: Mapping[str, object]
    ) -> "LLM":
        """The model, with room for the largest case, or for what flags say."""
        found = [case for each in sweeps for case in each.measured_cases(options.quick)]
        room = []
        for flag, key in (("max_batch_size", "B"), ("max_length", "L")):
            sizes = [int(case.get(key, 1)) for case in found]
            room.append(max(sizes, default=given.get(flag)))
        return measuring.load_llm(options, *room)

    def measured(self, llm: "LLM", repeats: int, quick: bool, sweeps: Sequence[Sweep]) -> Rows:
        rows = Rows((), self.units)
        with closing(self.real(llm, repeats)) as engines:  # they end, whatever happens
            for real in engines:
                for sweep in sweeps:
                    if sweep.measured_cases(quick):
                        rows += sweep.measure(real, quick)
        self.derive_measured(rows)
        return rows

    def all_flags(self) -> dict[str, Flag]:
        """Its own, and where it can be measured, those of measuring."""
        if not self.repeats:
            return dict(self.flags)
        name = "llama-0.2b; on a GPU that holds it, the paper's"
        model = replace(MEASURE["model"], default=None, shown=name)
        runs = "runs of each case, whose median is taken"
        repeats = Flag(runs, self.repeats, 1, measure=True)
        shared = MEASURE | {"model": model, "repeats": repeats}
        return shared | dict(self.flags)

    def picture(self, rows: Rows) -> plt.Figure:
        """Of what is predicted, beside the papers; where nothing is, of what was measured."""
        rows = Rows(rows, self.units | rows.units, rows.whole)  # a file may lack some of them
        if self.draw:
            return self.draw(rows)
        rows = rows.newest()
        drawn = rows.where(source=("paper", "predicted")) or rows
        return draw_panels(drawn, self.panels, self.title, self.columns, self.predicted)

    def draw_measured(self, path: Path) -> None:
        """NAME_measured.png of NAME.csv, where that has predictions, too."""
        rows = read_rows(path)
        if rows.sources() == ["predicted", "measured"] and not self.draw:
            picture = self.picture(rows.where(source="measured"))
            look.save_figure(picture, path.with_name(f"{path.stem}_measured.png"))


def draw_panels(
    rows: Rows, panels: Sequence[Panel], title: str, columns: int = 0, predicted: str = "predicted"
) -> plt.Figure:
    """The panels of each source; what was measured begins a row, if not all stand in one.

    columns, predicted: as in `Study`.
    """
    found = {source: facets_of(rows.where(source=source), panels) for source in rows.sources()}
    count = max(len(several) for several in found.values())
    if not columns and count == 1:
        columns = len(found)
    elif not columns:
        columns = count if count < 7 else math.ceil(count / 2)
    drawn = [(source, panel) for source, several in found.items() for panel in several]
    columns = min(columns, len(drawn))  # a place that stays empty would shift the title
    size = (8, 6) if columns < 3 else (6.5, 5.5)
    figure, grid = look.panels(math.ceil(len(drawn) / columns), columns, *size)
    places = list(chain(*grid))
    for axes, (source, panel) in zip(places, drawn, strict=False):
        own = rows.where(source=source)
        stars = rows.where(source="paper") if source == "predicted" else Rows()
        panel.draw(axes, own, stars, predicted if stars else source)
        heading = title_of(panel.rows(own), predicted)
        axes.set_title("\n".join(filter(None, (panel.title, heading))))
    for axes in places[len(drawn) :]:
        axes.remove()
    figure.suptitle(title)
    return figure


def facets_of(rows: Rows, panels: Sequence[Panel]) -> list[Panel]:
    """What is drawn of the rows of one source: those of one model stand together."""
    found: dict[tuple, Panel] = {}
    for panel in panels:
        for facet in panel.facets(rows):
            # measured on the paper's own model, a panel for predictions and one for measurements
            # draw the same rows: once
            drawn = tuple(id(row) for row in facet.rows(rows))
            found.setdefault((facet.x, facet.y, drawn), facet)
    models = list(rows.by("model"))
    return sorted(found.values(), key=lambda each: models.index(each.where.get("model", models[0])))


def finish(
    path: Path,
    rows: Rows,
    draw: Callable[[Rows], plt.Figure],
    guesses: Iterable[str] = (),
    pictures: Sequence[str] = (".png",),
) -> None:
    """Write NAME.csv and the pictures, and say what was guessed: the end of every script."""
    for guess in guesses:
        print("\n" + textwrap.fill(f"A guess: {guess}", 100))
    for said in filter(None, map(knows_end, LOADED)):
        print(f"\n{said}")
    rows.write(path)
    look.use_style()
    # of the file: its numbers are rounded, and whoever draws them again gets the same picture
    for end in pictures:
        look.save_figure(draw(read_rows(path)), path.with_suffix(end))
    print(f"\nwrote {path.with_suffix('.csv')} and {', '.join(pictures)}")
    print_link(path.with_suffix(pictures[0]))


def title_of(rows: Rows, predicted: str = "predicted") -> str:
    """Source, model and hardware of rows of one source, as far as they are alike.

    predicted: the word for such rows.
    """
    first = rows[0]
    if first["source"] == "measured":
        return f"measured: {first['model']}\n{first['hardware']}"
    title = predicted
    for key, before in (("model", ": "), ("hardware", " on ")):
        names = list(rows.by(key))
        if len(names) == 1 and names[0] not in vars(ANY).values():
            title += before + names[0]
    return title


def guesses(sweeps: Iterable[Sweep]) -> list[str]:
    """The lines that say which engines borrow another GPU's constants."""
    costs = [getattr(engine, "cost_model", None) for sweep in sweeps for engine in sweep.on]
    found = dict.fromkeys(getattr(cost, "guess", "") for cost in costs)
    return [guess for guess in found if guess]
