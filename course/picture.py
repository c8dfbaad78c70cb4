"""An attempt as a picture, beside what it should be. One fixed case for each exercise."""

import math
import random
from collections.abc import Callable
from types import SimpleNamespace

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from command.checks import UserError
from course import drive
from course.check import e02, e04, e05, e07, e09, e10, e13, hunt
from course.exercises import UNWRITTEN, AnswerError, Ask, Exercise
from course.local import asker
from course.reference import solution
from experiments.lib.look import COLOURS, panels, use_style

HUES = [COLOURS[name] for name in ("orange", "blue", "green", "purple", "sky", "vermilion")]
TITLES = ("what it should be", "yours")
BASELINE = ("Sarathi-Serve", "yours")
Draw = Callable[[plt.Axes, dict, object], None]


def workload(memory: bool) -> dict:
    """Four requests; with little memory, one of them is preempted."""
    requests = [[list(range(n)), most, [], 0.0] for n, most in ((20, 8), (44, 6), (9, 9), (30, 5))]
    return {"B": 3, "C": 16, "cache": 66 if memory else None, "requests": requests}


def batches(axes: plt.Axes, case: dict, answer: dict) -> None:
    rows = answer["rows"]
    lows = [0] * len(rows)
    for i in range(len(case["requests"])):
        heights = [sum(n for r, _, n, _ in row.get("chunks", []) if r == i) for row in rows]
        axes.bar(range(1, len(rows) + 1), heights, bottom=lows, color=HUES[i], edgecolor="white",
                 label=f"chunk of request {i}")  # fmt: skip
        lows = [low + height for low, height in zip(lows, heights, strict=True)]
    decodes = [len(row.get("decodes", [])) for row in rows]
    axes.bar(range(1, len(rows) + 1), decodes, bottom=lows, color="black", label="decodes")
    gone = [number for number, row in enumerate(rows, 1) if row["preempted"]]
    if gone:
        axes.plot(gone, [case["C"] + 2] * len(gone), "X", color=COLOURS["vermilion"],
                  label="a request is preempted")  # fmt: skip
    axes.axhline(case["C"], color="grey", linestyle="--", label=f"C = {case['C']}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="iteration", ylabel="rows of the batch", ylim=(0, 1.6 * case["C"]))


def curve(axes: plt.Axes, case: dict, answer: list) -> None:
    most = 3e3 * max(case["_truth"])  # ms
    shown = [min(1e3 * each, most) for each in answer]
    if most in shown:
        axes.text(0.5, 0.93, "cut at 3 times the expected maximum", fontsize=12, ha="center",
                  transform=axes.transAxes, bbox={"facecolor": "white"})  # fmt: skip
    axes.plot(case["x"], [1e3 * each for each in case["_truth"]], color="grey", linestyle="--",
              label="what it should be")  # fmt: skip
    if axes.get_title() == "yours":
        axes.plot(case["x"], shown, color=COLOURS["blue"], label="yours")
    axes.set(xlabel=case["x_label"], ylabel="ms", ylim=(0, None))


def slots(axes: plt.Axes, case: dict, answer: dict) -> None:
    steps = answer["used"]
    colours = ListedColormap(["white", *plt.get_cmap("Blues")(range(60, 256, 32))])
    axes.imshow(list(zip(*steps, strict=True)), cmap=colours, vmin=-1, vmax=6, aspect="auto")
    for step, used in enumerate(steps):
        for slot, tokens in enumerate(used):
            axes.text(step, slot, "free" if tokens < 0 else tokens, ha="center", va="center",
                      fontsize=11, color="white" if tokens > 3 else "black")  # fmt: skip
    names = [operation[0] for operation in case["operations"]]
    axes.set_xticks(range(len(names)), names, rotation=60, fontsize=11)
    axes.set(yticks=range(case["slots"]), ylabel="slot: tokens in it", xlabel="after")
    axes.grid(visible=False)


SEEN = {  # is, should be: what a cell of a mask is called
    "00": ("not seen", "white"),
    "11": ("seen", COLOURS["blue"]),
    "10": ("seen, but must not be", COLOURS["vermilion"]),
    "01": ("not seen, but must be", COLOURS["orange"]),
}


def masks(axes: plt.Axes, case: dict, answer: list) -> None:
    whole, grid, row, shapes = case["whole"], [], 0, ""
    for (start, length), part in zip(case["chunks"], answer, strict=True):
        if part["shape"] != [length, start + length] and not shapes:
            shapes = f": shape {part['shape']}, not {[length, start + length]}"
        for cells in part["rows"]:
            cells = cells.ljust(whole, "0")[:whole]
            right = ["1" if column <= row else "0" for column in range(whole)]
            grid.append([list(SEEN).index(a + b) for a, b in zip(cells, right, strict=True)])
            row += 1
        axes.axhline(row - 0.5, color="black", linewidth=1)
    colours = ListedColormap([colour for _, colour in SEEN.values()])
    axes.imshow(grid, cmap=colours, vmin=0, vmax=3, aspect="auto")
    for words, colour in SEEN.values():
        axes.plot([], [], "s", color=colour, markeredgecolor="grey", markersize=11, label=words)
    axes.set(xlabel="key", ylabel="prompt token; lines end chunks", title=axes.get_title() + shapes)
    axes.grid(visible=False)


def errors(axes: plt.Axes, case: dict, answer: dict) -> None:
    """Each head of each row: is it right?"""
    truth = case["_truth"]
    grid = [
        [max(abs(a - b) if not math.isnan(a) else 9e9 for a, b in zip(x, y, strict=True))
         for x, y in zip(row, right, strict=True)]
        for request, rights in zip(answer["found"], truth, strict=True)
        for row, right in zip(request, rights, strict=True)
    ]  # fmt: skip
    colours = ListedColormap(["white", COLOURS["vermilion"]])
    axes.imshow([[float(x > 1e-12) for x in row] for row in grid], cmap=colours, vmin=0, vmax=1)
    for i, row in enumerate(grid):
        for j, x in enumerate(row):
            words = "NaN" if x > 1e9 else "ok" if x <= 1e-12 else f"{x:.0e}"
            axes.text(j, i, words, ha="center", va="center", fontsize=12)
    axes.set(xlabel="query head (red: wrong)", ylabel="row", xticks=range(len(grid[0])),
             yticks=range(len(grid)))  # fmt: skip
    axes.grid(visible=False)


def rows_of(axes: plt.Axes, case: dict, answer: list) -> None:
    first = 0
    for rows in answer:
        for row, (slot, place) in enumerate(zip(rows["slots"], rows["positions"], strict=True)):
            hue = HUES[slot % len(HUES)]
            axes.plot(first + row, place, "o", color=hue)
        for row in rows["logit_rows"]:
            axes.plot(first + row, rows["positions"][row], "o", markersize=13, fillstyle="none",
                      color="black")  # fmt: skip
        first += len(rows["slots"])
        axes.axvline(first - 0.5, color="grey", linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="rows; lines end batches", ylabel="position (colour: slot, ring: logits)")


def waits(axes: plt.Axes, case: dict, answer: dict) -> None:
    for number, (first, gaps) in enumerate(zip(answer["ttft"], answer["tbts"], strict=True)):
        left = case["lives"][number]["arrival"]
        axes.barh(number, first, left=left, color=COLOURS["orange"], edgecolor="white",
                  label="TTFT" if number == 0 else None)  # fmt: skip
        left += first
        for gap in gaps:
            long = gap > case["bound"]
            axes.barh(number, gap, left=left, height=0.5, edgecolor="white",
                      color=COLOURS["vermilion"] if long else COLOURS["blue"])  # fmt: skip
            left += gap
    axes.plot([], [], color=COLOURS["blue"], linewidth=8, label="gap")
    axes.plot([], [], color=COLOURS["vermilion"], linewidth=8, label="gap above the bound")
    axes.set(xlabel=f"time (s); P99 of the gaps: {answer['p99']:.2f} s", ylabel="request",
             yticks=range(len(case["lives"])))  # fmt: skip


def stages(axes: plt.Axes, case: dict, answer: dict) -> None:
    for number, (work, starts) in enumerate(zip(case["seconds"], answer["starts"], strict=True)):
        hue = HUES[number % case["micro_batches"]]
        for stage, (length, start) in enumerate(zip(work, starts, strict=True)):
            axes.barh(stage, length, left=start, color=hue, edgecolor="white")
            axes.text(start + length / 2, stage, number, ha="center", va="center", fontsize=11)
    idle = ", ".join(f"{name} {answer['idle'].get(name, 0):.2f}" for name in IDLE)
    axes.set(xlabel=f"time (s)\nidle: {idle}", ylabel="stage", yticks=range(len(work)))
    axes.invert_yaxis()


IDLE = ("start-up", "bubble", "drain")


def shares(axes: plt.Axes, case: dict, answer: list) -> None:
    """Micro-batches that come back one after the other."""
    for turn, (takes, withholds) in enumerate(answer):
        axes.bar(turn, len(takes), color=COLOURS["blue"], label="" if turn else "takes")
        axes.bar(turn, len(withholds), bottom=len(takes), color=COLOURS["orange"],
                 label="" if turn else "withheld for the next")  # fmt: skip
    axes.axhline(case["average"], color="grey", linestyle="--", label="average, rounded up")
    axes.set(xlabel="micro-batch that comes back", ylabel="requests", xticks=range(len(answer)))


def taken_in_turn(ask: Ask, sizes: list[int]) -> list:
    """Each micro-batch comes back with its own requests, and what the last one withheld."""
    names, withheld, found = iter(range(99)), [], []
    for size in sizes:
        own = [next(names) for _ in range(size)]
        shared = {"total": sum(sizes), "groups": len(sizes), "most": 99}
        found.append(ask(shared | {"own": own, "withheld": withheld}))
        withheld = found[-1][1]
    return found


def table(axes: plt.Axes, case: dict, answer: list) -> None:
    last = answer[-1]
    for beam, row in enumerate(last):
        for step, place in enumerate(row):
            axes.text(step, beam, place, ha="center", va="center")
            axes.plot(step, beam, "s", markersize=30, color=HUES[place % len(HUES)], alpha=0.5)
    axes.set(xlabel="step", ylabel="beam: the places that it reads", yticks=range(len(last)),
             ylim=(len(last) - 0.5, -0.5), xlim=(-0.6, max(map(len, last)) - 0.4))  # fmt: skip
    axes.grid(visible=False)


def blocks(axes: plt.Axes, case: dict, answer: list) -> None:
    """Who holds each block after each operation; what nobody holds: its place in the queue."""
    steps, tables, counts = [each for each in answer if each[0] != "run"], {}, []
    for step, (name, i, *found, free, references) in enumerate(steps):
        tables[i] = found[1] if name == "allocate" else []
        counts.append(references)
        for block in range(case["blocks"]):
            holders = [f"r{i}" for i, table in tables.items() if block in table]
            queue = [f"free: {place}" for place, each in enumerate(free, 1) if each == block]
            words = "\n".join([" ".join(holders), *queue])
            axes.text(step, block, words.strip(), ha="center", va="center", fontsize=11)
    colours = ListedColormap(["white", *plt.get_cmap("Blues")((60, 110, 160))])
    axes.imshow(list(zip(*counts, strict=True)), cmap=colours, vmin=0, vmax=3, aspect="auto")
    names = [f"{name} r{i}" for name, i, *_ in steps]
    axes.set_xticks(range(len(names)), names, rotation=60, fontsize=11)
    axes.set(yticks=range(case["blocks"]), ylabel="block: who holds it")
    axes.grid(visible=False)


def grid(axes: plt.Axes, case: dict, answer: list) -> None:
    for number, (name, hit) in enumerate(hunt.caught(case, answer).items()):
        axes.barh(number, 1, color=COLOURS["sky" if hit else "orange"])
        words = "caught" if hit else "missed"
        axes.text(0.02, number, f"{words}: {name}", va="center", fontsize=12)
    axes.set(xticks=[], yticks=[], xlim=(0, 1), xlabel="mistakes: SARATHI with one thing wrong")
    axes.invert_yaxis()
    axes.grid(visible=False)


def answers(exercise: Exercise, ask: Ask) -> tuple[Draw, dict, Ask]:
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


def picture(exercise: Exercise, mine: SimpleNamespace) -> plt.Figure:
    """Two panels. A UserError if the student's code does not answer."""
    use_style()
    figure, [row] = panels(1, 2, 8, 5.5)
    titles = BASELINE if exercise.key == "final" else TITLES
    for axes, title, code in zip(row, titles, (solution(exercise.file), mine), strict=True):
        draw, case, ask = answers(exercise, asker(exercise, code))
        axes.set_title(title)
        try:
            shown = {name: each for name, each in case.items() if not name.startswith("_")}
            answer = ask(shown)
            if exercise.file == "e02":
                answer["used"] = occupied(case, answer["said"])
            draw(axes, case, answer)
        except AnswerError as error:
            if error.says == UNWRITTEN:
                raise UserError(f"{exercise.name} {exercise.title}: {UNWRITTEN}") from None
            raise UserError(f"{exercise.name}: no picture. {error.says} Got: {error}") from None
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise UserError(f"{exercise.name}: this answer cannot be drawn: {error}") from None
    both = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in row]
    named = {label: handle for each in both for handle, label in each}
    if named:
        figure.legend(
            named.values(), named.keys(), loc="outside lower center", ncols=4, fontsize=12
        )
    limits = [axes.get_xlim() for axes in row], [axes.get_ylim() for axes in row]
    for axes in row:  # one scale for both
        if not axes.yaxis_inverted() and draw is not curve:
            axes.set_xlim(min(x for x, _ in limits[0]), max(x for _, x in limits[0]))
            axes.set_ylim(min(y for y, _ in limits[1]), max(y for _, y in limits[1]))
    figure.suptitle(f"{exercise.name}: {exercise.title}")
    return figure


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
