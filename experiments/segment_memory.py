"""Segment KV, Fig 4: bytes of the two KV caches of a beam search, four models, by batch size.

    python experiments/segment_memory.py              computed: formulas (1) to (3); seconds
    python experiments/segment_memory.py --measure    and the real engine on this machine

Prompt and response have 1024 tokens each, BW = 4, fp16, at the last step. Standard holds everything
for each beam. Segment holds the prompt once, and the response in segments of 16 steps. GB are 10^9
bytes, as the paper's are. The formulas count the caches alone: no weights, no temporary copies.

What is measured are the bytes of the tensors that hold K and V, in a loop that runs the searches
for real: summed at the end of each iteration, and the largest of them. Segment: the slots that the
prompts lie in, and the responses. Standard: the copies of all beams.
"""

import enter  # noqa: F401

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from batch import Batch, Request
from beam.cost import cache_bytes
from beam.request import CACHES, BeamSearchParams
from configs import MODELS
from experiments.lib.claims import Claim, bounded
from experiments.lib.engines import Real, Sweep, cases
from experiments.lib.rows import Row, Rows
from experiments.lib.segment import COLOURS, TILE, TILES, WIDTH, say
from experiments.lib.study import Panel, Study
from loop import Result
from scheduler import make_scheduler

if TYPE_CHECKING:  # predicting needs no torch
    from engine import LLM

LENGTH = 1024  # tokens of the prompt, and of the response
STATED = "gptj-6b", 32  # the paper states numbers of this model at this BS


class Formula:
    """Bytes by formulas (2) and (3)."""

    hardware, bytes_per_value = "any hardware", 2

    def __init__(self, model: str) -> None:
        self.model, self.config = model, MODELS[model]

    def formula(self, cache: str, batch_size: int, length: int) -> int:
        """Of all K and V, when they are most. length: tokens of prompt, and of response."""
        shape = cache, batch_size, WIDTH, length, length
        return cache_bytes(self.config, *shape, self.bytes_per_value)

    held = formula


class RealCaches(Real):
    """Beside the formulas, the bytes of the tensors of real searches."""

    formula = Formula.formula

    def __init__(self, llm: "LLM", repeats: int) -> None:
        super().__init__(llm, repeats)
        self.config, self.bytes_per_value = llm.config, llm.dtype.itemsize

    def warm_up(self) -> None:
        """Bytes need none."""

    def held(self, cache: str, batch_size: int, length: int) -> int:
        return self.in_turn(lambda: largest_bytes(self.llm, cache, batch_size, length))


def real_caches(llm: "LLM", repeats: int) -> Generator[RealCaches]:
    yield RealCaches(llm, repeats)


def memory(engine: Formula | RealCaches, L: int, BS: int) -> list[Row]:
    """GB of both caches, and % more than the formula; segment's share of standard, in %."""
    found = {cache: engine.held(cache, BS, L) for cache in CACHES}
    rows = [
        {
            "cache": cache,
            "memory": held / 1e9,
            "more than the formula": 100 * (held / engine.formula(cache, BS, L) - 1),
        }
        for cache, held in found.items()
    ]
    return [*rows, {"segment of standard": 100 * found["segment"] / found["standard"]}]


def largest_bytes(llm: "LLM", cache: str, batch_size: int, length: int) -> int:
    """Bytes of all K and V, when they are most. length: tokens of prompt, and of response."""
    import torch  # predicting needs none of these

    from beam.executor import enable_beams
    from beam.outputs import beam_requests
    from executor import ModelExecutor
    from loop import Loop

    llm.resize_cache(batch_size, length)
    llm.model.reach(2 * length)  # the response follows the prompt
    scheduler = make_scheduler("request_level", batch_size, length)
    loop = Loop(scheduler, ModelExecutor(llm.model, llm.cache, llm.attend))
    enable_beams(loop, llm.attention)
    prompts = [Request(i, [1 + i] * length, length) for i in range(batch_size)]
    params = BeamSearchParams(WIDTH, length, ignore_eos=True)
    for request in beam_requests(prompts, params, cache, llm.config, llm.cache):
        loop.add(request)
    execute, held = loop.executor.execute, []

    def watched(batch: Batch) -> Result:
        """The last iteration frees all: look before that."""
        result = execute(batch)
        prompt = llm.cache.bytes if cache == "segment" else 0
        held.append(prompt + sum(memory.bytes for memory in loop.executor.memories.values()))
        return result

    loop.executor.execute = watched
    with llm.surroundings(), torch.inference_mode():
        loop.run()
    return max(held)


def report(rows: Rows) -> None:
    if measured := rows.newest().where("memory", source="measured"):
        length = measured[0]["L"]
        say(
            "The last output token is never an input: its K and V are never written. Standard",
            f"lacks them: 1 token of {2 * length}. Segment has a place for them, unless a segment",
            "would begin with it. Our standard cache also leaves each prompt in its slot, which is",
            f"not counted: {100 / (2 * WIDTH):g} % more at these lengths.",
        )
    model, size = STATED
    real = replace(MODELS[model], n_layer=28, n_head=16, n_kv_head=16, head_dim=256)
    sizes = []
    for cache in CACHES:
        held = cache_bytes(real, cache, size, WIDTH, LENGTH, LENGTH)
        sizes.append(f"{held / 1e9:.1f} GB ({cache})")
    say(
        f"The paper rounds. Its {model} has 32 layers and 32 heads of 128. The real one has 28",
        f"layers and 16 heads of 256, and would take {' and '.join(sizes)}.",
    )


STUDY = Study(
    "segment_memory",
    __doc__,
    [
        Sweep(
            memory,
            [Formula(model) for model in TILES],
            cases(L=LENGTH, BS=(1, 2, 4, 8, 16, 32, 64)),
            quick=cases(L=LENGTH, BS=(1, 32)),
            measured=cases(L=128, BS=(1, 2, 4, 8)),
            quick_measured=cases(L=34, BS=(1, 2)),
        )
    ],
    units={"memory": "GB", "more than the formula": "%", "segment of standard": "%"},
    title=(
        f"Segment KV Fig 4: cache of a beam search, BW = {WIDTH}; by formula for"
        f" {LENGTH} + {LENGTH} tokens, fp16 (line: a tile's memory)"
    ),
    panels=[
        Panel(
            "BS",
            "memory",
            "cache",
            facet="model",
            log="xy",
            where={"hardware": Formula.hardware},
            colours=COLOURS,
            rule=TILE.memory / 1e9,
        ),
        Panel("BS", "memory", "cache", where={"source": "measured"}, log="xy", colours=COLOURS),
    ],
    columns=3,
    paper={
        f"sk_kv_{cache}": ("memory", {"model": STATED[0], "BS": STATED[1], "cache": cache})
        for cache in ("standard", "segment")
    },
    claims=[Claim("one copy of the prompt takes less", bounded("segment of standard", 50, 75))],
    shown=lambda row, quantity: (
        row["source"] == "measured"
        or (quantity == "memory" and (row["model"], row["BS"]) == STATED)
        or (quantity == "segment of standard" and row["BS"] == STATED[1])
    ),
    report=report,
    measure=True,
    repeats=1,
    real=real_caches,
)

if __name__ == "__main__":
    STUDY.main()
