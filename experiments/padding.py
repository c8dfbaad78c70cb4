"""SARATHI, Sec 4.1: what padding costs request-level scheduling, where requests differ in length.

    python experiments/padding.py      predicted for LLaMA-13B on an A6000: seconds, no GPU needed

FasterTransformer runs a batch of requests as one rectangle. So a short request is padded to the
longest, and goes on until the last one has ended. Our `request_level` does neither: a request has
its own length, and leaves when it has ended. Here both run, and SARATHI, on requests of evenly
spread lengths up to 1024. Throughput counts the requests' own tokens, not the padding.

All requests of the paper's figures have one length. There, padding costs nothing, so the baseline
of these figures is the paper's.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from batch import Batch, Request
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments.lib import steady
from experiments.lib.common import Point, Record, curves, progress
from experiments.lib.figure import Figure
from experiments.lib.look import panels, plot_points
from experiments.lib.papers import LOOKS
from loop import Result
from simulate import CostExecutor

NAME, MODEL, GPU = "padding", "llama-13b", "a6000"
LONGEST, BATCH_SIZE, CHUNK_SIZE = 1024, 18, 256
RATIO = steady.balance(CHUNK_SIZE, BATCH_SIZE)  # P:D
BATCHES = 5
SHORTEST = (1024, 896, 768, 640, 512, 384, 256, 128, 64)
PADDED = "request_level, padded"


class PaddedExecutor(CostExecutor):
    """Prices every batch as the rectangle that it would be with padding.

    It is for `request_level`: all requests of a batch start together, and none joins them.
    """

    def __init__(self, cost_model: CostModel):
        super().__init__(cost_model)
        self.rows = 0  # requests that the batch began with

    def execute(self, batch: Batch) -> Result:
        if batch.chunks:
            self.rows, longest = len(batch.chunks), max(chunk.length for chunk in batch.chunks)
            padded = make_batch([(0, longest, longest)] * self.rows)
        else:
            context = 1 + max(request.context for request in batch.decodes)
            padded = make_batch(decodes=self.rows, context=context)
        seconds = self.cost_model.seconds(padded)
        self.clock += seconds
        return Result([0] * len(batch.sampled), seconds)


def make_requests(shortest: int) -> list[Request]:
    """Lengths from `shortest` to LONGEST in even steps and mixed order; P:D is near RATIO."""
    count = BATCHES * BATCH_SIZE
    step = (LONGEST - shortest) / (count - 1)
    # 37 has no factor in common with the count, so this order takes each number once
    lengths = [round(shortest + (37 * i % count) * step) for i in range(count)]
    sizes = [steady.split(length, RATIO) for length in lengths]
    return [Request(i, range(prompt), decodes + 1) for i, (prompt, decodes) in enumerate(sizes)]


def throughput(executor: CostExecutor, requests: list[Request], policy: str) -> float:
    """Tokens per second, prompts and decodes, from the first request to the last."""
    tokens = sum(len(request.prompt) + request.max_tokens - 1 for request in requests)
    trace = steady.run_priced(executor, requests, policy, CHUNK_SIZE, BATCH_SIZE)
    return tokens / trace.seconds


def predict(quick: bool) -> list[Point]:
    record, cost = Record(NAME, MODEL, GPU), CostModel(MODELS[MODEL], GPUS[GPU])
    for shortest in progress(SHORTEST[::4] if quick else SHORTEST, "lengths"):
        for series, policy, executor in (
            (PADDED, "request_level", PaddedExecutor(cost)),
            ("request_level", "request_level", CostExecutor(cost)),
            ("sarathi", "sarathi", CostExecutor(cost)),
        ):
            rate = throughput(executor, make_requests(shortest), policy)
            record.add(series, rate, "tokens/s", shortest, "shortest")
    return record


def draw(points: list[Point]) -> plt.Figure:
    figure, [[axes]] = panels(1, 1, 9, 6)
    for series, curve in curves(points, "predicted").items():
        colour, marker = LOOKS[series.split(",")[0]]
        dashed = {"linestyle": "--", "markerfacecolor": "white"} if series == PADDED else {}
        plot_points(axes, curve, color=colour, marker=marker, label=series, **dashed)
    axes.set(xlabel=f"shortest request, tokens (the longest: {LONGEST})", ylabel="tokens/s", ylim=0)
    axes.invert_xaxis()
    axes.set_title(f"{MODEL} on {GPU}, B = {BATCH_SIZE}, C = {CHUNK_SIZE} (predicted)")
    axes.legend(loc="lower left")
    figure.suptitle("Padding: request-level scheduling of requests that differ in length")
    return figure


FIGURE = Figure(NAME, __doc__, {}, predict, None, draw)
main = FIGURE.main

if __name__ == "__main__":
    main()
