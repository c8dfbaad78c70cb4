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

from functools import partial

from experiments.lib import segment
from experiments.lib.beam_engines import real_beams
from experiments.lib.claims import Claim, bounded, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Rows
from experiments.lib.segment import COLOURS, OURS, THEIRS, TILE, WAYS, WIDTH, say
from experiments.lib.study import Panel, Study

ENGINE, RESPONSE = segment.PricedBeams("llama2-13b"), 32
PROMPTS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
THEIR_LONGEST = 1024  # tokens: transformers is measured up to there. Four times the rows take long
LABEL = {"xlabel": "prompt (tokens)"}
GROWTH = 2  # times the first token's latency at the shortest prompt: the knee


def knee(engine: segment.PricedBeams, way: str, growth: float = GROWTH) -> dict[str, int]:
    """Tokens: the shortest prompt that takes `growth` times what the shortest drawn one takes."""
    least = growth * engine.first_token(way, 1, WIDTH, PROMPTS[0])
    lengths = range(PROMPTS[0], PROMPTS[-1] + 1)
    return {"knee": next(n for n in lengths if engine.first_token(way, 1, WIDTH, n) >= least)}


def measured_knees(rows: Rows) -> None:
    """As `knee`, among the lengths that ran. None: it does not grow so much."""
    for way, curve in rows.where(source="measured", token="first token").by("way").items():
        reached = [row for row in curve if row["latency"] >= GROWTH * curve[0]["latency"]]
        if reached:
            rows.add(way=way, knee=reached[0]["P"])


def print_misses() -> None:
    ours, theirs = (knee(ENGINE, way)["knee"] for way in (OURS, THEIRS))
    others = [
        "{:g}x at {} and {}".format(
            more, *(knee(ENGINE, way, more)["knee"] for way in (OURS, THEIRS))
        )
        for more in (1.5, 3)
    ]
    say(
        f"The knees lie at row {ours} ({OURS}) and row {WIDTH * (theirs - 1) + 1}",
        f"({THEIRS}), where tiles begin. They are so near to the paper's by luck. The first token",
        f"reaches {' tokens, and '.join(others)}.",
    )
    fused, unfused, lengths = [], [], (512, 1024, 2048)
    for prompt in lengths:
        ours, theirs = (ENGINE.first_token(way, 1, WIDTH, prompt) for way in (OURS, THEIRS))
        scores = segment.scores_seconds(ENGINE.model, 1, WIDTH, prompt)
        fused.append(f"{theirs / ours:.1f}")
        unfused.append(f"{(theirs + scores) / ours:.1f}")
    say(
        f"The paper gains more than {WIDTH}x in the first token above 512 tokens.",
        f"We predict {', '.join(fused)} at {', '.join(map(str, lengths))}: our attention is fused",
        "in all ways. transformers writes and reads the scores. With the time for that, we predict",
        f"{', '.join(unfused)}.",
    )
    peak = segment.prefill_peak(ENGINE.config, WIDTH, PROMPTS[-1]) / 1e9
    say(
        f"The paper's baseline has no point at {PROMPTS[-1]}: out of memory. Its weights, its",
        f"cache and one layer's scores are {peak:.1f} GB of {TILE.memory / 1e9:g}, with",
        "nothing for the rest.",
    )


def report(rows: Rows) -> None:
    rows = rows.newest()
    segment.print_latencies(rows.where(source="predicted"), "P")
    print_misses()
    measured = rows.where(source="measured")
    if not measured:
        return
    segment.print_latencies(measured, "P")
    knees = {row["way"]: row["knee"] for row in measured.where("knee")}
    if OURS in knees and THEIRS in knees:
        say(
            f"Measured, the knee moves {knees[OURS] / knees[THEIRS]:g}x; the paper's moves",
            f"{WIDTH}x. Only powers of two are measured. (A knee at {list(measured.by('P'))[1]}",
            "tokens, the second, says only that the time doubles from the start.) We think that",
            "few rows already keep a CPU busy: it has fewer FLOPs for each byte of its memory than",
            "a GPU.",
        )


STUDY = Study(
    "segment_prompts",
    __doc__,
    [
        Sweep(
            segment.latencies,
            [ENGINE],
            cases(P=PROMPTS, R=RESPONSE, BW=WIDTH),
            quick=cases(P=PROMPTS[::3], R=RESPONSE, BW=WIDTH),
            measured=cases(P=[n for n in PROMPTS if n <= THEIR_LONGEST], R=RESPONSE, BW=WIDTH),
            quick_measured=cases(P=(8, 64), R=3, BW=WIDTH),
        ),
        Sweep(
            partial(segment.latencies, ways=[way for way in WAYS if way != THEIRS]),
            [ENGINE],
            (),
            measured=cases(P=2048, R=RESPONSE, BW=WIDTH),
            quick_measured=(),
        ),
        Sweep(knee, [ENGINE], cases(way=list(WAYS))),
    ],
    units={"latency": "ms", "gain": "x", "knee": "tokens"},
    title=(
        f"Segment KV Fig 7: latency by length of the prompt, BS = 1, BW = {WIDTH}, response"
        f" {RESPONSE}"
    ),
    panels=[
        Panel("P", "latency", "way", facet="token", log="xy", colours=COLOURS, show=LABEL),
        Panel("way", "knee", kind="bars"),
    ],
    paper={
        "sk_knee_standard": ("knee", {"way": THEIRS}),
        "sk_knee_segment": ("knee", {"way": OURS}),
    },
    derive=measured_knees,
    claims=[
        Claim("a longer prompt takes longer", rises("latency", "P")),
        Claim("the knee moves with the rows", bounded("knee", 3.5 * 128, 4.5 * 128, way=OURS)),
    ],
    shown=lambda row, quantity: quantity == "knee",
    report=report,
    measure=True,
    repeats=3,
    real=real_beams,
)

if __name__ == "__main__":
    STUDY.main()
