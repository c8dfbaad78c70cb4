"""A picture as plain data, and as SVG for the page. It needs no package.

course/paint.py draws the same data with matplotlib. Lengths are in the units of a panel's axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from xml.sax.saxutils import escape

# colours of what is around a picture: in the dark, the other way round
INK = "ink"
PAPER = "paper"
BLUES = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594")  # ColorBrewer's


@dataclass(frozen=True)
class Bar:
    """A rectangle from its lower left corner; in a panel that goes down, its upper left one."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    label: str = ""  # in the legend


@dataclass(frozen=True)
class Line:
    points: Sequence[tuple[float, float]]
    colour: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """A cross of a size that no axis changes."""

    x: float
    y: float
    colour: str
    label: str = ""


@dataclass(frozen=True)
class Words:
    """A text, centred. Its lines are parted by line ends."""

    x: float
    y: float
    text: object
    colour: str = INK


@dataclass(frozen=True)
class Panel:
    """x, y: what is shown, (low, high). ticks: (place, name); None: round numbers, and whole ones
    alone if `whole`. down: y grows downwards."""

    shapes: Sequence[Bar | Line | Mark | Words]
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    title: str = ""
    x_ticks: Sequence[tuple[float, object]] | None = None
    y_ticks: Sequence[tuple[float, object]] | None = None
    down: bool = False
    whole: bool = False
    legend: Sequence[tuple[str, str]] = field(default=())  # (colour, words): beside the shapes'

    @property
    def ticks(self) -> list[Sequence[tuple[float, object]]]:
        """Of x, and of y."""
        pairs = ((self.x_ticks, self.x), (self.y_ticks, self.y))
        return [
            round_ticks(*ends, 1 if self.whole else 0) if own is None else own
            for own, ends in pairs
        ]

    @property
    def key(self) -> dict[str, tuple[str, bool | None]]:
        """Words of the legend -> colour, and whether its line is dashed; None: it is no line."""
        own = {
            shape.label: (shape.colour, getattr(shape, "dashed", None))
            for shape in self.shapes
            if getattr(shape, "label", "")
        }
        return own | {words: (colour, None) for colour, words in self.legend}


def alike(panels: Sequence[Panel]) -> list[Panel]:
    """The panels with one scale, so that they can be compared."""
    x = around([panel.x for panel in panels])
    y = around([panel.y for panel in panels])
    return [replace(panel, x=x, y=y) for panel in panels]


def around(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The smallest range that holds all of these, each (low, high)."""
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def round_ticks(low: float, high: float, least: float = 0.0) -> list[tuple[float, str]]:
    """Round numbers between two, some seven. least: from one to the next."""
    rough = max((high - low) / 7, least) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(each for each in (1, 2, 5, 10) if each * power >= rough * 0.9999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [(i * step, f"{i * step:g}") for i in range(first, last + 1)]


# of a panel in SVG, without what stands below
WIDE = 640
HIGH = 400
LEFT = 64
RIGHT = 14
TOP = 36
LETTER = 8.2  # mean width of a letter of 15


def svg(panel: Panel) -> str:
    """A panel as an SVG element. INK is the page's `currentColor`, PAPER its --paper."""
    x_ticks, y_ticks = panel.ticks
    longest = max((len(str(name)) for _, name in x_ticks), default=0)
    slanted = longest * LETTER > (WIDE - LEFT) / max(1, len(x_ticks))
    left = max(LEFT, 34 + LETTER * max((len(str(name)) for _, name in y_ticks), default=0))
    below = HIGH + (14 + 0.8 * longest * LETTER if slanted else 22)
    found = []

    def across(x: float) -> float:
        low, high = panel.x
        return left + (x - low) / (high - low) * (WIDE - left - RIGHT)

    def along(y: float) -> float:
        low, high = panel.y if panel.down else panel.y[::-1]
        return TOP + (y - low) / (high - low) * (HIGH - TOP)

    def text(x: float, y: float, words: object, more: str = 'text-anchor="middle"') -> None:
        rows = str(words).split("\n")
        for row, each in enumerate(rows):
            place = y + 5 + 16 * (row - (len(rows) - 1) / 2)
            found.append(f'<text x="{x:.1f}" y="{place:.1f}" {more}>{escape(each)}</text>')

    def line(a: float, b: float, c: float, d: float, more: str) -> None:
        found.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" {more}/>')

    thin = 'stroke="currentColor" stroke-opacity=".25"'
    for place, name in y_ticks:
        line(left, along(place), WIDE - RIGHT, along(place), thin)
        text(left - 8, along(place), name, 'text-anchor="end"')
    for place, name in x_ticks:
        x = across(place)
        if slanted:
            turned = f'text-anchor="end" transform="rotate(-55 {x:.1f} {HIGH + 12})"'
            text(x, HIGH + 12, name, turned)
        else:
            text(x, HIGH + 14, name)
    for shape in panel.shapes:
        ink = colour(shape.colour)
        if isinstance(shape, Bar):
            x, y = sorted((across(shape.x), across(shape.x + shape.width)))
            top, bottom = sorted((along(shape.y), along(shape.y + shape.height)))
            found.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{y - x:.1f}" height="{bottom - top:.1f}"'
                f' fill="{ink}" stroke="{colour(PAPER)}"/>'
            )
        elif isinstance(shape, Line):
            points = " ".join(f"{across(x):.1f},{along(y):.1f}" for x, y in shape.points)
            found.append(f'<polyline points="{points}" fill="none" {stroke(ink, shape.dashed)}/>')
        elif isinstance(shape, Words):
            text(across(shape.x), along(shape.y), shape.text, f'fill="{ink}" text-anchor="middle"')
        else:
            x = across(shape.x)
            y = along(shape.y)
            for turn in (6, -6):
                line(x - 6, y - turn, x + 6, y + turn, f'stroke="{ink}" stroke-width="4"')
    line(left, HIGH, WIDE - RIGHT, HIGH, 'stroke="currentColor"')
    line(left, TOP, left, HIGH, 'stroke="currentColor"')
    text(WIDE / 2, 14, panel.title, 'text-anchor="middle" font-weight="600"')
    middle = (TOP + HIGH) / 2
    text(14, middle, panel.y_label, f'text-anchor="middle" transform="rotate(-90 14 {middle})"')
    rows = panel.x_label.split("\n")
    below += 16 * len(rows) + 4
    text(WIDE / 2, below - 8 * len(rows), panel.x_label)
    x = float(LEFT)
    below = below + 16
    for words, (ink, dashed) in panel.key.items():
        width = 30 + LETTER * len(words)
        if x + width > WIDE and x > LEFT:
            x = float(LEFT)
            below = below + 22
        if dashed is None:
            found.append(
                f'<rect x="{x:.1f}" y="{below - 6:.1f}" width="14" height="12"'
                f' fill="{colour(ink)}" stroke="currentColor" stroke-opacity=".4"/>'
            )
        else:
            line(x + 2, below, x + 17, below, stroke(colour(ink), dashed))
        text(x + 20, below, words, "")
        x += width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {below + 14:.0f}" role="img"'
        f' aria-label="{escape(panel.title, {chr(34): "&quot;"})}" font-family="system-ui,'
        ' sans-serif" font-size="15" fill="currentColor">' + "".join(found) + "</svg>"
    )


def stroke(ink: str, dashed: bool) -> str:
    dashes = ' stroke-dasharray="7 5"' if dashed else ""
    return f'stroke="{ink}" stroke-width="2"{dashes}'


def colour(name: str) -> str:
    return {INK: "currentColor", PAPER: "var(--paper, #fff)"}.get(name, name)
