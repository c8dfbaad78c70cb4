"""Sarathi-Serve, Fig 9 and 14: what chunks cost a prefill, and what a prefill costs the decodes.

    python experiments/serve_chunking.py    predicted for Mistral-7B and Yi-34B on A100s: seconds

Each chunk reads the keys and values of all earlier chunks again, and the weights, and it starts
each kernel again. So a prompt in chunks takes longer than a whole one (Fig 14). But a whole prompt
that joins a batch of decodes makes all of them wait for it, and a chunk does not (Fig 9).

The stars of Fig 14 are the measured times in Sarathi-Serve's artefact. There, a prompt of 16K took
less time in chunks than at once. A kernel's work does not explain that. Fig 9's prompt length is
not known to us: its largest growth stands beside that of 4K prompt tokens and 8 decodes of 1K.
"""

import enter  # noqa: F401

from itertools import pairwise

import matplotlib.pyplot as plt

from costmodel import CostModel, make_batch
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure
from experiments.lib.look import COLOURS, SERIES, log_ticks, panels, plot_points, stars
from experiments.lib.papers import MISTRAL
from experiments.serve_phases import NODE

NAME = "serve_chunking"
CHUNKS, PROMPTS = (512, 1024, 2048), (2048, 4096, 8192, 16384)
# Fig 9
PROMPT, DECODES, CONTEXT = 4096, (1, 2, 4, 8, 16, 32, 64, 128), 1024
STATED = 8  # decodes, where its largest growth stands
WHOLE = f"whole prompt of {PROMPT}"


def prefill_seconds(cost: CostModel, prompt: int, chunk: int) -> float:
    """A prompt alone, in chunks."""
    ends = [*range(0, prompt, chunk), prompt]
    return sum(cost.seconds(make_batch([(a, b - a, prompt)])) for a, b in pairwise(ends))


def growth(cost: CostModel, chunk: int, decodes: int) -> float:
    """An iteration of decodes with the last chunk of a prompt, over one without."""
    decoding = cost.seconds(make_batch(decodes=decodes, context=CONTEXT))
    last = (PROMPT - chunk, chunk, PROMPT)
    return cost.seconds(make_batch([last], decodes, CONTEXT)) / decoding


def predict(quick: bool) -> list[Point]:
    record, cost = Record(NAME, NODE.model, NODE.hardware), NODE.cost_model
    for prompt in PROMPTS:
        tokens = prompt - 1  # as in the artefact, where the last token is the first decode's
        whole = prefill_seconds(cost, tokens, tokens)
        for chunk in CHUNKS:
            times = prefill_seconds(cost, tokens, chunk) / whole
            record.add(f"chunks of {chunk}", times, "x", prompt, "prompt tokens")
    largest = max(point.y for point in record if point.series == f"chunks of {CHUNKS[0]}")
    record.add(f"largest overhead of chunk {CHUNKS[0]}", 100 * (largest - 1), "%")
    joining, cost = Record(NAME, MISTRAL.model, MISTRAL.hardware), MISTRAL.cost_model
    for size in (1, STATED, 128) if quick else DECODES:
        for chunk in (*CHUNKS, PROMPT):
            series = WHOLE if chunk == PROMPT else f"last chunk of {chunk}"
            joining.add(series, growth(cost, chunk, size), "x", size, "decodes")
    return record + joining


def draw_overhead(axes: plt.Axes, points: list[Point]) -> None:
    found, paper = curves(points, "predicted"), curves(points, "paper")
    for chunk, (colour, marker) in zip(CHUNKS, SERIES, strict=False):
        name = f"chunks of {chunk}"
        plot_points(axes, found[name], color=colour, marker=marker, label=name)
        stars(axes, paper[name], color=colour, label=f"{name}, the artefact's")
    axes.axhline(1, color="black", linestyle=":", linewidth=1.2)
    log_ticks(axes, PROMPTS)
    axes.set(xlabel="prompt tokens", ylabel="time over that of the whole prompt")
    axes.set_title(f"(Fig 14) a prompt in chunks\n{NODE.model} on {NODE.hardware}")
    axes.set_ylim(top=1.45)
    axes.legend(ncols=2, loc="upper right", fontsize=12)


def draw_growth(axes: plt.Axes, points: list[Point]) -> None:
    found, paper = curves(points, "predicted"), curves(points, "paper")
    looks = [*SERIES[: len(CHUNKS)], (COLOURS["black"], "X")]
    names = [*[f"last chunk of {chunk}" for chunk in CHUNKS], WHOLE]
    for name, (colour, marker) in zip(names, looks, strict=True):
        plot_points(axes, found[name], color=colour, marker=marker, label=name)
    stars(axes, paper[WHOLE], label="paper: the largest")
    log_ticks(axes, DECODES)
    axes.set_yscale("log")
    axes.set_yticks((1, 2, 5, 10, 20, 40), ("1x", "2x", "5x", "10x", "20x", "40x"))
    axes.set_yticks([], minor=True)
    axes.set(
        xlabel=f"decodes in the batch, {CONTEXT} tokens each", ylabel="growth of the iteration"
    )
    axes.set_title(f"(Fig 9) decodes that a prompt joins\n{MISTRAL.model} on {MISTRAL.hardware}")
    axes.legend()


def draw(points: list[Point]) -> plt.Figure:
    figure, [[left, right]] = panels(1, 2, 7.6, 6.2)
    draw_overhead(left, points)
    draw_growth(right, points)
    figure.suptitle(
        "Sarathi-Serve Fig 14 and 9: the price of chunks, and of whole prompts (predicted)"
    )
    return figure


FIGURE = Figure(
    name=NAME,
    description=__doc__,
    paper={
        "ss_fig14_overhead": (f"largest overhead of chunk {CHUNKS[0]}", 0),
        "ss_fig9_full": (WHOLE, STATED),
        **{
            f"ss_fig14_{prompt}_{chunk}": (f"chunks of {chunk}", prompt)
            for prompt in PROMPTS
            for chunk in CHUNKS
        },
    },
    predict=predict,
    measure=None,
    draw=draw,
    software={where.gpu: "sarathi_serve" for where in (MISTRAL, NODE)},
)
main = FIGURE.main

if __name__ == "__main__":
    main()
