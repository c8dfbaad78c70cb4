"""The lessons' "what if" in a browser: their own code computes, and pictures are SVG.

`excerpt` takes from a lesson what its `what_if` needs. `in_browser` runs that. There is neither
matplotlib nor numpy in the page: `Axes` takes the few calls that these cells make, and `NAMES` has
three functions of numpy. If you do not use the page, skip this file: the same cells run in
Jupyter.
"""

import ast
import dis
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from inspect import signature
from statistics import median
from types import CodeType, SimpleNamespace

from command.checks import UserError
from course.sketch import INK, Bar, Line, Panel, svg
from experiments.lib.colours import COLOURS, SERIES, bars
from experiments.lib.colours import LOOKS as POLICY_LOOKS
from more.pictures.lanes import request_lanes
from more.pictures.looks import LOOKS
from more.serving.search import percentile
from timeline import Trace

DRAWN = ("lesson", "matplotlib", "numpy")  # modules that this file stands in for

# ------------------------------------------------------------------------- what a what_if needs


def excerpt(cells: Iterable[str]) -> str:
    """The definitions that a lesson's `sliders(what_if, ...)` needs, and this call.

    cells: the code of the lesson, in order. Each name has its last definition before the call.
    """
    body = [node for cell in cells for node in ast.parse(cell).body]
    last = next(i for i, node in enumerate(body) if ast.unparse(node).startswith("sliders("))
    needed = names_of(body[last], "LOAD_NAME", "LOAD_GLOBAL")
    kept = [body[last]]
    for node in reversed(body[:last]):
        if not isinstance(node, ast.Assign | ast.FunctionDef | ast.Import | ast.ImportFrom):
            continue
        if not (stored := names_of(node, "STORE_NAME") & needed):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or node.names[0].name
            if module.split(".")[0] in DRAWN:
                continue
            node.names = [name for name in node.names if (name.asname or name.name) in needed]
        needed = (needed - stored) | names_of(node, "LOAD_NAME", "LOAD_GLOBAL")
        kept.insert(0, node)
    return "\n".join(map(ast.unparse, kept))


def names_of(node: ast.stmt, *operations: str) -> set[str]:
    """The global names that a statement, or a function in it, loads or stores."""
    codes: list[CodeType] = [compile(ast.Module([node], []), "lesson", "exec")]
    found = set()
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        found |= {each.argval for each in dis.get_instructions(code) if each.opname in operations}
    return found


# -------------------------------------------------------------------------------------- pictures


class Axes:
    """Bars or lines. Its methods are matplotlib's, as far as the lessons call them."""

    def __init__(self) -> None:
        self.words: dict[str, object] = {}
        self.bars: list[Bar] = []
        self.lines: list[Line] = []
        self.places: list[str] = []  # of bars, from left to right
        self.rules: list[tuple[str, float, str]] = []  # "x" or "y", where, label
        self.xaxis = self.yaxis = None

    def bar(
        self,
        places: str | Sequence[str],
        heights: float | Sequence[float],
        width: float = 0.6,
        bottom: float | Sequence[float] = 0.0,
        color: str = INK,
        label: str = "",
        **style: object,
    ) -> None:
        if isinstance(places, str):
            places = [places]
            heights = [heights]
            bottom = [bottom]
        self.places += [place for place in places if place not in self.places]
        for place, height, low in zip(places, heights, bottom, strict=True):
            x = self.places.index(place) - width / 2
            self.bars.append(Bar(x, low, width, height, color, label))

    def plot(
        self,
        xs: Iterable[float],
        ys: Iterable[float],
        color: str = INK,
        label: str = "",
        marker: str = "",
    ) -> None:
        self.lines.append(Line([*zip(xs, ys, strict=True)], color, label))

    def axvline(self, x: float, label: str = "", **style: object) -> None:
        self.rules.append(("x", x, label))

    def axhline(self, y: float, label: str = "", **style: object) -> None:
        self.rules.append(("y", y, label))

    def set(self, **words: object) -> None:
        self.words |= words

    def set_title(self, title: str) -> None:
        self.set(title=title)

    def set_ylabel(self, label: str) -> None:
        self.set(ylabel=label)

    def legend(self, **style: object) -> None:
        pass  # a picture here always has one

    def panel(self) -> Panel:
        """What is drawn. A logarithmic axis has the exponents of its numbers, and their names."""
        told = {"title": "", "xlabel": "", "ylabel": ""} | self.words
        names = {"title": told["title"], "x_label": told["xlabel"], "y_label": told["ylabel"]}
        if self.bars:
            top = 1.05 * max(bar.y + bar.height for bar in self.bars)
            ticks = [*enumerate(self.places)]
            return Panel(self.bars, (-0.5, len(ticks) - 0.5), (0, top), **names, x_ticks=ticks)
        logs = {axis: told.get(f"{axis}scale") == "log" for axis in "xy"}
        x, y = (self.range(axis, logs[axis]) for axis in "xy")
        shapes = []
        for line in self.lines:
            points = [(exponent(a, logs["x"]), exponent(b, logs["y"])) for a, b in line.points]
            shapes.append(replace(line, points=points))
        for number, (axis, where, label) in enumerate(self.rules):
            at = exponent(where, logs[axis])
            ends = [(at, y[0]), (at, y[1])] if axis == "x" else [(x[0], at), (x[1], at)]
            shapes.append(Line(ends, (INK, "#808080")[number % 2], label, dashed=True))
        x_ticks = [(place, f"{place:g}") for place in told["xticks"]] if "xticks" in told else None
        return Panel(
            shapes,
            x,
            y,
            **names,
            x_ticks=decades(*x) if logs["x"] else x_ticks,
            y_ticks=decades(*y) if logs["y"] else None,
        )

    def range(self, axis: str, log: bool) -> tuple[float, float]:
        """What an axis shows: what it was told, or all that is drawn."""
        limits = self.words.get(f"{axis}lim")
        if isinstance(limits, tuple):
            return limits
        found = [where for name, where, _ in self.rules if name == axis]
        found += [point[axis == "y"] for line in self.lines for point in line.points]
        found = [exponent(value, log) for value in found] + ([0.0] if limits == 0 else [])
        more = 0.05 * (max(found) - min(found)) or 1.0
        return min(found) - (more if limits is None else 0), max(found) + more


def exponent(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def decades(low: float, high: float) -> list[tuple[float, str]]:
    """1, 2, 5, 10, ... between two powers of ten."""
    tens = [10.0**power for power in range(math.floor(low), math.ceil(high))]
    numbers = [ten * part for ten in tens for part in (1, 2, 5)]
    return [(math.log10(each), f"{each:g}") for each in numbers if low <= math.log10(each) <= high]


def gantts(traces: Mapping[str, Trace], bound: float, names: Mapping[int, str], title: str) -> None:
    """Requests over time, as notebooks/lesson.py draws them."""
    for run, trace in traces.items():
        lanes = request_lanes(trace, bound, names)
        bars = []
        for number, lane in enumerate(lanes.values()):
            for bar in lane:
                look = LOOKS[bar.kind]
                # a mark, too, can be seen
                width = max(bar.end - bar.start, 0.003 * trace.seconds)
                height = max(look.high - look.low, 0.1)
                colour = look.colour if look.colour != COLOURS["black"] else INK
                top = number + 1 - look.high
                bars.append(Bar(bar.start, top, width, height, colour, look.meaning))
        places = [(number + 0.5, name) for number, name in enumerate(lanes)]
        ends = (0.0, max(bar.x + bar.width for bar in bars))
        SHOWN.append(
            Panel(
                bars,
                ends,
                (0, len(lanes)),
                "time (s)",
                "",
                f"{run}: {title}",
                y_ticks=places,
                down=True,
            )
        )


# -------------------------------------------------------------------- the names that a cell knows


class Rows(list):
    """numpy's `rows[:, column]`."""

    def __getitem__(self, place: object) -> object:
        if isinstance(place, tuple):
            return [row[place[1]] for row in self]
        return super().__getitem__(place)


SHOWN: list[Axes | Panel] = []  # the pictures of this run


def subplots(rows: int = 1, columns: int = 1, **style: object) -> tuple[SimpleNamespace, object]:
    """A figure and its axes, as matplotlib gives them."""
    panels = [Axes() for _ in range(rows * columns)]
    SHOWN.extend(panels)
    figure = SimpleNamespace(suptitle=panels[0].set_title)
    return figure, panels[0] if len(panels) == 1 else panels


NAMES = {
    "plt": SimpleNamespace(subplots=subplots, show=lambda: None),
    "np": SimpleNamespace(percentile=percentile, median=median, array=Rows),
    "bars": bars,
    "gantts": gantts,
    "plain_ticks": lambda *_: None,
    "COLOURS": COLOURS,
    "SERIES": SERIES,
    "POLICY_LOOKS": POLICY_LOOKS,
}


# ---------------------------------------------------------------------------- the page's questions


@cache
def loaded(lesson: str) -> tuple[Callable[..., None], dict[str, tuple | list]]:
    """Run a lesson's excerpt. Returns its `what_if`, and what may be chosen for each argument."""
    found = []
    names = NAMES | {"sliders": lambda show, **choices: found.append((show, choices))}
    exec(compile(lesson, "lesson", "exec"), names)  # noqa: S102  (our own lesson)
    return found[0]


def controls(lesson: str) -> list[dict]:
    """What a reader may choose: sliders, and lists of labels."""
    show, choices = loaded(lesson)
    found = []
    for name, choice in choices.items():
        start = signature(show).parameters[name].default
        if isinstance(choice, tuple):
            least, most, step = (*choice, 1)[:3]
            found.append({"name": name, "min": least, "max": most, "step": step, "value": start})
        else:
            labels, values = zip(*map(labelled, choice), strict=True)
            found.append({"name": name, "labels": labels, "value": values.index(start)})
    return found


def labelled(choice: object) -> tuple[str, object]:
    """An entry of a list: its label and its value, as ipywidgets takes them."""
    return choice if isinstance(choice, tuple) else (str(choice), choice)


def run(lesson: str, chosen: Mapping[str, float]) -> dict:
    """What `what_if` prints and draws. chosen: a number, or of a list the place in it."""
    show, choices = loaded(lesson)
    values = {
        name: labelled(choices[name][value])[1] if isinstance(choices[name], list) else value
        for name, value in chosen.items()
    }
    SHOWN.clear()
    with redirect_stdout(printed := io.StringIO()):
        show(**values)
    panels = [each.panel() if isinstance(each, Axes) else each for each in SHOWN]
    return {"text": printed.getvalue(), "pictures": [*map(svg, panels)]}


def in_browser(question: str, tell: object = None) -> str:
    """What the page's worker asks (more/web/static/python_worker.js), and its answer, as JSON.

    {"lesson": an excerpt} gives its controls; with "chosen", what `run` gives. A user's mistake
    gives {"error": one sentence}.
    """
    asked = json.loads(question)
    try:
        if "chosen" in asked:
            return json.dumps(run(asked["lesson"], asked["chosen"]))
        return json.dumps({"controls": controls(asked["lesson"])})
    except UserError as error:
        return json.dumps({"error": str(error)})
