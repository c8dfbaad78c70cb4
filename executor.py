"""The two ways to run a batch, behind one interface: for real on a model, or priced by the cost
model.

    now() -> seconds      wait_until(moment)      execute(batch) -> Result      release(request)

The loop (`engine.run`) cannot tell them apart.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import Attend, synchronized_clock
from costmodel import CostModel
from kvcache import KVCache
from model import OPERATORS, FlatBatch, Span, Transformer, untimed
from sampling import sample
from scheduler import Batch, Request


@dataclass(slots=True)
class Result:
    """tokens: one for each request of `batch.sampled`. seconds: how long the batch took. operators:
    seconds of each, if timed.
    """

    tokens: list[int]
    seconds: float
    operators: dict[str, float] | None = None


class CostExecutor:
    """Runs nothing: asks the cost model for the seconds, and moves a virtual clock by them."""

    def __init__(self, cost_model: CostModel):
        self.cost_model = cost_model
        self.clock = 0.0

    def now(self) -> float:
        return self.clock

    def wait_until(self, moment: float) -> None:
        self.clock = moment

    def execute(self, batch: Batch) -> Result:
        seconds = self.cost_model.seconds(batch)
        self.clock += seconds
        return Result([0] * len(batch.sampled), seconds)

    def release(self, request: Request) -> None:
        pass


class OperatorTimer:
    """A `run` hook for `Transformer.forward`: seconds of each of the paper's operators (SARATHI,
    Fig 3 and 10).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = dict.fromkeys(OPERATORS, 0.0)

    def __call__(self, name: str, operator: Any, *args: Any) -> Any:
        start = synchronized_clock(self.device)
        result = operator(*args)
        self.seconds[name] += synchronized_clock(self.device) - start
        return result


class ModelExecutor:
    """Runs batches on the model for real. Holds the cache and the slot of each request."""

    def __init__(
        self, model: Transformer, cache: KVCache, attend: Attend, time_operators: bool = False
    ):
        self.model, self.cache, self.attend = model, cache, attend
        self.time_operators = time_operators
        self.slot_of: dict[int, int] = {}  # by request id
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))

    def execute(self, batch: Batch) -> Result:
        start = self.now()
        flat = self.flatten(batch)
        timer = OperatorTimer(self.model.device) if self.time_operators else None
        logits = self.forward(flat, timer or untimed)  # (S, vocab)
        tokens = sample(logits, [request.sampler for request in batch.sampled])
        # an iteration without a sampled token would end before its kernels do
        synchronized_clock(self.model.device)
        return Result(tokens, self.now() - start, timer.seconds if timer else None)

    def forward(self, flat: FlatBatch, run: Callable) -> Tensor:
        return self.model(flat, self.cache, self.attend, run)

    def release(self, request: Request) -> None:
        self.cache.free(self.slot_of.pop(request.request_id))

    def flatten(self, batch: Batch) -> FlatBatch:
        """Lay a batch out as rows, chunks first, and take its places in the cache."""
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        logit_rows: list[int] = []
        for chunk in batch.chunks:
            request, end = chunk.request, chunk.start + chunk.length
            if chunk.start == 0:
                self.slot_of[request.request_id] = self.cache.allocate()
            slot = self.slot_of[request.request_id]
            place = self.cache.extend(slot, chunk.length)
            assert place == chunk.start, (
                "the cache and the scheduler disagree about a request's length"
            )
            spans.append(Span(slice(len(tokens), len(tokens) + chunk.length), (slot,), (end,)))
            tokens.extend(request.tokens(chunk.start, end))
            slots.extend([slot] * chunk.length)
            positions.extend(range(chunk.start, end))
            if chunk.is_last:
                logit_rows.append(len(tokens) - 1)
        if batch.decodes:
            first = len(tokens)
            own = [self.slot_of[request.request_id] for request in batch.decodes]
            places = [self.cache.extend(slot, 1) for slot in own]
            tokens.extend([request.output[-1] for request in batch.decodes])
            slots.extend(own)
            positions.extend(places)
            spans.append(
                Span(slice(first, len(tokens)), tuple(own), tuple([place + 1 for place in places]))
            )
            logit_rows.extend(range(first, len(tokens)))
        # (3, T)
        rows = torch.from_numpy(np.array([tokens, slots, positions])).to(self.model.device)
        return FlatBatch(
            *rows.unbind(),
            spans,
            torch.from_numpy(np.array(logit_rows, dtype=int)).to(self.model.device),
        )
