"""Segment KV, Fig 7: latency of the first and of the next token, by length of the prompt.

    python experiments/segment_prompts.py              predicted for Llama2-13B on a Max 1550 tile
    python experiments/segment_prompts.py --measure    and a small model on this CPU, three engines

One prompt of 32 to 4096 tokens, a response of 32, BW = 4. The next token is the mean from the
second to the last. lib/segment.py says what the three ways are. The paper sees a knee, up to which
the first token's latency hardly grows, and does not define it. For us, the knee is the shortest
prompt whose first token takes at least twice as long as at 32 tokens.
"""

import enter  # noqa: F401

from functools import partial

from experiments.lib import segment
from experiments.lib.beam_engines import MEASURED
from experiments.lib.claims import bounded, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Rows
from experiments.lib.segment import COLOURS, OURS, THEIRS, WAYS, WIDTH
from experiments.lib.study import Panel, Study

ENGINE = segment.PricedBeams("llama2-13b")
RESPONSE = 32
PROMPTS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
THEIR_LONGEST = 1024  # tokens: transformers is measured up to there. Four times the rows take long
GROWTH = 2  # times the first token's latency at the shortest prompt: the knee


def knee(engine: segment.PricedBeams, way: str) -> dict[str, int]:
    """Tokens: the shortest prompt that takes GROWTH times what the shortest drawn one takes."""
    least = GROWTH * engine.first_token(way, 1, WIDTH, PROMPTS[0])
    lengths = range(PROMPTS[0], PROMPTS[-1] + 1)
    return {"knee": next(n for n in lengths if engine.first_token(way, 1, WIDTH, n) >= least)}


def measured_knees(rows: Rows) -> None:
    """As `knee`, among the lengths that ran. None: it does not grow so much."""
    for way, curve in rows.where(token="first token").by("way").items():
        reached = [row for row in curve if row["latency"] >= GROWTH * curve[0]["latency"]]
        if reached:
            rows.add(way=way, knee=reached[0]["P"])


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
        Panel(
            "P",
            "latency",
            "way",
            facet="token",
            log="xy",
            colours=COLOURS,
            show={"xlabel": "prompt (tokens)"},
        ),
        Panel("way", "knee", kind="bars"),
    ],
    paper={
        "sk_knee_standard": ("knee", {"way": THEIRS}),
        "sk_knee_segment": ("knee", {"way": OURS}),
    },
    derive_measured=measured_knees,
    claims=lambda rows: {
        "a longer prompt takes longer": rises(rows, "latency", "P"),
        "the knee moves with the rows": bounded(rows, "knee", 3.5 * 128, 4.5 * 128, way=OURS),
    },
    shown=lambda row, quantity: quantity == "knee",
    report=partial(segment.print_latencies, keys=("P",)),
    **MEASURED,
)


if __name__ == "__main__":
    STUDY.main()
