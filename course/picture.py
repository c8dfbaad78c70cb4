"""An attempt as a picture, beside what it should be: panels as plain data (course/sketch.py).

One fixed case for each exercise.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace

from command.checks import UserError
from course import drive
from course.check import e02, e07
from course.exercises import UNWRITTEN, AnswerError, Ask, Exercise
from course.local import asker
from course.reference import solution, starts
from course.sketch import BLUES, INK, PAPER, Bar, Line, Mark, Panel, Words, alike
from experiments.lib.colours import COLOURS

HUES = [COLOURS[name] for name in ("orange", "blue", "green", "purple", "sky", "vermilion")]
TITLES = ("what it should be", "yours")


def workload(memory: bool) -> dict:
    """Four requests; with little memory, one of them is preempted."""
    requests = [[list(range(n)), most, [], 0.0] for n, most in ((20, 8), (44, 6), (9, 9), (30, 5))]
    return {"B": 3, "C": 16, "cache": 66 if memory else None, "requests": requests}


def batches(case: dict, answer: dict, _: bool) -> Panel:
    size = case["C"]
    shapes: list = []
    for place, row in enumerate(answer["rows"], 1):
        shapes += stack(row, place, size)
    shapes.sort(key=lambda shape: shape.label)  # of the legend: 0, 1, 2
    tall = max((bar.y + bar.height for bar in shapes if isinstance(bar, Bar)), default=0)
    marked = any(isinstance(shape, Mark) for shape in shapes)
    high = max(1.45 * size if marked else 1.2 * size, 1.1 * tall)  # above C, all is seen
    end = len(answer["rows"]) + 0.7
    line = Line([(0.3, size), (end, size)], "#808080", f"C = {size}", dashed=True)
    return Panel(
        [*shapes, line], (0.3, end), (0, high), "iteration", "rows of the batch", whole=True
    )


def stack(row: dict, place: int, size: int) -> list[Bar | Mark]:
    """A batch: its chunks, its decodes above them. What is odd is marked above C, the size."""
    shapes = []
    left = place - 0.4
    low = 0
    for i, _, length, _ in row.get("chunks", []):
        colour = HUES[i % len(HUES)]
        shapes.append(Bar(left, low, 0.8, length, colour, f"chunk of request {i}"))
        if length < 1:
            shapes.append(Mark(place, 1.3 * size, INK, "no tokens"))
        low += length
    count = len(row.get("decodes", []))
    if count:
        shapes.append(Bar(left, low, 0.8, count, INK, "decodes"))
    if row["preempted"]:
        shapes.append(Mark(place, 1.15 * size, COLOURS["vermilion"], "a request is preempted"))
    return shapes


def curve(case: dict, answer: list, mine: bool) -> Panel:
    truth = case["truth"]
    in_ms = lambda seconds: [(x, 1e3 * y) for x, y in zip(case["x"], seconds, strict=True)]
    drawn = [Line(in_ms(truth), "#808080", "what it should be", dashed=True)]
    if mine:
        drawn.append(Line(in_ms(answer), COLOURS["blue"], "yours"))
    high = 1.1e3 * max(*truth, *answer)
    return Panel(drawn, (0, case["x"][-1]), (0, high), case["x_label"], "ms")


def cells(grid: list[list[tuple[str, object]]], **options: object) -> Panel:
    """A table of (colour, words), its first row above. Words on dark blue are white."""
    shapes: list = []
    for y, row in enumerate(grid):
        for x, (hue, words) in enumerate(row):
            shapes.append(Bar(x - 0.5, y - 0.5, 1, 1, hue))
            if words != "":
                shapes.append(Words(x, y, words, ink_on(hue)))
    wide = len(grid[0]) if grid else 1
    high = len(grid) or 1
    return Panel(shapes, (-0.5, wide - 0.5), (-0.5, high - 0.5), down=True, **options)


def ink_on(hue: str) -> str:
    """The colour of words that can be read on this one."""
    if hue == PAPER:
        return INK
    return "#ffffff" if hue in BLUES[3:] else "#000000"


def numbered(count: int) -> list[tuple[float, object]]:
    return [(each, each) for each in range(count)]


def slots(case: dict, answer: dict, _: bool) -> Panel:
    steps = occupied(case, answer["said"])
    rows = zip(*steps, strict=True)  # of each slot, over the steps
    grid = [[slot_cell(tokens) for tokens in row] for row in rows]
    said = [" ".join(map(str, each[:2])) for each in case["operations"]]  # extend 0, not by 3
    return cells(
        grid,
        x_label="after",
        y_label="slot: tokens in it",
        x_ticks=list(enumerate(said)),
        y_ticks=numbered(case["slots"]),
    )


def slot_cell(tokens: int) -> tuple[str, object]:
    if tokens < 0:
        return PAPER, "free"
    return BLUES[min(tokens, 5)], tokens


SEEN = {  # is, should be: what a cell of a mask is called
    "00": ("not seen", PAPER),
    "11": ("seen", COLOURS["blue"]),
    "10": ("seen, but must not be", COLOURS["vermilion"]),
    "01": ("not seen, but must be", COLOURS["orange"]),
}


def masks(case: dict, answer: list, _: bool) -> Panel:
    whole = case["whole"]
    grid = []
    lines = []
    wrong_shape = ""  # the first one
    for (start, length), part in zip(case["chunks"], answer, strict=True):
        shape = [length, start + length]
        if part["shape"] != shape and not wrong_shape:
            wrong_shape = f"; shape {part['shape']}, not {shape}"
        for row in part["rows"]:
            is_seen = row.ljust(whole, "0")[:whole]  # "1110": of the columns
            should_be = ("1" * (len(grid) + 1)).ljust(whole, "0")[:whole]
            pairs = zip(is_seen, should_be, strict=True)
            grid.append([(SEEN[a + b][1], "") for a, b in pairs])
        below = len(grid) - 0.5
        lines.append(Line([(-0.5, below), (whole - 0.5, below)], INK))
    panel = cells(
        grid,
        x_label=f"key{wrong_shape}",
        y_label="prompt token; lines end chunks",
        legend=[(hue, words) for words, hue in SEEN.values()],
    )
    return replace(panel, shapes=[*panel.shapes, *lines])


def stages(case: dict, answer: dict, _: bool) -> Panel:
    shapes = []
    end = 0.0
    for number, (work, begun) in enumerate(zip(case["seconds"], answer["starts"], strict=True)):
        hue = HUES[number % case["micro_batches"]]
        for stage, (length, start) in enumerate(zip(work, begun, strict=True)):
            shapes.append(Bar(start, stage - 0.4, length, 0.8, hue))
            shapes.append(Words(start + length / 2, stage, number, "#000000"))
            end = max(end, start + length)
    causes = ("start-up", "bubble", "drain")
    idle = ", ".join(f"{name} {answer['idle'].get(name, 0):.3g}" for name in causes)
    count = len(case["seconds"][0])
    return Panel(
        shapes,
        (0, 1.02 * end),
        (-0.5, count - 0.5),
        f"time (s)\nidle: {idle}",
        "stage",
        y_ticks=numbered(count),
        down=True,
    )


def answers(exercise: Exercise, ask: Ask) -> tuple[Callable[..., Panel], dict, Callable]:
    """How to draw an exercise: the painter, the case, and how to get an answer to it.

    A painter takes a case, its answer, and whether the answer is the student's.
    """
    file = exercise.file
    if file in ("e06", "e08", "final"):
        return batches, workload(memory=file == "e08"), ask
    if file == "e01":
        shape = e07.shape()
        where = {"model": shape["model"], "gpu": shape["gpu"], "cached": 4096}
        case = {"x": [*range(1, 700, 6)], "x_label": "rows; 4096 cached tokens, LLaMA-13B, A6000"}
        cases = [where | {"rows": rows} for rows in case["x"]]
        case["truth"] = [drive.e01(solution(file), each) for each in cases]
        return curve, case, lambda _: [ask(each) for each in cases]
    if file == "e07":
        sizes = sorted([*range(8, 648, 8), 129, 257, 385, 513])
        shapes = {"batches": [e07.shape([(0, n, n)]) for n in sizes]}
        truth = drive.e07(solution(file), shapes)
        case = {"x": sizes, "x_label": "prompt tokens", "truth": truth}
        return curve, case, lambda _: ask(shapes)
    if file == "e02":
        operations = [
            ["allocate"],
            ["extend", 0, 3],
            ["allocate"],
            ["extend", 1, 2],
            ["free", 0],
            ["allocate"],
            ["extend", 0, 4],
            ["extend", 1, 3],
            ["free", 1],
        ]
        case = {"model": asdict(e02.MODEL), "slots": 3, "length": 6, "operations": operations}
        return slots, case, ask
    if file == "e03":
        cuts = [[start, min(5, 16 - start)] for start in range(0, 16, 5)]
        return masks, {"whole": 16, "chunks": cuts}, ask
    seconds = [[0.25 * (1 + 3 * i % 5), 0.25 * (1 + i % 4), 0.5] for i in range(10)]
    return stages, {"seconds": seconds, "micro_batches": 2, "starts": starts(seconds, 2)}, ask


PICTURES = ("e01", "e02", "e03", "e06", "e07", "e08", "e10", "final")
# The others' checks say it all in a table.


def picture(exercise: Exercise, mine: SimpleNamespace, name: str = TITLES[1]) -> list[Panel]:
    """Two panels. name: of the second one. A UserError if the student's code does not answer."""
    if exercise.file not in PICTURES:
        names = ", ".join(each.removeprefix("e").lstrip("0") for each in PICTURES)
        raise UserError(f"{exercise.name} has no picture: choose one of {names}")
    first = "Sarathi-Serve" if exercise.key == "final" else TITLES[0]
    found = []
    for title, code in zip((first, name), (solution(exercise.file), mine), strict=True):
        draw, case, ask = answers(exercise, asker(exercise, code))
        try:
            panel = draw(case, ask(case), code is mine)
            found.append(replace(panel, title=title))
        except AnswerError as error:
            if error.says == UNWRITTEN:
                raise UserError(f"{exercise.name} {exercise.title}: {UNWRITTEN}") from None
            raise UserError(f"{exercise.name}: no picture. {error.says} Got: {error}") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise UserError(f"{exercise.name}: this answer cannot be drawn: {error}") from None
    return found if found[0].down else alike(found)


def occupied(case: dict, said: list) -> list[list[int]]:
    """Tokens in each slot after each operation, as its answers say; -1: free."""
    used = [-1] * case["slots"]
    steps = []
    for (name, *arguments), answer in zip(case["operations"], said, strict=True):
        if name == "allocate" and isinstance(answer, int):
            used[answer] = 0
        elif name == "free":
            used[arguments[0]] = -1
        elif name == "extend" and isinstance(answer, int):
            used[arguments[0]] = answer + arguments[1]
        steps.append(list(used))
    return steps
