"""SARATHI, Fig 6: which keys the queries of a chunk may see, iteration by iteration.

    python experiments/fig6.py      the masks of attention.chunk_mask, which the engine uses

The example is the paper's: chunks of four tokens, three iterations. Query i sees keys 0 to i,
whatever chunk it is in; stacked, the three masks are the lower triangle of a whole prefill.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

from experiments.lib.claims import Claims
from experiments.lib.engines import ANY, Sweep, cases
from experiments.lib.look import COLOURS, panels
from experiments.lib.rows import Row, Rows
from experiments.lib.study import Study

C = 4
CHUNKS = 3


def seen(_: object, chunk: int) -> list[Row]:
    """Keys that each query of a chunk sees, counted in our masks."""
    from attention import chunk_mask  # here, since nothing else of the figure needs torch

    start = (chunk - 1) * C
    counts = chunk_mask(start, C).sum(dim=1).tolist()
    return [{"query": start + row, "keys seen": count} for row, count in enumerate(counts)]


def draw_mask(axes: plt.Axes, number: int) -> None:
    """One iteration: the Boolean matrix itself, cell by cell."""
    from attention import chunk_mask  # see `seen`

    start = number * C
    end = (number + 1) * C
    mask = chunk_mask(start, C).tolist()  # (4, end)
    axes.imshow(mask, cmap=ListedColormap(["white", COLOURS["sky"]]), vmin=0, vmax=1)
    for row, cells in enumerate(mask):
        for column, one in enumerate(cells):
            style = {"ha": "center", "va": "center", "color": "black" if one else "grey"}
            axes.text(column, row, "1" if one else "0", **style)
    axes.axvline(start - 0.5, color=COLOURS["vermilion"], linewidth=4)
    axes.set_xticks(range(end), [f"k{i}" for i in range(end)])
    axes.set_yticks(range(C), [f"q{i}" for i in range(start, end)])
    axes.set_xticks([i - 0.5 for i in range(end)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(C)], minor=True)
    axes.grid(False)
    axes.grid(which="minor", color="black", alpha=0.4)
    axes.tick_params(which="both", length=0)
    axes.set_title(f"iteration {number + 1}\nchunk_mask({start}, {C})")


def draw(rows: Rows) -> plt.Figure:
    figure, [grid] = panels(1, CHUNKS, 17 / CHUNKS, 4.4, width_ratios=[1, 2, 3])
    for number, axes in enumerate(grid):
        draw_mask(axes, number)
    figure.supxlabel("1, blue: seen. 0, white: masked", fontsize=13)
    figure.suptitle(STUDY.title, fontsize=17)
    return figure


def claims(rows: Rows) -> Claims:
    """Query i sees i + 1 keys (Sec 4.2)."""
    found = {}
    for i, row in enumerate(rows):
        found[f"query {row['query']} sees {row['keys seen']} keys"] = row["keys seen"] == i + 1
    return {"stacked, the masks are the lower triangle": found}


STUDY = Study(
    "fig6",
    __doc__,
    [Sweep(seen, [ANY], cases(chunk=range(1, CHUNKS + 1)))],
    units={"keys seen": "keys"},
    title=(
        "SARATHI Fig 6: what the queries (q) of each chunk see of the keys (k); left of the red"
        " line: the cache"
    ),
    draw=draw,
    claims=claims,
    torch=True,
)


if __name__ == "__main__":
    STUDY.main()
