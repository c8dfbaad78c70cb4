"""Messages between stages: plain numbers, as JSON, and rows of activations with them.

JSON becomes plain values only: a message runs no code by itself, as pickle's bytes could. Nothing
else of it is checked, and native.cpp writes where a plan says. So only those whom you trust may
reach the group's port.
"""

import json
from collections import deque
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from attention import FlatBatch, Span


class Wire:
    """Messages between stages, in order.

    A message is plain numbers in lists (or None), and rows of activations with it. Sending does not
    wait. in_flight: batches; so of what was sent, all but the last so many has come. (gloo's
    `is_completed` says so only after a wait.)
    """

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device, in_flight: int = 1):
        self.hidden = hidden
        self.dtype = dtype
        self.device = device
        self.in_flight = in_flight
        self.control = dist.new_group(backend="gloo")  # plans and tokens
        # Activations. What a group sends and receives by NCCL goes one after the other, and a send
        # waits until the other stage receives. So two neighbours have a group of their own.
        pairs = pairwise(range(dist.get_world_size())) if device.type == "cuda" else ()
        self.ways = {pair: dist.new_group(list(pair)) for pair in pairs}
        # what must stay alive until it has left
        self.sending: deque[tuple[list, list[Tensor]]] = deque()

    def send(self, to: int, message: object, x: Tensor | None = None) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        header = torch.tensor([len(data), 0 if x is None else len(x)])
        works = [dist.isend(each, to, group=self.control) for each in (header, data)]
        if x is not None:
            works.append(dist.isend(x.contiguous(), to, group=self.way(dist.get_rank(), to)))
        self.sending.append((works, [header, data, x]))
        self.flush(self.in_flight)

    def receive(self, source: int) -> tuple[object, Tensor | None]:
        """The next message, and x (T, H) if there was one."""
        header = torch.empty(2, dtype=torch.long)
        dist.recv(header, source, group=self.control)
        size, rows = header.tolist()
        data = torch.empty(size, dtype=torch.uint8)
        x = None
        dist.recv(data, source, group=self.control)
        if rows:
            x = torch.empty(rows, self.hidden, dtype=self.dtype, device=self.device)
            dist.recv(x, source, group=self.way(source, dist.get_rank()))
        return json.loads(data.numpy().tobytes()), x

    def way(self, source: int, to: int) -> dist.ProcessGroup | None:
        """The group that activations take; None: the default group, gloo on CPUs."""
        return self.ways.get((source, to))

    def flush(self, most: int = 0) -> None:
        """Wait until everything has left, but for the last `most` messages."""
        while len(self.sending) > most:
            for work in self.sending.popleft()[0]:
                work.wait()


def plan_of(flat: FlatBatch, ids: list[int]) -> list:
    """What the stages after the first need to know of a batch. ids: of requests that get a token"""
    spans = [
        [span.rows.start, span.rows.stop, list(span.slots), list(span.contexts)]
        for span in flat.spans
    ]
    return [flat.slots.tolist(), flat.positions.tolist(), flat.logit_rows.tolist(), spans, ids]


def read_plan(plan: list, device: torch.device) -> tuple[FlatBatch, list[int]]:
    """`plan_of` reversed. The batch has no tokens: only stage 0 needs them."""
    *numbers, spans, ids = plan
    slots, positions, logit_rows = (torch.tensor(each, device=device).long() for each in numbers)
    parts = [
        Span(slice(start, stop), tuple(own), tuple(contexts))
        for start, stop, own, contexts in spans
    ]
    return FlatBatch(slots, slots, positions, parts, logit_rows), ids
