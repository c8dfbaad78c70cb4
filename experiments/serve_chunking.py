"""Sarathi-Serve, Fig 9 and 14: what chunks cost a prefill, and what a prefill costs the decodes.

    python experiments/serve_chunking.py    predicted for Mistral-7B and Yi-34B on A100s: seconds

Each chunk reads the keys and values of all earlier chunks again, and the weights, and it starts
each kernel again. So a prompt in chunks takes longer than a whole one (Fig 14). But a whole prompt
that joins a batch of decodes makes all of them wait for it, and a chunk does not (Fig 9). The stars
of Fig 14 are the measured times in Sarathi-Serve's artefact. Fig 9's prompt length is not known to
us: its largest growth stands beside that of 4K prompt tokens and 8 decodes of 1K.
"""

import enter  # noqa: F401

from itertools import pairwise

from costmodel import CostModel, make_batch
from experiments.lib.claims import falls, rises
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import MISTRAL
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Panel, Study
from experiments.serve_phases import NODE
from more.serving.capacity import Deployment

CHUNKS = (512, 1024, 2048)
PROMPTS = (2048, 4096, 8192, 16384)
# Fig 9
PROMPT = 4096
DECODES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 1024
STATED = 8  # decodes, where its largest growth stands


def prefill_seconds(cost: CostModel, prompt: int, chunk: int) -> float:
    """A prompt alone, in chunks."""
    ends = [*range(0, prompt, chunk), prompt]
    return sum(cost.seconds(make_batch([(a, b - a, prompt)])) for a, b in pairwise(ends))


def overhead(engine: Deployment, L: int, C: int) -> Row:
    """Time of a prompt of L tokens in chunks of C over that of a whole one."""
    # in the artefact, the last one is the first decode's
    cost = engine.cost_model
    tokens = L - 1
    return {"time": prefill_seconds(cost, tokens, C) / prefill_seconds(cost, tokens, tokens)}


def growth(engine: Deployment, C: int, B: int) -> Row:
    """Of an iteration of B decodes that the last C tokens of a prompt join."""
    seconds = engine.cost_model.seconds
    last = (PROMPT - C, C, PROMPT)
    decoding = seconds(make_batch(decodes=B, context=CONTEXT))
    return {"growth": seconds(make_batch([last], B, CONTEXT)) / decoding}


def largest(rows: Rows) -> None:
    """What the paper states of its smallest chunk, in %."""
    times = rows.where("time", C=CHUNKS[0])
    rows.add(times[0], which="largest", C=CHUNKS[0], overhead=100 * (max(times.column("time")) - 1))


FIG_9 = f"(Fig 9) an iteration that the last C tokens of {PROMPT} join"
SHOW = {"xlabel": f"decodes in the batch, {CONTEXT} tokens each"}


STUDY = Study(
    "serve_chunking",
    __doc__,
    [
        Sweep(overhead, [NODE], cases(L=PROMPTS, C=CHUNKS)),
        Sweep(growth, [MISTRAL], cases(B=DECODES, C=(*CHUNKS, PROMPT))),
    ],
    units={"time": "x", "overhead": "%", "growth": "x"},
    title="Sarathi-Serve Fig 14 and 9: the price of chunks, and of whole prompts (predicted)",
    panels=[
        Panel(
            "L", "time", "C", title="(Fig 14) a prompt in chunks over a whole one", rule=1, log="x"
        ),
        Panel("B", "growth", "C", title=FIG_9, log="xy", show=SHOW),
    ],
    paper={
        "ss_fig14_overhead": ("overhead", {"which": "largest"}),
        "ss_fig9_full": ("growth", {"C": PROMPT, "B": STATED}),
        **{f"ss_fig14_{L}_{C}": ("time", {"L": L, "C": C}) for L in PROMPTS for C in CHUNKS},
    },
    derive=largest,
    claims=lambda rows: {
        "the longer the chunk, the longer the decodes wait": rises(rows, "growth", "C"),
        "more decodes take longer by themselves": falls(rows, "growth", "B"),
        "longer chunks shorten a prefill": falls(rows, "time", "C"),
    },
)

if __name__ == "__main__":
    STUDY.main()
