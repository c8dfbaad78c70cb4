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

from batch import Batch, Request
from costmodel import CostModel, make_batch
from experiments.lib import steady
from experiments.lib.claims import Claim, rises
from experiments.lib.engines import Priced, Sweep, cases
from experiments.lib.study import Panel, Study
from loop import Result
from simulate import CostExecutor

LONGEST, BATCH_SIZE, CHUNK_SIZE = 1024, 18, 256
RATIO = steady.balance(CHUNK_SIZE, BATCH_SIZE)  # P:D
BATCHES = 5
SHORTEST = (1024, 896, 768, 640, 512, 384, 256, 128, 64)
PADDED = "padded_request_level"
POLICIES = (PADDED, "request_level", "sarathi")


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


def throughput(engine: Priced, shortest: int, policy: str) -> dict[str, float]:
    """Tokens per second, prompts and decodes, from the first request to the last."""
    requests = make_requests(shortest)
    tokens = sum(len(request.prompt) + request.max_tokens - 1 for request in requests)
    executor = (PaddedExecutor if policy == PADDED else CostExecutor)(engine.cost_model)
    policy = "request_level" if policy == PADDED else policy
    trace = steady.run_priced(executor, requests, policy, CHUNK_SIZE, BATCH_SIZE)
    return {"throughput": tokens / trace.seconds}


STUDY = Study(
    "padding",
    __doc__,
    [
        Sweep(
            throughput,
            [Priced("llama-13b", "a6000")],
            cases(shortest=SHORTEST, policy=POLICIES),
            quick=cases(shortest=SHORTEST[::4], policy=POLICIES),
        )
    ],
    units={"throughput": "tokens/s"},
    title=f"Padding, where requests differ in length: B = {BATCH_SIZE}, C = {CHUNK_SIZE}",
    panels=[
        Panel(
            "shortest",
            "throughput",
            "policy",
            show={
                "xlabel": f"shortest request, tokens (the longest: {LONGEST})",
                "xlim": (1.05 * LONGEST, 0),
                "ylim": (0, None),
            },
        )
    ],
    claims=[
        Claim(
            "the more lengths differ, the more padding costs",
            rises("throughput", "shortest", policy=PADDED),
        )
    ],
)

if __name__ == "__main__":
    STUDY.main()
