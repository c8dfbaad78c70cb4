"""A picture of rows, said in a few words: what stands over what."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import matplotlib.pyplot as plt
import numpy as np

from command.checks import UserError
from experiments.lib import look
from experiments.lib.colours import MARKERS
from experiments.lib.common import longest_word, three_digits, wrap
from experiments.lib.papers import looks_of
from experiments.lib.rows import WHERE, Row, Rows, cell, several

AXES = {  # key: its label
    "B": "batch size B",
    "BS": "prompts in the batch, BS",
    "C": "chunk size C",
    "L": "length L (tokens)",
    "PD": "P:D (prompt tokens per decode)",
    "rate": "requests per second",
    "tokens": "tokens in the batch",
}
MANY = 50  # points of a line that has no markers
NUMBERED = 12  # bars that have room for their numbers
PATTERNS = ("", "//", "..", "\\\\", "xx", "--")
DASHES = ("-", "--", ":", "-.")
Names = str | tuple[str, ...]  # one or several
Series = dict[tuple[str, ...], Rows]  # by quantity, and what the rows say of Panel.line
Styles = Mapping[tuple[str, ...], Mapping[str, str]]  # colour and label of each of these


@dataclass(frozen=True)
class Panel:
    """Quantities y over a key x: a line, or bars, for each of the quantities and values of `line`.

        Panel("B", "speedup", "L")                      over B, a line for each L
        Panel("B", "speedup", "L", facet="model")       ... and a panel for each model
        Panel(("model", "L"), "speedup", kind="bars")   a bar for each model and L

    kind: "lines"; or with a place for each value of x, "bars" side by side or "stacks" of bars.
    facet: each of its values has a panel of its own. where: of which rows. Policies and operators
    have their colours; so has a quantity or a value that `colours` names. hatches: of bars, by
    colour; those of one colour have different ones. log: "x", "y" or "xy".
    rule: a horizontal line: at a number, or at that quantity of the rows that have no x. show: what
    `axes.set` takes, such as {"xlabel": "requests"}. also(axes, rows drawn): draws more. Published
    numbers of the same columns are stars (star: what their x is called, if not x); without x, they
    are horizontal lines.

    A column that no row has is refused; of `line`, one that is there is enough.
    """

    x: Names
    y: Names
    line: Names = ()
    kind: str = "lines"
    facet: Names = ()
    where: Mapping[str, object] = field(default_factory=dict)
    title: str = ""
    rule: float | str | None = None
    log: str = ""
    star: str = ""
    colours: Mapping[str, str] = field(default_factory=dict)
    hatches: Mapping[str, str] = field(default_factory=lambda: look.HATCHES)
    show: Mapping[str, object] = field(default_factory=dict)
    also: Callable[[plt.Axes, Rows], None] = lambda axes, rows: None

    def facets(self, rows: Rows) -> "list[Panel]":
        """A panel for each value of `facet`; none where there is nothing to draw."""
        keys = several(self.facet)
        drawn = self.rows(rows)
        drawn.check(*keys)
        found: dict[tuple, Panel] = {}
        for row in drawn:
            case = {key: row.get(key) for key in keys}
            place = tuple(case.values())
            if place not in found:
                told = [key for key in keys if key not in WHERE]  # the picture's title has those
                title = ", ".join(filter(None, (self.title, *words(row, tuple(told)))))
                found[place] = replace(self, facet=(), where={**self.where, **case}, title=title)
        nameless = found.get((None,))
        if nameless and len(found) > 1:  # beside panels that are named
            found[(None,)] = replace(nameless, title="all")
        return list(found.values())

    def series(self, rows: Rows, x: Names = ()) -> Series:
        """What is drawn over x. Ours may lack some of `line`, but not all."""
        keys = several(self.line)
        found: Series = {}
        for y in several(self.y):
            rows.check(y)
            if not rows.known(y):
                continue  # it has a unit, and nobody measured it
            if not any(rows.known(key) for key in keys):
                rows.check(*keys)
            for row in rows.where(*several(x or self.x), y, **self.where):
                said = words(row, keys)
                if said or not keys or row["source"] == "paper":
                    found.setdefault((y, *said), rows.part(())).append(row)
        return found

    def rows(self, rows: Rows) -> Rows:
        """Those that are drawn."""
        found = rows.part(())
        for own in self.series(rows).values():
            found += own
        return found

    def draw(self, axes: plt.Axes, rows: Rows, stars: Rows, word: str) -> None:
        """rows: of one source; stars: published ones. word: for a line without a key."""
        series = self.series(rows)
        drawn = self.rows(rows)
        styles = self.styles(series, word)
        if self.kind == "lines":
            self.draw_lines(axes, series, styles)
            self.draw_stars(axes, series, stars, styles)
        else:
            self.draw_bars(axes, series, stars, styles)
        if self.series(stars, self.star or self.x):
            axes.plot([], [], **look.STAR, label="paper")
        for number, (label, y) in enumerate(self.levels(rows, stars).items()):
            dash = DASHES[number % len(DASHES)]
            axes.axhline(y, label=label, linestyle=dash, linewidth=1.2, color="black")
        if "x" in self.log:
            look.log_axis(axes, "x", drawn.column(self.x))
        if "y" in self.log:
            look.log_axis(axes, "y")
        units = dict.fromkeys(rows.units.get(name[0], "") for name in series)
        labels = {
            "xlabel": axis_label(rows, self.x) if isinstance(self.x, str) else "",
            "ylabel": axis_label(rows, self.y) if isinstance(self.y, str) else ", ".join(units),
        }
        axes.set(**labels | self.show)
        self.also(axes, drawn)
        self.add_legend(axes)

    def styles(self, series: Series, word: str) -> dict[tuple[str, ...], dict[str, str]]:
        """Colour and label of each line. The quantity is told where there are several."""
        found = {}
        for name, colour in colours_of(series, self.colours).items():
            told = name[1:] if isinstance(self.y, str) else name
            found[name] = {"color": colour, "label": ", ".join(told) or word}
            if isinstance(self.y, str) and self.x == self.line:
                found[name]["label"] = "_"  # its name stands below the bar, and needs no legend
        return found

    def add_legend(self, axes: plt.Axes) -> None:
        """Where anything has a label. Bars have it above them."""
        labels = axes.get_legend_handles_labels()[1]
        style: dict[str, object] = {}
        if len(labels) > 4:
            style["fontsize"] = 11
        if self.kind != "lines":
            columns = 2 if max(map(len, labels), default=0) > 15 else 3
            style["loc"] = "upper center"
            style["ncols"] = columns
            axes.margins(y=0.14 + 0.12 * math.ceil(len(labels) / columns))  # the legend's room
        if labels:
            axes.legend(**style)

    def draw_lines(self, axes: plt.Axes, series: Series, styles: Styles) -> None:
        looks: list[str] = []  # colours of the lines before this one
        drawn = []
        for name, own in series.items():
            own = sorted(own, key=lambda row: row[self.x])
            at = {row[self.x] for row in own}
            engines = {tuple(row[key] for key in (self.x, *WHERE)) for row in own}
            if len(engines) > len(at):  # the line would run up and down between two
                raise UserError(
                    f"rows of several models or GPUs have the same {self.x}: name in Panel's `line`"
                    " what tells them apart, such as model"
                )
            colour = styles[name]["color"]
            places = [row[self.x] for row in own]
            heights = [row[name[0]] for row in own]
            # the dashes of a line upon another show both
            alike = looks.count(colour) + drawn.count((places, heights))
            looks.append(colour)
            drawn.append((places, heights))
            dash = DASHES[alike % len(DASHES)]
            marker = MARKERS.get(colour, "o") if len(own) < MANY else ""
            axes.plot(places, heights, linestyle=dash, marker=marker, **styles[name])
            look.shade_rows(axes, own, self.x, name[0], colour)
        places = {row[self.x] for own in series.values() for row in own}
        if len(places) <= 10:
            axes.set_xticks(sorted(places))

    def draw_stars(self, axes: plt.Axes, series: Series, stars: Rows, styles: Styles) -> None:
        """Published numbers, each in the colour of its line; white, where there is one line.

        Where no line is ours, they have colours and labels of their own.
        """
        x = self.star or self.x
        published = self.series(stars, x)
        colours = colours_of(published, self.colours)
        for name, own in published.items():
            style = dict(look.STAR)
            if not series:
                style["color"] = colours[name]
                style["label"] = ", ".join(name[1:])
            elif name in styles and len(series) > 1:
                style["color"] = styles[name]["color"]
            axes.plot(own.column(x), own.column(name[0]), **style)

    def draw_bars(self, axes: plt.Axes, series: Series, stars: Rows, styles: Styles) -> None:
        """Beside each other, or as parts of one bar, from the floor up."""
        published = self.series(stars)
        known = dict.fromkeys(self.place(row) for own in series.values() for row in own)
        places = list(known)
        groups = [[name] for name in series] if self.kind == "bars" else [list(series)]
        width = min(0.7, 0.84 / len(groups))
        colours: list[str] = []  # of the parts that are drawn
        for number, parts in enumerate(groups):
            at = np.arange(len(places)) + width * (number - (len(groups) - 1) / 2)
            tops = np.zeros(len(places))
            stated = np.zeros(len(places))
            empty = np.ones(len(places), bool)
            for name in parts:
                heights = self.heights(series[name], name[0], places)
                there = ~np.isnan(heights)
                colour = styles[name]["color"]
                own = self.hatches.get(colour, "")
                hatches = [own, *(each for each in PATTERNS if each != own)]
                hatch = hatches[colours.count(colour) % len(PATTERNS)]
                style = {"edgecolor": "black", "hatch": hatch, **styles[name]}
                axes.bar(at[there], heights[there], width, tops[there], **style)
                colours.append(colour)
                tops += np.nan_to_num(heights)
                empty &= ~there
                stated += self.heights(published.get(name, ()), name[0], places)
            axes.plot(at, stated, **look.STAR)
            same = len(parts) > 1 and np.allclose(tops, tops[0], rtol=0.01)  # all parts, in %
            if len(groups) * len(places) <= NUMBERED and not same:
                size = 11 if len(groups) < 3 else 9
                tops[empty] = np.nan
                write_heights(axes, at, tops, below=bool(published), size=size)
        name_places(axes, places)

    def heights(self, rows: Iterable[Row], quantity: str, places: list[str]) -> np.ndarray:
        """At each place; nan where there is none."""
        found = {self.place(row): row[quantity] for row in rows}
        return np.array([found.get(place, np.nan) for place in places])

    def place(self, row: Row) -> str:
        """What stands below a bar."""
        return str(row[self.x]) if isinstance(self.x, str) else "\n".join(words(row, self.x))

    def levels(self, rows: Rows, stars: Rows) -> dict[str, float]:
        """Horizontal lines by their labels: the rule, and what is published without x."""
        found: dict[str, float] = {}
        if isinstance(self.rule, int | float):
            found[""] = self.rule
        name = "" if self.rule == self.y else self.rule
        allowed = {key: several(value) + (None,) for key, value in self.where.items()}
        for before, own, quantity in (("paper:", stars, self.y), (name, rows, self.rule)):
            if not isinstance(quantity, str):
                continue
            for row in own.where(quantity, **allowed):
                if not any(key in row for key in several(self.star or self.x)):
                    keys = [key for key in own.case(row) if key not in self.where]
                    said = [before, *words(row, tuple(keys)), three_digits(row[quantity])]
                    found[" ".join(said).lstrip()] = row[quantity]
        return found


def name_places(axes: plt.Axes, places: list[str]) -> None:
    """What stands below the bars: level where it fits, else slanted."""
    room = int(12 * axes.bbox.width / axes.figure.dpi / len(places)) - 1  # letters
    style: dict[str, object] = {"fontsize": 12}
    texts = []
    spaced = [place.replace("_", "_ ") for place in places]  # a long name breaks there, too
    if max(map(longest_word, spaced)) <= room:
        for place in spaced:
            lines = [wrap(line, room) for line in place.split("\n")]
            texts.append("\n".join(chain(*lines)).replace("_ ", "_"))
    else:
        texts = [place.replace("\n", ", ") for place in places]
        style |= {"ha": "right", "rotation": 60, "rotation_mode": "anchor"}
    axes.set_xticks(range(len(places)), texts, **style)
    middle = (len(places) - 1) / 2
    half = max(len(places), 2) / 2 + 0.1
    axes.set_xlim(middle - half, middle + half)
    axes.grid(axis="x", visible=False)


def write_heights(axes: plt.Axes, at: np.ndarray, tops: np.ndarray, below: bool, size: int) -> None:
    """Above each bar; below: at its foot, where no star hides it."""
    style = {"ha": "center", "fontsize": size}
    known = ~np.isnan(tops)
    whole = (tops[known] == tops[known].round()).all()  # counts
    for x, y in zip(at[known], tops[known], strict=True):
        text = f"{y:.0f}" if whole else three_digits(y)
        if below:
            box = {"color": "white", "alpha": 0.7, "pad": 1}
            foot = axes.get_xaxis_transform()
            axes.text(x, 0.02, text, transform=foot, bbox=box, zorder=6, **style)
        else:
            axes.annotate(text, (x, y), (0, 3), textcoords="offset points", **style)


def axis_label(rows: Rows, name: str) -> str:
    """A column as an axis calls it, with its unit."""
    unit = rows.units.get(name)
    label = AXES.get(name, name)
    return f"{label} ({unit})" if unit else label


def words(row: Row, keys: Names) -> tuple[str, ...]:
    """What a row says of those keys that it has: "sarathi", "C = 256"."""
    found = []
    for key in several(keys):
        value = row.get(key)
        if value is not None:
            found.append(value if isinstance(value, str) else f"{key} = {cell(value)}")
    return tuple(found)


def colours_of(series: Series, given: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """The colour of each line by its name: the first word of it that has one decides.

    Operators and policies have their colours, and so has what is given, unless a policy of the
    picture has that colour. All other lines take what is left, one after the other.
    """
    policies: dict[str, None] = {}  # in order of appearance
    for own in series.values():
        policies |= dict.fromkeys(own.column("policy"))
    known = {name: colour for name, (colour, _) in look.OPERATOR_LOOKS.items()}
    taken = []
    for name, (colour, _) in looks_of(policies).items():
        known[name] = colour
        taken.append(colour)
    for name, colour in given.items():
        if colour not in taken:
            known[name] = colour
    found = dict.fromkeys(series, "")
    for name in series:
        for word in name:
            if word in known and not found[name]:
                found[name] = known[word]
    spare = [colour for colour, _ in look.SERIES if colour not in found.values()]
    unknown = [name for name in series if not found[name]]
    for number, name in enumerate(unknown):
        found[name] = spare[number % len(spare)]
    return found
