"""Segment KV, Fig 7: latency of the first and of the next token, by length of the prompt.

    python experiments/segment_prompts.py              predicted for Llama2-13B on a Max 1550 tile
    python experiments/segment_prompts.py --measure    and a small model on this CPU, three engines

One prompt of 32 to 4096 tokens, a response of 32, BW = 4. The next token is the mean from the
second to the last. `experiments/lib/segment.py` says what the three ways are; the paper's baseline
is `transformers`.

The paper sees a knee: up to there, the first token's latency hardly grows. The paper does not
define it. For us, the knee is the shortest prompt whose first token takes at least twice as long as
at 32 tokens. The paper drew only powers of two, and we measure only those.
"""

import enter  # noqa: F401

from functools import cache

import matplotlib.pyplot as plt

from configs import MODELS
from experiments.lib import common, look, measuring, segment
from experiments.lib.beam_engines import Search, add_latencies, check_cpu, started
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure, Scale
from experiments.lib.segment import OURS, THEIRS, TILE, TOKENS, WAYS, WIDTH, say

MODEL, RESPONSE = "llama2-13b", 32
PROMPTS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
THEIR_LONGEST = 1024  # tokens: transformers is measured up to there. Four times the rows take long
GROWTH = 2  # times the first token's latency at the shortest prompt: the knee
KNEES = {way: f"knee, {way}" for way in WAYS}


def milliseconds(way: str, prompt: int) -> dict[str, float]:
    return segment.latencies(MODEL, way, WIDTH, prompt, RESPONSE)


@cache
def knee(way: str, growth: float = GROWTH) -> int:
    """Tokens: the shortest prompt that takes `growth` times what the shortest drawn one takes."""
    least = growth * segment.first_token(MODEL, way, 1, WIDTH, PROMPTS[0])
    lengths = range(PROMPTS[0], PROMPTS[-1] + 1)
    return next(n for n in lengths if segment.first_token(MODEL, way, 1, WIDTH, n) >= least)


def predict(quick: bool) -> list[Point]:
    record = Record("segment_prompts", MODEL, TILE.name)
    for way in WAYS:
        for prompt in PROMPTS[:: 3 if quick else 1]:
            for what, ms in milliseconds(way, prompt).items():
                record.add(f"{what}, {way}", ms, "ms", prompt, "tokens")
        record.add(KNEES[way], knee(way), "tokens")
    return record


def measured_knee(curve: list[Point], growth: float = GROWTH) -> float | None:
    """Tokens: as `knee`, among the lengths of a curve; None: it does not grow so much."""
    return next((point.x for point in curve if point.y >= growth * curve[0].y), None)


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    record = Record("segment_prompts", *measuring.measured_on(llm))
    response = RESPONSE if max(scale.lengths) > 64 else 3
    with started(llm.config, check_cpu(llm)) as engines:
        for length in scale.lengths:
            names = [name for name in WAYS if name != THEIRS or length <= THEIR_LONGEST]
            searches = {name: Search(name, 1, length, WIDTH, response) for name in names}
            for name, seen in engines.ask(searches, scale.repeats).items():
                add_latencies(record, seen, name, length, "tokens")
    found = curves(record, "measured")
    for name in WAYS:
        tokens = measured_knee(found[f"first token, {name}"])
        if tokens is not None:
            record.add(KNEES[name], tokens, "tokens")
    record.add("response", response, "tokens")
    return record


def draw_knees(axes: plt.Axes, found: dict[str, list[Point]], paper: dict[str, float]) -> None:
    """Upright lines. Where the paper states knees (tokens by series), only those."""
    for name in (OURS, THEIRS) if paper else WAYS:
        for knee in found.get(KNEES[name], []):
            stated = f" (paper: {paper[KNEES[name]]:.0f})" if paper else ""
            style = {"color": WAYS[name].colour, "linestyle": "--" if name == "standard" else ":"}
            axes.axvline(knee.y, ymax=0.55, label=f"knee: {knee.y:.0f} tokens{stated}", **style)


def draw_panel(axes: plt.Axes, found: dict[str, list[Point]], what: str) -> None:
    """One line for each way, with the range of what is measured. found: points by series."""
    for name in sorted(WAYS, key=lambda name: name == "standard"):
        line = (0, (2, 2)) if name == "standard" else "-"  # the last: lines that coincide are seen
        style = {"color": WAYS[name].colour, "marker": WAYS[name].marker, "linestyle": line}
        look.plot_points(axes, found[f"{what}, {name}"], label=name, **style)
    for name, way in WAYS.items():
        look.shade_spread(axes, found, f"{what}, {name}", way.colour)
    look.log_ticks(axes, [point.x for point in found[f"{what}, {OURS}"]])
    axes.set(xlabel="prompt (tokens)", ylabel="latency (ms)")


def draw(points: list[Point]) -> plt.Figure:
    rows, letters = look.sources(points), iter("abcd")
    figure, grid = look.panels(len(rows), 2, 8.5, 7)
    for source, (first, following) in zip(rows, grid, strict=True):
        found, predicted = curves(points, source), source == "predicted"
        place = look.source_title(points, source, f"{MODEL} on {TILE.name}")
        for axes, what in zip((first, following), TOKENS, strict=True):
            draw_panel(axes, found, what)
            title = f"({next(letters)}) {what}, {place}"
            axes.set_title(title, fontsize=16 if predicted else 14)
        draw_knees(first, found, common.values(points, "paper") if predicted else {})
        segment.plain_log(first)
        if predicted:
            following.set_ylim(bottom=0)
        else:
            segment.plain_log(following)
        for axes in (first, following):
            axes.legend(loc="upper left")
    shape = f"BS = 1, BW = {WIDTH}, response {RESPONSE}"
    figure.suptitle(f"Segment KV Fig 7: latency by length of the prompt, {shape}", fontsize=18)
    return figure


def print_latencies(points: list[Point], source: str, title: str) -> None:
    times = common.values_at(points, source)
    lengths = [x for series, x in times if series == f"first token, {OURS}"]
    rows = [[f"{x:g}", *segment.latency_cells(times, x)] for x in lengths]
    common.print_table(["tokens", *segment.LATENCIES], rows, title)


def print_misses() -> None:
    others = [f"{more:g}x at {knee(OURS, more)} and {knee(THEIRS, more)}" for more in (1.5, 3)]
    say(
        f"The knees lie at row {knee(OURS)} ({OURS}) and row {WIDTH * (knee(THEIRS) - 1) + 1}",
        f"({THEIRS}), where tiles begin. They are so near to the paper's by luck. The first token",
        f"reaches {' tokens, and '.join(others)}.",
    )
    fused, unfused, lengths = [], [], (512, 1024, 2048)
    for prompt in lengths:
        ours, theirs = (segment.first_token(MODEL, way, 1, WIDTH, prompt) for way in (OURS, THEIRS))
        scores = segment.scores_seconds(MODEL, 1, WIDTH, prompt)
        fused.append(f"{theirs / ours:.1f}")
        unfused.append(f"{(theirs + scores) / ours:.1f}")
    say(
        f"The paper gains more than {WIDTH}x in the first token above 512 tokens.",
        f"We predict {', '.join(fused)} at {', '.join(map(str, lengths))}: our attention is fused",
        "in all ways. transformers writes and reads the scores. With the time for that, we predict",
        f"{', '.join(unfused)}.",
    )
    peak = segment.prefill_peak(MODELS[MODEL], WIDTH, PROMPTS[-1]) / 1e9
    say(
        f"The paper's baseline has no point at {PROMPTS[-1]}: out of memory. Its weights, its",
        f"cache and one layer's scores are {peak:.1f} GB of {TILE.memory / 1e9:g}, with",
        "nothing for the rest.",
    )


def report(points: list[Point]) -> None:
    segment.print_beside(points, list(KNEES.values()))
    title = "ms of the first token | of the next; gain: transformers over segment"
    print_latencies(points, "predicted", title)
    print_misses()
    newest = common.newest_measured(points)
    if not newest:
        return
    found, last = common.values(newest, "measured"), newest[-1]
    where = f"{last.model} on {last.hardware}, response {found['response']:g}"
    print_latencies(newest, "measured", f"measured: {where}; ms as above")
    if all(KNEES[way] in found for way in (OURS, THEIRS)):
        lengths = [point.x for point in newest if point.series == f"first token, {OURS}"]
        moves = found[KNEES[OURS]] / found[KNEES[THEIRS]]
        say(
            f"Measured, the knee moves {moves:g}x; the paper's moves {WIDTH}x. Only powers of two",
            f"are measured. (A knee at {lengths[1]:g} tokens, the second, says only that the",
            "time doubles from the start.) We think that few rows already keep a CPU busy: it has",
            "fewer FLOPs for each byte of its memory than a GPU.",
        )


FIGURE = Figure(
    name="segment_prompts",
    description=__doc__,
    paper={"sk_knee_standard": (KNEES[THEIRS], 0), "sk_knee_segment": (KNEES[OURS], 0)},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=PROMPTS[:-1], batch_sizes=(1,), repeats=3),
    quick_scale=Scale(lengths=(8, 64), batch_sizes=(1,), repeats=1),
    shown=None,
    report=report,
)

main = FIGURE.main

if __name__ == "__main__":
    main()
