"""Runs batches on the model for real, and holds the cache and the slot of each request.

It is one `loop.Executor`; the other one is in simulate.py.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import Attention, FlatBatch, Span
from batch import Batch, Request
from configs import OPERATORS
from kvcache import KVCache
from loop import Result
from model import Transformer, untimed
from sampling import sample


def synchronized_clock(device: torch.device) -> float:
    """Wait until the device has done the work of this stream. Then return the wall clock, in s."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


class OperatorTimer:
    """A `call` for `Transformer.forward` that times each operator (SARATHI, Fig 3 and 10)."""

    def __init__(self, device: torch.device):
        self.slept = 0.0  # s that timing itself adds: none here; more/fast/cuda.py has some
        self.seconds = dict.fromkeys(OPERATORS, 0.0)

    def __call__(self, name: str, operator: Any, *args: Any) -> Any:
        start = time.perf_counter()
        result = operator(*args)
        self.seconds[name] += time.perf_counter() - start
        return result


TIMERS = {"cpu": OperatorTimer}  # by kind of device: more/fast/cuda.py has one for GPUs


class ModelExecutor:
    """The model, its cache, and a back end of attention. cost: see `loop.Executor`."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: Attention,
        time_operators: bool = False,
        cost: Callable[[Batch], float] | None = None,
    ):
        self.model = model
        self.cache = cache
        self.attention = attention
        self.time_operators = time_operators
        self.cost = cost
        self.slot_of: dict[int, int] = {}  # by request id
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))

    def execute(self, batch: Batch) -> Result:
        start = self.now()
        flat = self.flatten(batch)
        device = self.model.device
        timer = TIMERS[device.type](device) if self.time_operators else None
        logits = self.forward(flat, timer or untimed)  # (S, vocab)
        tokens = self.choose(batch, logits)
        # A batch may sample no token (no last chunk, no decode). Then nothing above has waited for
        # the GPU.
        synchronized_clock(device)
        seconds = self.now() - start
        if timer is None:
            return Result(tokens, seconds)
        return Result(tokens, seconds - timer.slept, timer.seconds)

    def choose(self, batch: Batch, logits: Tensor) -> list[int]:
        """A token for each request of `batch.sampled`. logits (S, vocab)."""
        return sample(logits, [request.sampler for request in batch.sampled])

    def forward(self, flat: FlatBatch, call: Callable) -> Tensor:
        return self.model(flat, self.cache, self.attention, call)

    def release(self, request: Request) -> None:
        self.cache.free(self.slot_of.pop(request.request_id))

    def flatten(self, batch: Batch) -> FlatBatch:
        """Lay a batch out as rows, chunks first, and take its places in the cache."""
        tokens: list[int] = []  # of each row
        slots: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []  # the rows that yield a token
        spans: list[Span] = []
        for chunk in batch.chunks:
            request = chunk.request
            end = chunk.start + chunk.length
            # the first chunk has no slot yet (more/paged/: it may start after 0)
            if chunk.start == 0 or request.request_id not in self.slot_of:
                self.slot_of[request.request_id] = self.cache.allocate(request)
            slot = self.slot_of[request.request_id]
            place = self.cache.extend(slot, chunk.length)
            assert place == chunk.start, "cache and scheduler disagree about a request's length"
            rows = slice(len(tokens), len(tokens) + chunk.length)
            spans.append(Span(rows, (slot,), (end,)))
            tokens.extend(request.tokens(chunk.start, end))
            slots.extend([slot] * chunk.length)
            positions.extend(range(chunk.start, end))
            if chunk.is_last:
                logit_rows.append(len(tokens) - 1)
        if batch.decodes:
            first = len(tokens)
            decode_slots = [self.slot_of[request.request_id] for request in batch.decodes]
            places = [self.cache.extend(slot, 1) for slot in decode_slots]
            tokens.extend([request.output[-1] for request in batch.decodes])
            slots.extend(decode_slots)
            positions.extend(places)
            contexts = tuple([place + 1 for place in places])
            spans.append(Span(slice(first, len(tokens)), tuple(decode_slots), contexts))
            logit_rows.extend(range(first, len(tokens)))
        columns = self.to_device([tokens, slots, positions])  # (3, T)
        return FlatBatch(*columns.unbind(), spans, self.to_device(logit_rows))

    def to_device(self, numbers: list) -> Tensor:
        """Whole numbers as a tensor of int64. (By numpy: it reads lists faster.)"""
        return torch.from_numpy(np.array(numbers, dtype=int)).to(self.model.device)
