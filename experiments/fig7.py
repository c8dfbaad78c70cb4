"""SARATHI, Fig 7: an iteration takes longer with each new tile of 128 rows.

    python experiments/fig7.py              LLaMA-13B on an A6000, cost model beside the paper:
                                            seconds, no GPU needed
    python experiments/fig7.py --measure    and the real engine on this machine

The cost model's constants were fitted to the paper's three points and to Table 2 (fit_a6000.py);
the shape between them is the model's. A CPU has other tiles (AMX: 16 rows), so the steps of a
measured curve, if any, are elsewhere and smaller.
"""

from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from cli import run_main
from configs import GPUS, MODELS
from costmodel import TILE, CostModel, make_batch
from experiments.lib.common import Point, curves
from experiments.lib.figure import Figure, Scale, run_figure
from experiments.lib.look import COLOURS, measured_title, plot_points, star
from experiments.lib.measuring import measured_on, time_batches

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

MODEL, GPU = "llama-13b", "a6000"
prediction = partial(Point, "fig7", source="predicted", model=MODEL, hardware=GPU)


def sizes(largest: int, step: int) -> list[int]:
    """Prompt lengths: every `step`, and one more than each multiple of the tile."""
    return sorted(
        set(range(step, largest + 1, step)) | {tiles + 1 for tiles in range(TILE, largest, TILE)}
    )


def predict(quick: bool) -> list[Point]:
    cost = CostModel(MODELS[MODEL], GPUS[GPU])
    points = []
    for tokens in sizes(640, 128 if quick else 8):
        y = 1e3 * cost.seconds(make_batch([(0, tokens, tokens)]))
        points.append(prediction("prefill-only iteration", tokens, "tokens", y, "ms"))
    return points


def measure(llm: "LLM", scale: Scale) -> list[Point]:
    tokens = sizes(max(scale.lengths), 32)
    results = time_batches(llm, [make_batch([(0, n, n)]) for n in tokens], scale.repeats)
    name, where = "prefill-only iteration", measured_on(llm)
    return [
        Point("fig7", name, n, "tokens", 1e3 * result.seconds, "ms", *where)
        for n, result in zip(tokens, results, strict=True)
    ]


def draw(points: list[Point]) -> plt.Figure:
    measured = curves(points, "measured")
    figure, panels = plt.subplots(
        1,
        2 if measured else 1,
        figsize=(16 if measured else 9, 6),
        layout="constrained",
        squeeze=False,
    )
    titles = {
        "predicted": f"fitted: {MODEL} on {GPU}",
        "measured": measured_title(points) if measured else "",
    }
    for axes, source, marker in zip(panels[0], titles, ("", "o"), strict=False):
        (curve,) = curves(points, source).values()
        plot_points(
            axes,
            curve,
            color=COLOURS["blue"],
            marker=marker,
            label="fitted" if source == "predicted" else source,
        )
        axes.set_xticks(range(0, int(curve[-1].x) + 1, TILE))
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.set(xlabel="prompt tokens in the iteration", ylabel="ms", title=titles[source])
    (paper,) = curves(points, "paper").values()
    for number, point in enumerate(paper):
        star(panels[0][0], point.x, point.y, label="paper" if number == 0 else None)
        label = f"{point.x:g} tokens: {point.y:g} ms"
        panels[0][0].annotate(
            label, (point.x, point.y), (16, -12), textcoords="offset points", fontsize=13, va="top"
        )
    panels[0][0].legend(loc="lower right")
    figure.suptitle("SARATHI Fig 7: one token more, and another tile of 128 rows", fontsize=18)
    return figure


FIGURE = Figure(
    name="fig7",
    description=__doc__,
    paper={f"f7_{tokens}": ("prefill-only iteration", tokens) for tokens in (128, 256, 257)},
    predict=predict,
    measure=measure,
    draw=draw,
    scale=Scale(lengths=(512,), batch_sizes=(1,), repeats=15),
    quick_scale=Scale(lengths=(160,), batch_sizes=(1,), repeats=2),
    shown=lambda point: point.x % TILE in (0, 1),
)


def main() -> None:
    run_figure(FIGURE)


if __name__ == "__main__":
    run_main(main)
