"""Segment KV, Fig 8: first and next token of four models, at beam widths 1 and 4.

    python experiments/segment_widths.py              predicted for tiles of the Max 1550: seconds
    python experiments/segment_widths.py --measure    and two small models on this CPU

One prompt of 1024 tokens, a response of 128. GPT-J-6B and Llama2-13B run on one tile, OPT-30B on
two, Bloom-176B on eight (tensor parallel). The next token is the mean from the second to the last.
`experiments/lib/segment.py` says what the three ways are; gains are over `transformers`.

The paper states ranges over its four models. So the smallest and the largest gain stand beside
them. At BW = 1 its range is of both tokens together. Its "up to 7x" does not say of what: here it
stands beside the next token's largest gain at BW = 4.

What is measured: prompts of 512, a response of 32, three engines, --model (laptop) and gpt2-124m.
"""

import enter  # noqa: F401

from collections.abc import Generator
from typing import TYPE_CHECKING

from configs import MODELS
from experiments.lib import segment
from experiments.lib.beam_engines import RealBeams, real_beams
from experiments.lib.claims import Claim, bounded, flat
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Sweep, cases
from experiments.lib.rows import Rows
from experiments.lib.segment import COLOURS, OURS, THEIRS, TILE, TILES, TOKENS, say
from experiments.lib.study import Panel, Study

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

PROMPT, RESPONSE = 1024, 128  # predicted
WIDTHS = (1, 4)
SECOND = "gpt2-124m"  # 124 M parameters; measured beside --model
ENGINE = segment.PricedBeams("llama2-13b")
# what the paper states of its models: of which width and tokens, the smallest or the largest gain
STATED = {
    "sk_latency_bw1_low": (1, "both tokens", "smallest"),
    "sk_latency_bw1_high": (1, "both tokens", "largest"),
    "sk_first_bw4_low": (4, "first token", "smallest"),
    "sk_first_bw4_high": (4, "first token", "largest"),
    "sk_latency": (4, "next token", "largest"),
}


def two_models(llm: "LLM", repeats: int) -> Generator[RealBeams]:
    """One model after the other; its six searches in alternation. The newest: that of --model."""
    if repeats > 1 and llm.config.name != SECOND:
        yield from real_beams(llm, repeats, MODELS[SECOND])
    yield from real_beams(llm, repeats)


def summary(rows: Rows) -> None:
    """What the paper states, of its models together."""
    if rows.sources() != ["predicted"]:
        return
    for width, token, which in STATED.values():
        tokens = TOKENS if token == "both tokens" else (token,)
        found = rows.where("gain", model=tuple(TILES), BW=width, token=tokens).column("gain")
        case = {"BW": width, "token": token, "which": which}
        gain = min(found) if which == "smallest" else max(found)
        every = {"model": "four models", "hardware": TILE.name}
        rows.add(rows[0] | every, **case, gain=gain)


def print_misses() -> None:
    """Why the paper's gains are larger than what bytes and FLOPs say."""
    one, four = (ENGINE.search(OURS, 1, width, PROMPT, RESPONSE) for width in WIDTHS)
    theirs = ENGINE.search(THEIRS, 1, WIDTHS[-1], PROMPT, RESPONSE)
    stated = paper_numbers()["sk_latency"]
    wait = 1e3 * (stated * four.next - theirs.next)
    say(
        "The paper: BW = 4 costs almost the same as BW = 1. Predicted with segments, for the next",
        f"token of {ENGINE.model}: {four.next / one.next:.2f}x.",
    )
    say(
        "BW = 1: nothing is shared. Only the copies of the cache are left to gain. The paper's",
        "kernels are fused, and its baseline's are not: our cost model fuses both.",
    )
    say(
        f"BW = 4, first token: we price the rows, {WIDTHS[-1]} times as many. transformers also",
        "writes and reads the scores: segment_prompts.py says what that takes.",
    )
    say(
        f"BW = 4, next token: bytes explain {theirs.next / four.next:.1f}x for {ENGINE.model}. If",
        f"{stated:g}x was its gain, its baseline takes {wait:.0f} ms more than that, or",
        f"{wait / ENGINE.config.n_layer:.1f} ms in each layer. The paper says that a layer has",
        "hundreds of operators there, and that most of them move little. We do not know what one",
        "takes, and price none.",
    )


def report(rows: Rows) -> None:
    segment.print_latencies(rows.where(source="predicted"), "model", "BW")
    print_misses()
    newest = rows.newest().where("latency", source="measured")
    if not newest:
        return
    segment.print_latencies(newest, "model", "BW")
    own = newest.where(way=OURS, token="next token")
    one, four = (own.one("latency", BW=width) for width in WIDTHS)
    say(
        f"Measured, BW = 4 over BW = 1, next token with segments: {four / one:.2f}x.",
        "First token, BW = 4: transformers runs 4 times the rows. Next token: every engine reads",
        "all weights, and no cache saves that.",
    )


STUDY = Study(
    "segment_widths",
    __doc__,
    [
        Sweep(
            segment.latencies,
            [segment.PricedBeams(model) for model in TILES],
            cases(P=PROMPT, R=RESPONSE, BW=WIDTHS),
            measured=cases(P=512, R=32, BW=WIDTHS),
            quick_measured=cases(P=24, R=3, BW=WIDTHS),
        )
    ],
    units={"latency": "ms", "gain": "x"},
    title="Segment KV Fig 8: BS = 1",
    panels=[
        Panel("model", "latency", "way", "bars", facet=("token", "BW"), colours=COLOURS),
        Panel(("BW", "token", "which"), "gain", kind="bars", where={"model": "four models"}),
    ],
    columns=3,
    paper={
        name: ("gain", {"BW": width, "token": token, "which": which})
        for name, (width, token, which) in STATED.items()
    },
    derive=summary,
    claims=[
        Claim(
            "four beams gain as many times as rows run",
            bounded("gain", 3.5, 4.0, token="first token", BW=4),
        ),
        Claim("one beam gains little", bounded("gain", 0.999, 1.2, BW=1)),
        Claim(
            "four beams take about as long as one",
            flat("latency", "BW", way=OURS, token="next token"),
        ),
    ],
    shown=lambda row, quantity: "which" in row,
    report=report,
    measure=True,
    repeats=3,
    real=two_models,
)

if __name__ == "__main__":
    STUDY.main()
