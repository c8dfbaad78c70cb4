"""SARATHI, Fig 6: which keys the queries of a chunk may see, iteration by iteration.

    python experiments/fig6.py              the masks of attention.chunk_mask, which the engine uses
    python experiments/fig6.py --measure    and the tokens of chunked prefills against those of
                                            whole ones, on this machine

The example is the paper's: chunks of four tokens, three iterations. Query i sees keys 0 to i,
whatever chunk it is in; stacked, the three masks are the lower triangle of a whole prefill.
"""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

from batch import Request
from cli import run_main
from experiments.lib.common import Point, curves
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import COLOURS
from experiments.lib.measuring import generate, measured_on

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

CHUNK_SIZE, CHUNKS = 4, 3


def predict(quick: bool) -> list[Point]:
    """Keys that each query sees, counted in our masks; and the paper's rule: i + 1 (Sec 4.2)."""
    from attention import chunk_mask  # here, since nothing else of the figure needs torch

    points = []
    for number in range(CHUNKS):
        start = number * CHUNK_SIZE
        for row, seen in enumerate(chunk_mask(start, CHUNK_SIZE).sum(dim=1).tolist()):
            for source, y in (("predicted", seen), ("paper", start + row + 1)):
                what = (f"chunk {number + 1}", start + row, "query", y, "keys seen")
                points.append(Point("fig6", *what, source, "any model", "any hardware"))
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    """Share of greedy tokens that stay the same when prompts are chunked, by chunk size."""

    def outputs(policy: str, chunk_size: int) -> list[int]:
        requests = [
            Request(i, range(scale.lengths[0] // 2 + i), 16) for i in range(scale.batch_sizes[0])
        ]
        return [token for o in generate(llm, requests, policy, chunk_size) for token in o.token_ids]

    whole, points = outputs("baseline", 1), []
    for chunk_size in scale.chunk_sizes:
        same = sum(
            a == b for a, b in zip(outputs("sarathi", chunk_size), whole, strict=True)
        ) / len(whole)
        series = "output tokens equal to the whole prefill's"
        points.append(Point("fig6", series, chunk_size, "C", 100 * same, "%", *measured_on(llm)))
    return points


def draw(points: list[Point]) -> plt.Figure:
    """Each panel is the Boolean matrix itself, drawn cell by cell."""
    from attention import chunk_mask  # see `predict`

    figure, panels = plt.subplots(
        1, CHUNKS, figsize=(17, 4.4), layout="constrained", width_ratios=[1, 2, 3]
    )
    for number, axes in enumerate(panels):
        start, end = number * CHUNK_SIZE, (number + 1) * CHUNK_SIZE
        mask = chunk_mask(start, CHUNK_SIZE)  # (4, end)
        axes.imshow(mask.numpy(), cmap=ListedColormap(["white", COLOURS["sky"]]), vmin=0, vmax=1)
        for (row, column), seen in (
            (place, mask[place].item())
            for place in ((r, c) for r in range(CHUNK_SIZE) for c in range(end))
        ):
            style = {"ha": "center", "va": "center", "color": "black" if seen else "grey"}
            axes.text(column, row, "1" if seen else "0", **style)
        axes.axvline(start - 0.5, color=COLOURS["vermilion"], linewidth=4)
        axes.set_xticks(range(end), [f"k{i}" for i in range(end)])
        axes.set_yticks(range(CHUNK_SIZE), [f"q{i}" for i in range(start, end)])
        axes.set_xticks([i - 0.5 for i in range(end)], minor=True)
        axes.set_yticks([i - 0.5 for i in range(CHUNK_SIZE)], minor=True)
        axes.grid(False)
        axes.grid(which="minor", color="black", alpha=0.4)
        axes.tick_params(which="both", length=0)
        axes.set_title(f"iteration {number + 1}\nchunk_mask({start}, {CHUNK_SIZE})")
    measured = [point for curve in curves(points, "measured").values() for point in curve]
    note = "".join(f"; C = {point.x:g}: {point.y:.4g} %" for point in measured)
    found = (
        f"\nmeasured, {measured[0].model}, {measured[0].hardware}: greedy tokens equal to whole"
        f" prefills'{note}"
        if measured
        else ""
    )
    figure.suptitle(
        "SARATHI Fig 6: what the queries (q) of each chunk see of the keys (k); left of the red"
        " line: the cache",
        fontsize=17,
    )
    figure.supxlabel(f"1, blue: seen. 0, white: masked{found}", fontsize=13)
    return figure


FIGURE = Figure(
    name="fig6",
    description=__doc__,
    # the paper draws the masks and states no number: `predict` gives its rule as the paper's points
    paper={},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(4,), chunk_sizes=(16, 64, 128), repeats=1),
    quick_scale=Scale(lengths=(64,), batch_sizes=(2,), chunk_sizes=(8,), repeats=1),
    # bfloat16 rounds differently in each shape, and near-ties may fall the other way
    dtype="float32",
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
