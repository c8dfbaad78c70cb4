"""A picture of rows, said in a few words: what stands over what."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import matplotlib.pyplot as plt
import numpy as np

from command.checks import UserError
from experiments.lib import look
from experiments.lib.colours import MARKERS
from experiments.lib.common import longest_word, three_digits, wrap
from experiments.lib.papers import looks_of
from experiments.lib.rows import WHERE, Row, Rows, cell

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


@dataclass(frozen=True)
class Panel:
    """Quantities y over a key x: a line, or bars, for each of the quantities and values of `line`.

    kind: "lines"; or with a place for each value of x, "bars" side by side or "stacks" of bars.
    facet: each of its values has a panel of its own. where: of which rows. Policies and operators
    have their colours; so has a quantity or a value that `colours` names. hatches: of bars, by
    colour; those of one colour have different ones. log: "x", "y" or "xy".
    rule: a horizontal line: at a number, or at that quantity of the rows that have no x. show: what
    `axes.set` takes. also(axes, rows drawn): draws more. Published numbers of the same columns are
    stars (star: what their x is called, if not x); without x, they are horizontal lines.
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
        found = {}
        for row in self.rows(rows):
            case = {key: row.get(key) for key in several(self.facet)}
            said = words(row, tuple(key for key in case if key not in WHERE))  # its title has those
            title = ", ".join(filter(None, (self.title, *said)))
            one = replace(self, facet=(), where={**self.where, **case}, title=title)
            found.setdefault(tuple(case.values()), one)
        if len(found) > 1 and (None,) in found:  # beside panels that are named
            found[None,] = replace(found[None,], title="all")
        return list(found.values())

    def series(self, rows: Rows, x: Names = ()) -> Series:
        """What is drawn over x. Ours may lack some of `line`, but not all."""
        found: Series = {}
        for y in several(self.y):
            for row in rows.where(*several(x or self.x), y, **self.where):
                if words(row, self.line) or not self.line or row["source"] == "paper":
                    name = y, *words(row, self.line)
                    found.setdefault(name, Rows((), rows.units)).append(row)
        return found

    def rows(self, rows: Rows) -> Rows:
        return Rows((row for own in self.series(rows).values() for row in own), rows.units)

    def draw(self, axes: plt.Axes, rows: Rows, stars: Rows, word: str) -> None:
        """rows: of one source; stars: published ones. word: for a line without a key."""
        series = self.series(rows)
        one = isinstance(self.y, str)
        styles = {
            name: {"color": colour, "label": ", ".join(name[one:]) or word}
            for name, colour in colours_of(series, self.colours).items()
        }
        if one and self.x == self.line:  # its names stand below the bars, and need no legend
            styles = {name: style | {"label": "_"} for name, style in styles.items()}
        draw = self.draw_lines if self.kind == "lines" else self.draw_bars
        draw(axes, series, stars, styles)
        if self.series(stars, self.star or self.x):
            axes.plot([], [], **look.STAR, label="paper")
        for number, (label, y) in enumerate(self.levels(rows, stars).items()):
            style = {"linestyle": DASHES[number % len(DASHES)], "linewidth": 1.2, "color": "black"}
            axes.axhline(y, label=label, **style)
        for axis in self.log:
            look.log_axis(axes, axis, self.rows(rows).column(self.x) if axis == "x" else ())
        units = ", ".join(dict.fromkeys(rows.units.get(name[0], "") for name in series))
        y = axis_label(rows, self.y) if one else units
        x = axis_label(rows, self.x) if isinstance(self.x, str) else ""
        axes.set(**{"xlabel": x, "ylabel": y} | self.show)
        self.also(axes, self.rows(rows))
        labels = axes.get_legend_handles_labels()[1]
        style = {"fontsize": 11} if len(labels) > 4 else {}
        if self.kind != "lines":
            columns = 2 if max(map(len, labels), default=0) > 15 else 3
            style |= {"loc": "upper center", "ncols": columns}
            axes.margins(y=0.14 + 0.12 * math.ceil(len(labels) / columns))  # the legend's room
        if labels:
            axes.legend(**style)

    def draw_lines(self, axes: plt.Axes, series: Series, stars: Rows, styles: dict) -> None:
        colours = [style["color"] for style in styles.values()]
        drawn = []
        for number, (name, own) in enumerate(series.items()):
            own = sorted(own, key=lambda row: row[self.x])
            at, heights = ([row[column] for row in own] for column in (self.x, name[0]))
            engines = {(row[self.x], *(row[key] for key in WHERE)) for row in own}
            if len(engines) > len(set(at)):
                raise UserError(
                    f"rows of several models or GPUs have the same {self.x}: name in Panel's `line`"
                    " what tells them apart, such as model"
                )
            alike = colours[:number].count(colours[number]) + drawn.count((at, heights))
            drawn.append((at, heights))  # the dashes of a line upon another show both
            dash = DASHES[alike % len(DASHES)]
            marker = MARKERS.get(colours[number], "o") if len(own) < MANY else ""
            axes.plot(at, heights, linestyle=dash, marker=marker, **styles[name])
            look.shade_rows(axes, own, self.x, name[0], colours[number])
        places = sorted({row[self.x] for own in series.values() for row in own})
        if len(places) <= 10:
            axes.set_xticks(places)
        published = self.series(stars, self.star or self.x)
        known = colours_of(published, self.colours) if not series else {}
        for name, own in published.items():
            colour = styles[name]["color"] if name in styles and len(series) > 1 else "white"
            at = own.column(self.star or self.x), own.column(name[0])
            label = ", ".join(name[1:]) if known else None
            axes.plot(*at, **look.STAR | {"color": known.get(name, colour), "label": label})

    def draw_bars(self, axes: plt.Axes, series: Series, stars: Rows, styles: dict) -> None:
        """Beside each other, or as parts of one bar, from the floor up."""
        published = self.series(stars)
        colours = []
        places = list(dict.fromkeys(self.place(row) for own in series.values() for row in own))
        bars = [[name] for name in series] if self.kind == "bars" else [list(series)]
        width = min(0.7, 0.84 / len(bars))
        for number, parts in enumerate(bars):
            at = np.arange(len(places)) + width * (number - (len(bars) - 1) / 2)
            tops = np.zeros(len(places))
            stated = np.zeros(len(places))
            empty = np.ones(len(places), bool)
            for name in parts:
                heights = self.heights(series[name], name[0], places)
                there = ~np.isnan(heights)
                style = styles[name] | {"edgecolor": "black"}
                hatch = self.hatches.get(style["color"], "")
                others = [each for each in PATTERNS if each != hatch]
                style["hatch"] = [hatch, *others][colours.count(style["color"]) % len(PATTERNS)]
                axes.bar(at[there], heights[there], width, tops[there], **style)
                colours.append(style["color"])
                tops += np.nan_to_num(heights)
                empty &= ~there
                stated += self.heights(published.get(name, ()), name[0], places)
            axes.plot(at, stated, **look.STAR)
            same = len(parts) > 1 and np.allclose(tops, tops[0], rtol=0.01)  # all parts, in %
            if len(bars) * len(places) <= NUMBERED and not same:
                size = 11 if len(bars) < 3 else 9
                tops[empty] = np.nan
                write_heights(axes, at, tops, below=bool(published), size=size)
        room = int(12 * axes.bbox.width / axes.figure.dpi / len(places)) - 1  # letters
        if max(map(longest_word, places)) <= room:
            lines = [
                [row for line in each.split("\n") for row in wrap(line, room)] for each in places
            ]
            axes.set_xticks(range(len(places)), map("\n".join, lines), fontsize=12)
        else:
            flat = [place.replace("\n", ", ") for place in places]
            style = {"ha": "right"}
            style |= {"rotation": 60, "rotation_mode": "anchor", "fontsize": 12}
            axes.set_xticks(range(len(places)), flat, **style)
        middle = (len(places) - 1) / 2
        half = max(len(places), 2) / 2 + 0.1
        axes.set_xlim(middle - half, middle + half)
        axes.grid(axis="x", visible=False)

    def heights(self, rows: Iterable[Row], quantity: str, places: list[str]) -> np.ndarray:
        """At each place; nan where there is none."""
        found = {self.place(row): row[quantity] for row in rows}
        return np.array([found.get(place, np.nan) for place in places])

    def place(self, row: Row) -> str:
        """What stands below a bar."""
        return str(row[self.x]) if isinstance(self.x, str) else "\n".join(words(row, self.x))

    def levels(self, rows: Rows, stars: Rows) -> dict[str, float]:
        """Horizontal lines by their labels."""
        where = {key: (*several(value), None) for key, value in self.where.items()}
        found = {"": self.rule} if isinstance(self.rule, int | float) else {}
        name = "" if self.rule == self.y else self.rule
        for before, each, quantity in (("paper:", stars, self.y), (name, rows, self.rule)):
            for row in each.where(quantity, **where) if isinstance(quantity, str) else ():
                if all(key not in row for key in several(self.star or self.x)):
                    keys = tuple(key for key in rows.case(row) if key not in self.where)
                    said = before, *words(row, keys), three_digits(row[quantity])
                    found[" ".join(said).lstrip()] = row[quantity]
        return found


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
    return f"{AXES.get(name, name)} ({rows.units.get(name, '')})".removesuffix(" ()")


def several(names: object) -> tuple:
    return names if isinstance(names, tuple) else (names,)


def words(row: Row, keys: Names) -> tuple[str, ...]:
    """What a row says of those keys that it has: "sarathi", "C = 256"."""
    own = {key: row[key] for key in several(keys) if row.get(key) is not None}
    return tuple(y if isinstance(y, str) else f"{key} = {cell(y)}" for key, y in own.items())


def colours_of(series: Series, given: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """Of a policy, an operator, or what is given and no policy has; all others as they come."""
    spoken = dict.fromkeys(
        row["policy"] for own in series.values() for row in own if "policy" in row
    )
    policies = {name: colour for name, (colour, _) in looks_of(spoken).items()}
    known = {name: colour for name, (colour, _) in look.OPERATOR_LOOKS.items()} | policies
    known |= {name: colour for name, colour in given.items() if colour not in policies.values()}
    own = {name: next((known[word] for word in name if word in known), "") for name in series}
    spare = [each for each, _ in look.SERIES if each not in own.values()]
    unknown = [name for name in series if not own[name]]
    return own | {name: spare[number % len(spare)] for number, name in enumerate(unknown)}
