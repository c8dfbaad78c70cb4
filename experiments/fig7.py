"""SARATHI, Fig 7: an iteration takes longer with each new tile of 128 rows.

    python experiments/fig7.py              LLaMA-13B on an A6000, cost model beside the paper:
                                            seconds, no GPU needed
    python experiments/fig7.py --measure    and the real engine on this machine

The cost model's constants were fitted to the paper's three points and to Table 2 (fit_a6000.py);
the shape between them is the model's. A CPU has other tiles (AMX: 16 rows). A measured curve
therefore has other and smaller steps, or none.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from configs import GPUS, MODELS
from costmodel import TILE, CostModel, make_batch
from experiments.lib import look, measuring
from experiments.lib.common import Point, Record, curves
from experiments.lib.figure import Figure, Scale

MODEL, GPU, SERIES = "llama-13b", "a6000", "prefill-only iteration"


def sizes(largest: int, step: int) -> list[int]:
    """Prompt lengths: every `step`, and one more than each multiple of the tile."""
    return sorted({*range(step, largest + 1, step), *range(TILE + 1, largest + 1, TILE)})


def predict(quick: bool) -> list[Point]:
    record, cost = Record("fig7", MODEL, GPU), CostModel(MODELS[MODEL], GPUS[GPU])
    for tokens in sizes(640, 128 if quick else 8):
        ms = 1e3 * cost.seconds(make_batch([(0, tokens, tokens)]))
        record.add(SERIES, ms, "ms", tokens, "tokens")
    return record


def measure(llm: "measuring.LLM", scale: Scale) -> list[Point]:
    record, lengths = Record("fig7", *measuring.measured_on(llm)), sizes(max(scale.lengths), 32)
    batches = [make_batch([(0, tokens, tokens)]) for tokens in lengths]
    results = measuring.time_batches(llm, batches, scale.repeats)
    for tokens, result in zip(lengths, results, strict=True):
        record.add(SERIES, 1e3 * result.seconds, "ms", tokens, "tokens")
    return record


def draw(points: list[Point]) -> plt.Figure:
    rows = look.sources(points)
    figure, [grid] = look.panels(1, len(rows), 9 if len(rows) == 1 else 8, 6)
    titles = [f"fitted: {MODEL} on {GPU}", *[look.measured_title(points) for _ in rows[1:]]]
    for axes, source, title in zip(grid, rows, titles, strict=True):
        (curve,) = curves(points, source).values()
        label, marker = ("fitted", "") if source == "predicted" else ("measured", "o")
        style = {"color": look.COLOURS["blue"], "marker": marker, "label": label}
        look.plot_points(axes, curve, **style)
        axes.set_xticks(range(0, int(curve[-1].x) + 1, TILE))
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.set(xlabel="prompt tokens in the iteration", ylabel="ms", title=title)
    (paper,) = curves(points, "paper").values()
    look.stars(grid[0], paper)
    for point in paper:
        label = f"{point.x:g} tokens: {point.y:g} ms"
        style = {"textcoords": "offset points", "fontsize": 13, "va": "top"}
        grid[0].annotate(label, (point.x, point.y), (16, -12), **style)
    grid[0].legend(loc="lower right")
    figure.suptitle("SARATHI Fig 7: one token more, and another tile of 128 rows")
    return figure


FIGURE = Figure(
    name="fig7",
    description=__doc__,
    paper={f"f7_{tokens}": (SERIES, tokens) for tokens in (128, 256, 257)},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(1,), repeats=15),
    quick_scale=Scale(lengths=(160,), batch_sizes=(1,), repeats=2),
    shown=lambda point: point.x % TILE in (0, 1),
)

main = FIGURE.main

if __name__ == "__main__":
    main()
