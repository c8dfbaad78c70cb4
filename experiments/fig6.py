"""SARATHI, Fig 6: which keys the queries of a chunk may see, iteration by iteration.

    python experiments/fig6.py              the masks of attention.chunk_mask, which the engine uses
    python experiments/fig6.py --measure    and the tokens of chunked prefills against those of
                                            whole ones, on this machine

The example is the paper's: chunks of four tokens, three iterations. Query i sees keys 0 to i,
whatever chunk it is in; stacked, the three masks are the lower triangle of a whole prefill.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

from batch import Request
from experiments.lib import measuring
from experiments.lib.common import Point, Record, newest_measured
from experiments.lib.figure import Figure, Scale
from experiments.lib.look import COLOURS, panels

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


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    """Share of greedy tokens that stay the same when prompts are chunked, by chunk size."""
    record = Record("fig6", *measuring.measured_on(llm))
    (length,), (batch_size,) = scale.lengths, scale.batch_sizes

    def outputs(policy: str, chunk_size: int) -> list[int]:
        requests = [Request(i, range(length // 2 + i), 16) for i in range(batch_size)]
        done = measuring.generate(llm, requests, policy, chunk_size)
        return [token for output in done for token in output.token_ids]

    whole = outputs("baseline", 1)
    for chunk_size in scale.chunk_sizes:
        chunked = outputs("sarathi", chunk_size)
        same = sum(one == other for one, other in zip(chunked, whole, strict=True)) / len(whole)
        series = "output tokens equal to the whole prefill's"
        record.add(series, 100 * same, "%", chunk_size, "C")
    return record


def draw_mask(axes: plt.Axes, number: int) -> None:
    """One iteration: the Boolean matrix itself, cell by cell."""
    from attention import chunk_mask  # see `predict`

    start, end = number * CHUNK_SIZE, (number + 1) * CHUNK_SIZE
    mask = chunk_mask(start, CHUNK_SIZE).tolist()  # (4, end)
    axes.imshow(mask, cmap=ListedColormap(["white", COLOURS["sky"]]), vmin=0, vmax=1)
    for row, cells in enumerate(mask):
        for column, seen in enumerate(cells):
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


def draw(points: list[Point]) -> plt.Figure:
    figure, [grid] = panels(1, CHUNKS, 17 / CHUNKS, 4.4, width_ratios=[1, 2, 3])
    for number, axes in enumerate(grid):
        draw_mask(axes, number)
    note = "1, blue: seen. 0, white: masked"
    if measured := newest_measured(points):
        where = f"{measured[0].model}, {measured[0].hardware}"
        shares = "".join(f"; C = {point.x:g}: {point.y:.4g} %" for point in measured)
        note += f"\nmeasured, {where}: greedy tokens equal to whole prefills'{shares}"
    figure.supxlabel(note, fontsize=13)
    figure.suptitle(
        "SARATHI Fig 6: what the queries (q) of each chunk see of the keys (k); left of the red"
        " line: the cache",
        fontsize=17,
    )
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

main = FIGURE.main

if __name__ == "__main__":
    main()
