"""Segment KV, Fig 8: first and next token of four models, at beam widths 1 and 4.

    python experiments/segment_widths.py              predicted for tiles of the Max 1550: seconds
    python experiments/segment_widths.py --measure    and two small models on this CPU

One prompt of 1024 tokens, a response of 128. GPT-J-6B and Llama2-13B run on one tile, OPT-30B on
two, Bloom-176B on eight (tensor parallel). The next token is the mean from the second to the last.
`experiments/lib/segment.py` says what the three ways are; gains are over `transformers`.

The paper states ranges over its four models. So the smallest and the largest gain stand beside
them. At BW = 1 its range is of both tokens together. Its "up to 7x" does not say of what: here it
stands beside the next token's largest gain at BW = 4.

What is measured: prompts of 512, a response of 32, three engines, --model (laptop) and gpt2.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from configs import MODELS
from experiments.lib import common, look, measuring, segment
from experiments.lib.beam_engines import Search, add_latencies, check_cpu, ratio, started
from experiments.lib.common import Point, Record
from experiments.lib.figure import Figure, Scale
from experiments.lib.segment import OURS, THEIRS, TILE, TILES, TOKENS, WAYS, say

PROMPT, RESPONSE = 1024, 128  # predicted
WIDTHS = (1, 4)
SECOND = "gpt2"  # 124 M parameters; measured beside --model
MODEL = "llama2-13b"  # whose unfused operators are counted: see `scores_seconds`
# number's id -> our series, and what it is: of which width and tokens, the smallest or the largest
STATED = {
    "sk_latency_bw1_low": ("BW = 1, both tokens: smallest gain", 1, TOKENS, min),
    "sk_latency_bw1_high": ("BW = 1, both tokens: largest gain", 1, TOKENS, max),
    "sk_first_bw4_low": ("BW = 4, first token: smallest gain", 4, TOKENS[:1], min),
    "sk_first_bw4_high": ("BW = 4, first token: largest gain", 4, TOKENS[:1], max),
    "sk_latency": ("BW = 4, next token: largest gain", 4, TOKENS[1:], max),
}


def milliseconds(model: str, way: str, width: int) -> dict[str, float]:
    return segment.latencies(model, way, width, PROMPT, RESPONSE)


def summary(points: list[Point], models: list[str], *where: str) -> list[Point]:
    """What the paper states, of these models. where: model, hardware and source of a `Record`."""
    record = Record("segment_widths", *where)
    gains = common.values_at(points, points[0].source)
    for series, width, tokens, extreme in STATED.values():
        found = [gains[f"{model}, {what}, gain", width] for model in models for what in tokens]
        record.add(series, extreme(found), "x")
    return record


def predict(quick: bool) -> list[Point]:
    points: list[Point] = []
    for model in TILES:
        record = Record("segment_widths", model, segment.hardware(model))
        for width in WIDTHS:
            times = {way: milliseconds(model, way, width) for way in WAYS}
            for way in WAYS:
                for what, ms in times[way].items():
                    record.add(f"{model}, {what}, {way}", ms, "ms", width, "BW")
            for what in TOKENS:
                gain = times[THEIRS][what] / times[OURS][what]
                record.add(f"{model}, {what}, gain", gain, "x", width, "BW")
        points += record
    return points + summary(points, list(TILES), "four models", TILE.name)


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    """One model after the other; its six searches in alternation."""
    (prompt,), quick = scale.lengths, scale.repeats == 1
    one = quick or llm.config.name == SECOND
    configs = [llm.config] if one else [llm.config, MODELS[SECOND]]
    points: list[Point] = []
    _, *where = measuring.measured_on(llm)
    for config in configs:
        record, response = Record("segment_widths", config.name, *where), 3 if quick else 32
        pairs = [(way, width) for width in WIDTHS for way in WAYS]
        searches = {(way, width): Search(way, 1, prompt, width, response) for way, width in pairs}
        with started(config, check_cpu(llm)) as engines:
            seen = engines.ask(searches, scale.repeats)
        for way, width in pairs:
            add_latencies(record, seen[way, width], way, width, "BW", prefix=f"{config.name}, ")
        for width in WIDTHS:
            for what in TOKENS:
                gain = ratio(seen[OURS, width], seen[THEIRS, width], what)
                measuring.add_spread(record, f"{config.name}, {what}, gain", gain, "x", width, "BW")
        points += record
    names = [config.name for config in configs]
    return points + summary(points, names, " and ".join(names), *where)


def newest_run(points: list[Point]) -> tuple[list[str], list[Point]]:
    """The models that were measured last, and their points: the last row names them all."""
    measured = [point for point in points if point.source == "measured"]
    if not measured:
        return [], []
    last = measured[-1]
    models = last.model.split(" and ")
    own = [p for p in measured if p.hardware == last.hardware and p.model in (*models, last.model)]
    return models, own


def draw_panel(
    axes: plt.Axes, points: list[Point], source: str, what: str, groups: dict[tuple[str, int], str]
) -> None:
    """Bars of the three ways. groups: model and width -> what stands below their bars."""
    times = common.values_at(points, source)
    heights = {
        ((model, width), way): times[f"{model}, {what}, {way}", width]
        for model, width in groups
        for way in WAYS
    }
    labels = {key: f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}" for key, ms in heights.items()}
    segment.draw_ways(axes, groups, heights, labels)
    axes.set_ylabel("latency (ms)")
    axes.margins(y=0.2)  # room for the legend


def draw(points: list[Point]) -> plt.Figure:
    """Bars: each model at both widths, one bar for each way."""
    models, newest = newest_run(points)
    ratios = [4, 2.5] if newest else [1]
    figure, grid = look.panels(2, len(ratios), 13 if newest else 16, 5.5, width_ratios=ratios)
    tiles = {model: f"{count} tile{'s' if count > 1 else ''}" for model, count in TILES.items()}
    predicted = {(m, w): f"{m}\nBW = {w}, {tiles[m]}" for m in TILES for w in WIDTHS}
    measured = {(m, w): f"{m}\nBW = {w}" for m in models for w in WIDTHS}
    for what, letters, (left, *right) in zip(TOKENS, ("ac", "bd"), grid, strict=True):
        draw_panel(left, points, "predicted", what, predicted)
        left.set_title(f"({letters[0]}) {what}, predicted: prompt {PROMPT}, response {RESPONSE}")
        for axes in right:
            draw_panel(axes, newest, "measured", what, measured)
            title = f"({letters[1]}) {what}, measured\n{newest[-1].hardware}"
            axes.set_title(title, fontsize=14)
    where = f"{TILE.name}, and this machine" if newest else f"{TILE.name} (predicted)"
    figure.suptitle(f"Segment KV Fig 8: BS = 1, {where}", fontsize=18)
    return figure


def print_latencies(points: list[Point], source: str, models: list[str], title: str) -> None:
    times = common.values_at(points, source)
    rows = [
        [model, width, *segment.latency_cells(times, width, prefix=f"{model}, ")]
        for model in models
        for width in WIDTHS
    ]
    common.print_table(["model", "BW", *segment.LATENCIES], rows, title)


def print_misses() -> None:
    """Why the paper's gains are larger than what bytes and FLOPs say."""
    one, four = (milliseconds(MODEL, OURS, width) for width in WIDTHS)
    theirs, stated = milliseconds(MODEL, THEIRS, WIDTHS[-1]), common.paper_numbers()["sk_latency"]
    wider = four["next token"] / one["next token"]
    scores = 1e3 * segment.scores_seconds(MODEL, 1, WIDTHS[-1], PROMPT)
    unfused = (theirs["first token"] + scores) / four["first token"]
    bytes_alone = theirs["next token"] / four["next token"]
    wait = stated * four["next token"] - theirs["next token"]
    say(
        "The paper: BW = 4 costs almost the same as BW = 1. Predicted with segments, for the next",
        f"token of {MODEL}: {wider:.2f}x.",
    )
    say(
        "BW = 1: nothing is shared. Only the copies of the cache are left to gain. The paper's",
        "kernels are fused, and its baseline's are not: our cost model fuses both.",
    )
    say(
        f"BW = 4, first token: we price the rows, {WIDTHS[-1]} times as many. transformers also",
        f"writes and reads the scores. With them, the gain is {unfused:.1f}x for {MODEL}.",
    )
    say(
        f"BW = 4, next token: bytes explain {bytes_alone:.1f}x for {MODEL}. If {stated:g}x was its",
        f"gain, its baseline takes {wait:.0f} ms more than that, or",
        f"{wait / MODELS[MODEL].n_layer:.1f} ms in each layer. The paper says that a layer has",
        "hundreds of operators there, and that most of them move little. We do not know what one",
        "takes, and price none.",
    )


def report(points: list[Point]) -> None:
    models, newest = newest_run(points)
    segment.print_beside(points, [series for series, *_ in STATED.values()])
    title = "ms of the first token | of the next; gain: transformers over segment"
    print_latencies(points, "predicted", list(TILES), title)
    print_misses()
    if not newest:
        return
    title = f"measured: {newest[-1].hardware}; ms as above"
    print_latencies(newest, "measured", models, title)
    times = common.values_at(newest, "measured")
    wider = []
    for model in models:
        one, four = (times[f"{model}, next token, {OURS}", width] for width in WIDTHS)
        wider.append(f"{four / one:.2f}x for {model}")
    say(
        f"Measured, BW = 4 over BW = 1, next token with segments: {', '.join(wider)}.",
        "First token, BW = 4: transformers runs 4 times the rows. Next token: every engine reads",
        "all weights, and no cache saves that.",
    )


FIGURE = Figure(
    name="segment_widths",
    description=__doc__,
    paper={name: (series, 0) for name, (series, *_) in STATED.items()},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(1,), repeats=3),
    quick_scale=Scale(lengths=(24,), batch_sizes=(1,), repeats=1),
    shown=None,
    report=report,
)

main = FIGURE.main

if __name__ == "__main__":
    main()
