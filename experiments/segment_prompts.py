"""Segment KV, Fig 7: latency of the first and of the next token, by the length of the prompt.

    python experiments/segment_prompts.py              predicted for Llama2-13B on a Max 1550 tile
    python experiments/segment_prompts.py --measure    and a small model on this CPU, three engines

One prompt of 32 to 4096 tokens, a response of 32, BW = 4. The next token is the mean from the
second to the last. `experiments/lib/segment.py` says what the three ways are; the paper's baseline
is `transformers`.

The paper sees a knee: up to there, the first token's latency hardly grows. For us, the knee is the
shortest prompt whose first token takes at least twice as long as at 32 tokens. The paper gives no
definition, and only the lengths that it drew: powers of two. So does our measurement.
"""

from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from cli import run_main
from configs import MODELS
from experiments.lib.beam_engines import Search, check_cpu, make_prompts, spread, started
from experiments.lib.common import Point, curves, print_table
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import log_ticks, measured_title, plot_points, shade_spread
from experiments.lib.measuring import gain_points, measured_on
from experiments.lib.segment import (
    OURS,
    THEIRS,
    TILE,
    WAYS,
    WIDTH,
    first_token,
    next_token,
    plain_log,
    prefill_peak,
    print_beside,
    say,
    scores_seconds,
)

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, RESPONSE = "llama2-13b", 32
PROMPTS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
THEIR_LONGEST = 1024  # tokens: transformers is measured up to there. Four times the rows take long
GROWTH = 2  # times the first token's latency at the shortest prompt: the knee
PANELS = ("first token", "next token")
prediction = partial(Point, "segment_prompts", source="predicted", model=MODEL, hardware=TILE.name)


def milliseconds(way: str, prompt: int) -> dict[str, float]:
    return {
        "first token": 1e3 * first_token(MODEL, way, 1, WIDTH, prompt),
        "next token": 1e3 * next_token(MODEL, way, 1, WIDTH, prompt, RESPONSE),
    }


def knee(way: str, growth: float = GROWTH) -> int:
    """Tokens: the shortest prompt that takes `growth` times what the shortest drawn one takes."""
    least = growth * first_token(MODEL, way, 1, WIDTH, PROMPTS[0])
    lengths = range(PROMPTS[0], PROMPTS[-1] + 1)
    return next(n for n in lengths if first_token(MODEL, way, 1, WIDTH, n) >= least)


def predict(quick: bool) -> list[Point]:
    points = []
    for way in WAYS:
        for prompt in PROMPTS[:: 3 if quick else 1]:
            for what, y in milliseconds(way, prompt).items():
                points.append(prediction(f"{what}, {way}", prompt, "tokens", y, "ms"))
        points.append(prediction(f"knee, {way}", 0, "", knee(way), "tokens"))
    return points


def measured_knee(curve: list[Point], growth: float = GROWTH) -> float | None:
    """Tokens: as `knee`, among the lengths of a curve; None: it does not grow so much."""
    return next((point.x for point in curve if point.y >= growth * curve[0].y), None)


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    point = partial(Point, "segment_prompts", x_unit="tokens", y_unit="ms")
    points, response = [], RESPONSE if max(scale.lengths) > 64 else 3
    source, model, hardware = measured_on(llm)
    point = partial(point, source=source, model=model, hardware=hardware)
    with started(llm.config, check_cpu(llm)) as engines:
        for length in scale.lengths:
            names = [name for name in WAYS if name != THEIRS or length <= THEIR_LONGEST]
            prompts = make_prompts(llm.config, 1, length)
            searches = {name: Search(name, prompts, WIDTH, response) for name in names}
            for name, seen in engines.ask(searches, scale.repeats).items():
                for what, values in zip(PANELS, (seen.first, seen.next), strict=True):
                    times = tuple(1e3 * value for value in spread(values))
                    points += gain_points(point, f"{what}, {name}", length, times)
    found = curves(points, "measured")
    for name in WAYS:
        tokens = measured_knee(found[f"first token, {name}"])
        if tokens is not None:
            points.append(point(f"knee, {name}", x=0, x_unit="", y=tokens, y_unit="tokens"))
    points.append(point("response", x=0, x_unit="", y=response, y_unit="tokens"))
    return points


def draw_latency(axes: plt.Axes, found: dict[str, list[Point]], what: str) -> None:
    """One line for each way. found: points by series."""
    for name, way in sorted(WAYS.items(), key=lambda item: item[0] == "standard"):
        line = (0, (2, 2)) if name == "standard" else "-"  # the last: lines that coincide are seen
        style = {"color": way.colour, "marker": way.marker, "linestyle": line, "label": name}
        plot_points(axes, found[f"{what}, {name}"], **style)
    log_ticks(axes, [point.x for point in found[f"{what}, {OURS}"]])
    axes.set(xlabel="prompt (tokens)", ylabel="latency (ms)")


def draw_measured(panels: tuple[plt.Axes, plt.Axes], points: list[Point]) -> None:
    found = curves(points, "measured")
    for letter, axes, what in zip("cd", panels, PANELS, strict=True):
        draw_latency(axes, found, what)
        for name, way in WAYS.items():
            shade_spread(axes, found, f"{what}, {name}", way.colour)
            for knee in found.get(f"knee, {name}", []) if what == PANELS[0] else []:
                line = "--" if name == "standard" else ":"
                style = {
                    "color": way.colour,
                    "linestyle": line,
                    "label": f"knee: {knee.y:g} tokens",
                }
                axes.axvline(knee.y, ymax=0.55, **style)
        plain_log(axes)
        axes.set_title(f"({letter}) {what}, {measured_title(points)}", fontsize=14)
        axes.legend(loc="upper left")


def draw(points: list[Point]) -> plt.Figure:
    found, paper = curves(points, "predicted"), curves(points, "paper")
    measured = bool(curves(points, "measured"))
    rows = 2 if measured else 1
    figure, panels = plt.subplots(
        rows, 2, figsize=(17, 7 * rows), layout="constrained", squeeze=False
    )
    first, following = panels[0]
    if measured:
        draw_measured(panels[1], points)
    draw_latency(first, found, "first token")
    plain_log(first)
    for name in (OURS, THEIRS):
        ours, theirs = found[f"knee, {name}"][0].y, paper[f"knee, {name}"][0].y
        label = f"knee: {ours:.0f} tokens (paper: {theirs:.0f})"
        first.axvline(ours, ymax=0.55, color=WAYS[name].colour, linestyle=":", label=label)
    draw_latency(following, found, "next token")
    following.set_ylim(bottom=0)
    for letter, axes, what in zip("ab", (first, following), PANELS, strict=True):
        axes.set_title(f"({letter}) {what}, predicted: {MODEL} on {TILE.name}")
        axes.legend(loc="upper left")
    figure.suptitle(
        f"Segment KV Fig 7: latency by length of the prompt, BS = 1, BW = {WIDTH}, response"
        f" {RESPONSE}",
        fontsize=18,
    )
    return figure


FIGURE = Figure(
    name="segment_prompts",
    description=__doc__,
    paper={
        "sk_knee_standard": (f"knee, {THEIRS}", 0),
        "sk_knee_segment": (f"knee, {OURS}", 0),
    },
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(32, 64, 128, 256, 512, 1024, 2048), batch_sizes=(1,), repeats=3),
    quick_scale=Scale(lengths=(8, 64), batch_sizes=(1,), repeats=1),
    shown=lambda point: point.series.startswith("knee"),
)


def print_latencies() -> None:
    table = []
    for prompt in PROMPTS:
        times = {way: milliseconds(way, prompt) for way in WAYS}
        cells = []
        for what in PANELS:
            cells += [f"{times[way][what]:.1f}" for way in WAYS]
            cells.append(f"{times[THEIRS][what] / times[OURS][what]:.2f}x")
        table.append([prompt, *cells])
    print("\nms of the first token | of the next; gain: transformers over segment\n")
    print_table(["tokens", *WAYS, "gain", *WAYS, "gain"], table)


def print_measured(points: list[Point]) -> None:
    found = curves(points, "measured")
    if not found:
        return
    table, one = [], found["response"][0]
    for point in found[f"first token, {OURS}"]:
        cells = []
        for what in PANELS:
            times = {
                way: next((p.y for p in found[f"{what}, {way}"] if p.x == point.x), None)
                for way in WAYS
            }
            cells += ["-" if y is None else f"{y:.0f}" for y in times.values()]
            cells.append(f"{times[THEIRS] / times[OURS]:.2f}x" if times[THEIRS] else "-")
        table.append([f"{point.x:g}", *cells])
    print(f"\nmeasured: {one.model} on {one.hardware}, response {one.y:g}; ms as above\n")
    print_table(["tokens", *WAYS, "gain", *WAYS, "gain"], table)
    print()
    print_beside(points, [f"knee, {way}" for way in WAYS])
    knees = [found[f"knee, {way}"][0].y for way in (OURS, THEIRS) if f"knee, {way}" in found]
    shortest = found[f"first token, {OURS}"][:2]
    if len(knees) == 2 and max(knees) == shortest[1].x:
        say(
            f"No knee to see here: twice the tokens take twice the time from {shortest[0].x:g} on.",
            "We think that so few rows already keep this CPU's multipliers busy: it has fewer",
            "FLOPs for each byte of its memory than a GPU.",
        )
    elif len(knees) == 2:
        moves = f"moves {knees[0] / knees[1]:g}x" if knees[0] != knees[1] else "does not move here"
        say(
            f"The knee {moves}; the paper's moves {WIDTH}x. Only powers of two are measured. We",
            "think that fewer rows keep a CPU busy: it has fewer FLOPs for each byte of its memory",
            "than a GPU.",
        )


def print_misses() -> None:
    others = [f"{more:g}x at {knee(OURS, more)} and {knee(THEIRS, more)}" for more in (1.5, 3)]
    say(
        f"The knees lie at row {knee(OURS)} ({OURS}) and row {WIDTH * (knee(THEIRS) - 1) + 1}",
        f"({THEIRS}), where tiles begin. That they are so near to the paper's is luck.",
        f"The first token reaches {' tokens, and '.join(others)}.",
    )
    gains, lengths = [], (512, 1024, 2048)
    for prompt in lengths:
        ours, theirs = (first_token(MODEL, way, 1, WIDTH, prompt) for way in (OURS, THEIRS))
        gains.append((theirs / ours, (theirs + scores_seconds(MODEL, 1, WIDTH, prompt)) / ours))
    fused, unfused = (", ".join(f"{x:.1f}" for x in each) for each in zip(*gains, strict=True))
    say(
        f"The paper gains more than {WIDTH}x in the first token above 512 tokens.",
        f"We predict {fused} at {', '.join(map(str, lengths))}, for our attention is fused in all",
        "ways. With the time to write and read the scores, as transformers does, it is",
        f"{unfused}.",
    )
    peak = prefill_peak(MODELS[MODEL], WIDTH, PROMPTS[-1])
    say(
        f"The paper's baseline has no point at {PROMPTS[-1]}: out of memory. Its weights, its",
        f"cache and one layer's scores are {peak / 1e9:.1f} GB of {TILE.memory / 1e9:g}, with",
        "nothing for the rest.",
    )


def main() -> None:
    points = run_figure(FIGURE)
    print_latencies()
    print_misses()
    print_measured(points)


if __name__ == "__main__":
    run_main(main)
