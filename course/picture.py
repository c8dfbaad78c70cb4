"""An attempt as a picture, beside what it should be: panels as plain data (course/sketch.py).

One fixed case for each exercise; or the one that a check has failed on, where it can be drawn.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from command.checks import UserError
from course import drive
from course.check import e02, e04, e05, e07, e09, e10, e13, hunt
from course.exercises import UNWRITTEN, AnswerError, Ask, Exercise
from course.local import asker
from course.reference import solution
from course.sketch import BLUES, INK, PAPER, Bar, Line, Mark, Panel, Words, alike
from experiments.lib.colours import COLOURS

HUES = [COLOURS[name] for name in ("orange", "blue", "green", "purple", "sky", "vermilion")]
TITLES = ("what it should be", "yours")
BASELINE = "Sarathi-Serve"
LONGEST = 2000  # letters of a failing case that is drawn: a longer one is too wide
Draw = Callable[[dict, object, bool], Panel]
"""A case, its answer, and whether the answer is the student's -> a panel."""


def workload(memory: bool) -> dict:
    """Four requests; with little memory, one of them is preempted."""
    requests = [[list(range(n)), most, [], 0.0] for n, most in ((20, 8), (44, 6), (9, 9), (30, 5))]
    return {"B": 3, "C": 16, "cache": 66 if memory else None, "requests": requests}


def batches(case: dict, answer: dict, _: bool = True) -> Panel:
    shapes: list = []
    for place, row in enumerate(answer["rows"], 1):
        low = 0
        for i, _, length, _ in row.get("chunks", []):
            name = f"chunk of request {i}"
            shapes.append(Bar(place - 0.4, low, 0.8, length, HUES[i % len(HUES)], name))
            shapes += [Mark(place, 1.3 * case["C"], "cross", INK, "no tokens")] * (length < 1)
            low += length
        if count := len(row.get("decodes", [])):
            shapes.append(Bar(place - 0.4, low, 0.8, count, INK, "decodes"))
        if row["preempted"]:
            name = "a request is preempted"
            shapes.append(Mark(place, case["C"] * 1.15, "cross", COLOURS["vermilion"], name))
    end = len(answer["rows"]) + 0.7
    shapes.sort(key=lambda shape: shape.label)  # of the legend: 0, 1, 2
    line = Line([(0.3, case["C"]), (end, case["C"])], "#808080", f"C = {case['C']}", dashed=True)
    marked = any(isinstance(shape, Mark) for shape in shapes)
    tall = max((bar.y + bar.height for bar in shapes if isinstance(bar, Bar)), default=0)
    high = max((1.45 if marked else 1.2) * case["C"], 1.1 * tall)  # above C, all is seen
    return Panel([*shapes, line], (0.3, end), (0, high), "iteration", "rows of the batch",
                 whole=True)  # fmt: skip


def curve(case: dict, answer: list, mine: bool) -> Panel:
    truth, most = case["_truth"], 3e3 * max(case["_truth"])  # ms
    drawn = [Line([(x, 1e3 * y) for x, y in zip(case["x"], truth, strict=True)], "#808080",
                  "what it should be", dashed=True)]  # fmt: skip
    cut = [min(1e3 * y, most) for y in answer]
    if mine:
        drawn.append(Line([*zip(case["x"], cut, strict=True)], COLOURS["blue"], "yours"))
    high = 1.1 * max(1e3 * max(truth), *cut)
    if most in cut:
        middle = sum(case["x"][:: len(case["x"]) - 1]) / 2
        drawn.append(Words(middle, 0.97 * high, "cut at 3 times the expected maximum"))
    return Panel(drawn, (0, case["x"][-1]), (0, high), case["x_label"], "ms")


def cells(grid: list[list[tuple[str, object]]], **options: object) -> Panel:
    """A table of (colour, words), its first row above. Words on dark blue are white."""
    shapes: list = []
    for y, row in enumerate(grid):
        for x, (hue, words) in enumerate(row):
            shapes.append(Bar(x - 0.5, y - 0.5, 1, 1, hue))
            ink = INK if hue == PAPER else "#ffffff" if hue in BLUES[3:] else "#000000"
            if words != "":
                shapes.append(Words(x, y, words, ink))
    wide, high = len(grid[0]) if grid else 1, len(grid) or 1
    return Panel(shapes, (-0.5, wide - 0.5), (-0.5, high - 0.5), down=True, **options)


def numbered(count: int) -> list[tuple[float, object]]:
    return [(each, each) for each in range(count)]


def slots(case: dict, answer: dict, _: bool = True) -> Panel:
    steps = occupied(case, answer["said"])
    grid = [
        [(PAPER, "free") if tokens < 0 else (BLUES[min(tokens, 5)], tokens) for tokens in row]
        for row in zip(*steps, strict=True)
    ]
    said = [each[:1] if each[0] == "write" else each[:2] for each in case["operations"]]
    names = [(place, " ".join(map(str, each))) for place, each in enumerate(said)]
    return cells(grid, x_label="after", y_label="slot: tokens in it", x_ticks=names,
                 y_ticks=numbered(case["slots"]))  # fmt: skip


SEEN = {  # is, should be: what a cell of a mask is called
    "00": ("not seen", PAPER),
    "11": ("seen", COLOURS["blue"]),
    "10": ("seen, but must not be", COLOURS["vermilion"]),
    "01": ("not seen, but must be", COLOURS["orange"]),
}


def masks(case: dict, answer: list, _: bool) -> Panel:
    whole, grid, lines, shapes = case["whole"], [], [], ""
    for (start, length), part in zip(case["chunks"], answer, strict=True):
        if part["shape"] != [length, start + length] and not shapes:
            shapes = f"; shape {part['shape']}, not {[length, start + length]}"
        for seen in part["rows"]:
            right = ["1" if column <= len(grid) else "0" for column in range(whole)]
            pairs = zip(seen.ljust(whole, "0")[:whole], right, strict=True)
            grid.append([(SEEN[a + b][1], "") for a, b in pairs])
        lines.append(Line([(-0.5, len(grid) - 0.5), (whole - 0.5, len(grid) - 0.5)], INK))
    panel = cells(grid, x_label=f"key{shapes}", y_label="prompt token; lines end chunks",
                  legend=[(hue, words) for words, hue in SEEN.values()])  # fmt: skip
    return replace(panel, shapes=[*panel.shapes, *lines])


def errors(case: dict, answer: dict, _: bool) -> Panel:
    """Each head of each row: is it right?"""
    grid = []
    for request, rights in zip(answer["found"], case["_truth"], strict=True):
        for row, right in zip(request, rights, strict=True):
            found = []
            for mine, wanted in zip(row, right, strict=True):
                off = max(abs(a - b) for a, b in zip(mine, wanted, strict=True))
                fine = not math.isnan(off) and off <= 1e-12
                words = "ok" if fine else "NaN" if math.isnan(off) else f"{off:.0e}"
                found.append((PAPER if fine else COLOURS["vermilion"], words))
            grid.append(found)
    return cells(grid, x_label="query head (red: wrong)", y_label="row",
                 x_ticks=numbered(len(grid[0])), y_ticks=numbered(len(grid)))  # fmt: skip


def rows_of(case: dict, answer: list, _: bool) -> Panel:
    shapes, first, highest = [], 0, 0
    for rows in answer:
        for row, (slot, place) in enumerate(zip(rows["slots"], rows["positions"], strict=True)):
            shapes.append(Mark(first + row, place, "dot", HUES[slot % len(HUES)]))
            highest = max(highest, place)
        shapes += [Mark(first + row, rows["positions"][row], "ring", INK)
                   for row in rows["logit_rows"]]  # fmt: skip
        first += len(rows["slots"])
        shapes.append(Line([(first - 0.5, -1), (first - 0.5, highest + 1)], "#808080"))
    return Panel(shapes, (-1, first), (-1, highest + 1), "rows; lines end batches",
                 "position (colour: slot, ring: logits)")  # fmt: skip


def waits(case: dict, answer: dict, _: bool = True) -> Panel:
    shapes, last = [], 0.0
    for number, (first, gaps) in enumerate(zip(answer["ttft"], answer["tbts"], strict=True)):
        left = case["lives"][number]["arrival"]
        shapes.append(Bar(left, number - 0.4, first, 0.8, COLOURS["orange"], "TTFT"))
        left += first
        for gap in gaps:
            hue, name = ("vermilion", "gap above the bound") if gap > case["bound"] else (
                "blue", "gap")  # fmt: skip
            shapes.append(Bar(left, number - 0.25, gap, 0.5, COLOURS[hue], name))
            left += gap
        last = max(last, left)
    count = len(case["lives"])
    return Panel(shapes, (0, 1.02 * last or 1), (-0.5, count - 0.5),
                 f"time (s); P99 of the gaps: {answer['p99']:.2f} s", "request",
                 y_ticks=numbered(count))  # fmt: skip


def stages(case: dict, answer: dict, _: bool = True) -> Panel:
    shapes, end = [], 0.0
    for number, (work, starts) in enumerate(zip(case["seconds"], answer["starts"], strict=True)):
        hue = HUES[number % case["micro_batches"]]
        for stage, (length, start) in enumerate(zip(work, starts, strict=True)):
            shapes.append(Bar(start, stage - 0.4, length, 0.8, hue))
            shapes.append(Words(start + length / 2, stage, number, "#000000"))
            end = max(end, start + length)
    idle = ", ".join(f"{name} {answer['idle'].get(name, 0):.3g}" for name in IDLE)
    count = len(case["seconds"][0])
    return Panel(shapes, (0, 1.02 * end), (-0.5, count - 0.5), f"time (s)\nidle: {idle}", "stage",
                 y_ticks=numbered(count), down=True)  # fmt: skip


IDLE = ("start-up", "bubble", "drain")


def shares(case: dict, answer: list, _: bool = True) -> Panel:
    """Micro-batches that come back one after the other."""
    shapes, highest = [], case["average"]
    for turn, (takes, withholds) in enumerate(answer):
        shapes.append(Bar(turn - 0.4, 0, 0.8, len(takes), COLOURS["blue"], "takes"))
        shapes.append(Bar(turn - 0.4, len(takes), 0.8, len(withholds), COLOURS["orange"],
                          "withheld for the next"))  # fmt: skip
        highest = max(highest, len(takes) + len(withholds))
    end = len(answer) - 0.5
    line = [(-0.5, case["average"]), (end, case["average"])]
    shapes.append(Line(line, "#808080", "average, rounded up", dashed=True))
    return Panel(shapes, (-0.5, end), (0, 1.1 * highest), "micro-batch that comes back", "requests",
                 x_ticks=numbered(len(answer)))  # fmt: skip


def taken_in_turn(ask: Ask, sizes: list[int]) -> list:
    """Each micro-batch comes back with its own requests, and what the last one withheld."""
    names, withheld, found = iter(range(99)), [], []
    for size in sizes:
        own = [next(names) for _ in range(size)]
        shared = {"total": sum(sizes), "groups": len(sizes), "most": 99}
        found.append(ask(shared | {"own": own, "withheld": withheld}))
        withheld = found[-1][1]
    return found


def table(case: dict, answer: list, _: bool = True) -> Panel:
    last = answer[-1]
    wide = max(map(len, last))
    grid = [[(HUES[place % len(HUES)], place) for place in row] + [(PAPER, "")] * (wide - len(row))
            for row in last]  # fmt: skip
    return cells(grid, x_label="step", y_label="beam: the places that it reads",
                 x_ticks=numbered(wide), y_ticks=numbered(len(last)))  # fmt: skip


def blocks(case: dict, answer: list, _: bool = True) -> Panel:
    """Who holds each block after each operation; what nobody holds: its place in the queue."""
    steps, tables, columns = [each for each in answer if each[0] != "run"], {}, []
    for name, i, *found, free, references in steps:
        if name == "take":
            tables[i] = [*tables.get(i, ()), found[0]]
        else:
            tables[i] = found[1] if name == "allocate" else []
        column = []
        for block in range(case["blocks"]):
            holders = [f"r{i}" for i, held in tables.items() if block in held]
            queue = [f"free: {place}" for place, each in enumerate(free, 1) if each == block]
            words = "\n".join([" ".join(holders), *queue]).strip()
            count = references[block]
            column.append((BLUES[min(count, 3) - 1] if count > 0 else PAPER, words))
        columns.append(column)
    names = list(enumerate(f"{name} r{i}" for name, i, *_ in steps))
    return cells([list(row) for row in zip(*columns, strict=True)], x_label="after",
                 y_label="block: who holds it", x_ticks=names,
                 y_ticks=numbered(case["blocks"]))  # fmt: skip


def grid(case: dict, answer: list, _: bool) -> Panel:
    shapes: list = []
    for number, (name, hit) in enumerate(hunt.caught(case, answer).items()):
        hue, told, sign = ("sky", "caught", "✓") if hit else ("orange", "missed", "✗")
        shapes.append(Bar(0, number - 0.4, 1, 0.8, COLOURS[hue], told))
        shapes.append(Words(0.01, number, f"{sign} {name}", "#000000", centred=False))
    return Panel(shapes, (0, 1), (-0.5, len(shapes) / 2 - 0.5),
                 "mistakes: SARATHI with one thing wrong", "", x_ticks=(), y_ticks=(),
                 down=True)  # fmt: skip


def answers(exercise: Exercise, ask: Ask) -> tuple[Draw, dict, Callable[[dict], object]]:
    """How to draw an exercise: the painter, the case, and how to get an answer to it."""
    rng, file = random.Random(7), exercise.file
    if file in ("e06", "e08", "final"):
        return batches, workload(memory=file == "e08"), ask
    if file == "e01":
        shape = {"model": e07.shape()["model"], "gpu": e07.shape()["gpu"], "cached": 4096}
        case = {"x": [*range(1, 700, 6)], "x_label": "rows; 4096 cached tokens, LLaMA-13B, A6000"}
        cases = [shape | {"rows": rows} for rows in case["x"]]
        case["_truth"] = [drive.e01(solution(file), each) for each in cases]
        return curve, case, lambda c: [ask(each) for each in cases]
    if file == "e07":
        case = {"x": [*range(8, 648, 8), 129, 257, 385, 513], "x_label": "prompt tokens"}
        case["x"].sort()
        shapes = {"batches": [e07.shape([(0, n, n)]) for n in case["x"]]}
        case["_truth"] = drive.e07(solution(file), shapes)
        return curve, case, lambda c: ask(shapes)
    if file == "e02":
        case = e02.draw(rng, 11) | {"slots": 3, "length": 6}
        case["operations"] = [["allocate"], ["extend", 0, 3], ["allocate"], ["extend", 1, 2],
                              ["free", 0], ["allocate"], ["extend", 0, 4], ["extend", 1, 3],
                              ["free", 1]]  # fmt: skip
        return slots, case, ask
    if file == "e03":
        cuts = [[start, min(5, 16 - start)] for start in range(0, 16, 5)]
        return masks, {"whole": 16, "chunks": cuts}, ask
    if file == "e04":
        case = next(
            each for each in (e04.draw(rng, 1) for _ in range(500))
            if len(each["q"][0]) == 3 and len(each["q"][0][0]) == 4
        )  # fmt: skip
        case["_truth"] = drive.e04(solution("e04"), case)["found"]
        return errors, case, ask
    if file == "e05":
        return rows_of, e05.cases(rng)[55], ask
    if file == "e09":
        return waits, e09.draw(rng, 2), ask
    if file == "e10":
        drawn = [
            each
            for each in e10.cases(rng)
            if len(each["seconds"]) == 10 and max(each["seconds"][0]) > 0.1
        ]
        shapes = [(each["micro_batches"], len(each["seconds"][0])) for each in drawn]
        return stages, drawn[shapes.index((2, 3))], ask
    if file == "e11":
        return shares, {"average": 6}, lambda c: taken_in_turn(ask, [9, 2, 7, 3])
    if file == "e12":
        return table, {"width": 3, "parents": [[0, 1, 2], [1, 1, 0], [0, 2, 2], [1, 0, 0]]}, ask
    if file == "e13":
        prompts = [[7, 8, 9], [7, 8, 5, 6, 1], [7, 8, 5, 6], [5, 6, 2, 2]]
        order = [["allocate", 0], ["run", 0], ["allocate", 1], ["run", 1], ["release", 0],
                 ["release", 1], ["allocate", 2], ["allocate", 3]]  # fmt: skip
        return blocks, e13.in_order(2, 5, prompts, order), ask
    return grid, hunt.cases(rng)[0], ask


ANY_CASE = ("e06", "e08", "final", "e09", "e10", "e12", "e13")  # their painters take any case


def can_draw(exercise: Exercise, failed: dict) -> bool:
    fits = len(json.dumps(failed)) < LONGEST
    return fits and exercise.file in ANY_CASE and "preempt" not in failed


def picture(
    exercise: Exercise, mine: SimpleNamespace, failed: dict | None = None, name: str = TITLES[1]
) -> list[Panel]:
    """Two panels. failed: the case of a check, drawn if it can be. name: of the second one.

    A UserError if the student's code does not answer.
    """
    first = BASELINE if exercise.key == "final" else TITLES[0]
    found = []
    for title, code in zip((first, name), (solution(exercise.file), mine), strict=True):
        draw, case, ask = answers(exercise, asker(exercise, code))
        if failed and can_draw(exercise, failed):
            case = failed
        try:
            shown = {name: each for name, each in case.items() if not name.startswith("_")}
            found.append(replace(draw(case, ask(shown), code is mine), title=title))
        except AnswerError as error:
            if error.says == UNWRITTEN:
                raise UserError(f"{exercise.name} {exercise.title}: {UNWRITTEN}") from None
            raise UserError(f"{exercise.name}: no picture. {error.says} Got: {error}") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise UserError(f"{exercise.name}: this answer cannot be drawn: {error}") from None
    return found if found[0].down else alike(found)


def occupied(case: dict, said: list) -> list[list[int]]:
    """Tokens in each slot after each operation, as its answers say; -1: free."""
    used, steps = [-1] * case["slots"], []
    for (name, *arguments), answer in zip(case["operations"], said, strict=True):
        if name == "allocate" and isinstance(answer, int):
            used[answer] = 0
        elif name == "free":
            used[arguments[0]] = -1
        elif name == "extend" and isinstance(answer, int):
            used[arguments[0]] = answer + arguments[1]
        steps.append(list(used))
    return steps
