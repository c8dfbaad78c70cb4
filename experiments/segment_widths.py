"""Segment KV, Fig 8: first and next token of four models, at beam widths 1 and 4.

    python experiments/segment_widths.py              predicted for tiles of the Max 1550: seconds
    python experiments/segment_widths.py --measure    and a small model on this CPU

One prompt of 1024 tokens, a response of 128. GPT-J-6B and Llama2-13B run on one tile, OPT-30B on
two, Bloom-176B on eight (tensor parallel). The next token is the mean from the second to the last.
lib/segment.py says what the three ways are; gains are over `transformers`. The paper states ranges
over its four models: at BW = 1, of both tokens together. Its abstract's "up to 7x" is the first
token's at BW = 4; of the next token's at BW = 4 it states no number.

With the cause `unfused operators`, transformers also runs the operators that the paper fuses away
(lib/segment.py).

What is measured: prompts of 512, a response of 32, three engines.
"""

import enter  # noqa: F401

from functools import partial
from itertools import product

from experiments.lib import segment
from experiments.lib.beam_engines import MEASURED
from experiments.lib.claims import bounded, flat
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.segment import COLOURS, OURS, TILE, TILES, TOKENS, UNFUSED_ALONE
from experiments.lib.study import Panel, Study

# predicted
PROMPT = 1024
RESPONSE = 128
WIDTHS = (1, 4)
CAUSE = UNFUSED_ALONE
# what the paper states of its models: of which width and tokens, the smallest or the largest gain
STATED = {
    "sk_latency_bw1_low": (1, "both tokens", "smallest"),
    "sk_latency_bw1_high": (1, "both tokens", "largest"),
    "sk_first_bw4_low": (4, "first token", "smallest"),
    "sk_first_bw4_high": (4, "first token", "largest"),
}
NUMBERS = [paper_numbers()[name] for name in STATED]
STATED_IN_WORDS = "{:g} to {:g}, {:g} to {:g}".format(*NUMBERS)


def summary(rows: Rows) -> None:
    """What the paper states, of its models together."""
    for (width, token, which), cause in product(STATED.values(), (None, CAUSE)):
        tokens = TOKENS if token == "both tokens" else (token,)
        own = rows.where("gain", model=tuple(TILES), BW=width, token=tokens, cause=cause)
        found = own.column("gain")
        case = {"BW": width, "token": token, "which": which} | ({"cause": cause} if cause else {})
        gain = min(found) if which == "smallest" else max(found)
        every = {"model": "four models", "hardware": TILE.name}
        rows.add(rows[0] | every, **case, gain=gain)


def slowed(engine: segment.PricedBeams, cause: str, P: int, R: int, BW: int) -> list[Row]:
    """The gains alone: ours takes as long as without the cause."""
    found = [row for row in segment.latencies(engine, P, R, BW) if "gain" in row]
    return [{key: y for key, y in row.items() if key != "latency"} for row in found]


STUDY = Study(
    "segment_widths",
    __doc__,
    [
        Sweep(
            slowed,
            [segment.PricedBeams(model, CAUSE) for model in TILES],
            cases(cause=CAUSE, P=PROMPT, R=RESPONSE, BW=WIDTHS),
        ),
        Sweep(
            segment.latencies,
            [segment.PricedBeams(model) for model in TILES],
            cases(P=PROMPT, R=RESPONSE, BW=WIDTHS),
            measured=cases(P=512, R=32, BW=WIDTHS),
            quick_measured=cases(P=24, R=3, BW=WIDTHS),
        ),
    ],
    units={"latency": "ms", "gain": "x"},
    title="Segment KV Fig 8: BS = 1, and latencies at BW = 4",
    panels=[
        Panel(
            "model",
            "latency",
            "way",
            "bars",
            facet="token",
            where={"BW": 4, "cause": None},
            colours=COLOURS,
        ),
        *(
            Panel(
                ("BW", "token", "which"),
                "gain",
                kind="bars",
                where={"model": "four models", "cause": cause},
                title=title,
            )
            for cause, title in (
                (None, "gain over transformers"),
                (CAUSE, f"the same, with its {CAUSE}\n(the paper: {STATED_IN_WORDS})"),
            )
        ),
    ],
    columns=4,
    paper={
        name: ("gain", {"BW": width, "token": token, "which": which, "cause": None})
        for name, (width, token, which) in STATED.items()
    },
    derive=summary,
    claims=lambda rows: {
        "four beams gain as many times as rows run": bounded(
            rows, "gain", 3.5, 4.0, token="first token", BW=4, cause=None
        ),
        f"with {CAUSE}, one beam gains what the paper says": bounded(
            rows, "gain", *NUMBERS[:2], BW=1, cause=CAUSE
        ),
        "... and so do four, for the first token": bounded(
            rows,
            "gain",
            *NUMBERS[2:],
            BW=4,
            token="first token",
            cause=CAUSE,
        ),
        "one beam gains little": bounded(rows, "gain", 0.999, 1.2, BW=1, cause=None),
        "four beams take about as long as one": flat(
            rows, "latency", "BW", way=OURS, token="next token"
        ),
    },
    shown=lambda row, quantity: "which" in row,
    report=partial(segment.print_latencies, keys=("model", "BW")),
    **MEASURED,
)

if __name__ == "__main__":
    STUDY.main()
