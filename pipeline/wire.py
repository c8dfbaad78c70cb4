"""Messages between stages: plain numbers, as JSON, and rows of activations with them.

Anyone who can reach the group's port can join it and send any bytes. So no message may run code.
JSON becomes plain values only. (Bytes of pickle could become any object, and run code.)
Each number is checked before it is used as an index: native.cpp writes where a plan says.
"""

import json
import math
from collections import deque
from collections.abc import Collection
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from attention import FlatBatch, Span
from batch import BROKEN
from command.checks import UserError
from kvcache import KVCache
from pipeline.launch import NotMet

MOST_BYTES = 2**28  # of a message: more than any plan or list of times takes


class Wire:
    """Messages between stages, in order.

    A message is plain numbers in lists (or None), and rows of activations with it. Sending does not
    wait. most_rows: of activations, in one message. in_flight: batches; so of what was sent, all
    but the last so many has come. (gloo's `is_completed` says so only after a wait.)
    """

    def __init__(
        self, hidden: int, dtype: torch.dtype, device: torch.device, most_rows: int,
        in_flight: int = 1,
    ):  # fmt: skip
        self.hidden, self.dtype, self.device = hidden, dtype, device
        self.most_rows, self.in_flight = most_rows, in_flight
        try:
            self.control = dist.new_group(backend="gloo")  # plans and tokens
        except (ValueError, MemoryError) as error:  # somebody else has written into their store
            raise NotMet(f"stage {dist.get_rank()} cannot meet the others ({error})") from None
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
        """The next message, and x (T, H) if there was one. A UserError if it is not one of ours."""
        header = torch.empty(2, dtype=torch.long)
        dist.recv(header, source, group=self.control)
        size, rows = header.tolist()
        if not (0 < size <= MOST_BYTES and 0 <= rows <= self.most_rows):
            raise foreign(source, f"{size} bytes and {rows} rows")
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, source, group=self.control)
        x = None
        if rows:
            x = torch.empty(rows, self.hidden, dtype=self.dtype, device=self.device)
            dist.recv(x, source, group=self.way(source, dist.get_rank()))
        try:
            return json.loads(data.numpy().tobytes()), x
        except (ValueError, RecursionError):
            raise foreign(source, "it is not JSON") from None

    def way(self, source: int, to: int) -> dist.ProcessGroup | None:
        """The group that activations take; None: the default group, gloo on CPUs."""
        return self.ways.get((source, to))

    def flush(self, most: int = 0) -> None:
        """Wait until everything has left, but for the last `most` messages."""
        while len(self.sending) > most:
            for work in self.sending.popleft()[0]:
                work.wait()


def foreign(source: int, why: str) -> UserError:
    """The error for a message that none of our stages can have sent."""
    return UserError(
        f"what came as stage {source}'s message is not a message of this pipeline ({why}): somebody"
        " else may have joined the group"
    )


def plan_of(flat: FlatBatch, ids: list[int]) -> list:
    """What the stages after the first need to know of a batch. ids: of requests that get a token"""
    spans = [
        [span.rows.start, span.rows.stop, list(span.slots), list(span.contexts)]
        for span in flat.spans
    ]
    return [flat.slots.tolist(), flat.positions.tolist(), flat.logit_rows.tolist(), spans, ids]


def read_plan(
    message: object, rows: int, cache: KVCache, ids: Collection[int], source: int
) -> tuple[FlatBatch, list[int]]:
    """The batch of a plan, and the ids of the requests that get a token; `plan_of` reversed.

    rows: of activations that came with it. ids: that there are. The batch has no tokens: only stage
    0 needs them. Raises UserError where a number would lead out of the cache or of the rows.
    """
    try:
        slots, positions, logit_rows, spans, own = message
        good = (
            rows > 0
            and fits(slots, (cache.slots,) * rows)
            and fits(positions, (cache.length,) * rows)
            and fits(logit_rows, [rows])
            and fits(own, (math.inf,) * len(logit_rows))
            and set(own) <= set(ids)
        )
        end = 0
        for first, last, span_slots, contexts in spans:
            good = good and first == end and fits([first, last], [rows + 1]) and first < last
            good = good and fits(span_slots, [cache.slots]) and len(span_slots) > 0
            good = good and (last - first) % len(span_slots) == 0
            good = good and fits(contexts, (cache.length + 1,) * len(span_slots))
            good = good and min(contexts) >= (last - first) // len(span_slots)
            end = last
        good = good and end == rows
    except (TypeError, ValueError):
        good = False
    if not good:
        raise foreign(source, "it is no plan of a batch")
    whole = [
        torch.tensor(each, dtype=torch.long, device=cache.k.device)
        for each in (slots, positions, logit_rows)
    ]
    parts = [
        Span(slice(first, last), tuple(span_slots), tuple(contexts))
        for first, last, span_slots, contexts in spans
    ]
    return FlatBatch(whole[0], *whole[:2], parts, whole[2]), own


def fits(value: object, shape: object) -> bool:
    """Whether a value has a shape: a tuple of shapes, one for each; a list of one, for all; a type;
    a range; or a number, for whole numbers from 0 that are below it.
    """
    if isinstance(shape, tuple | list):
        if not isinstance(value, list):
            return False
        own = shape * len(value) if isinstance(shape, list) else shape
        return len(value) == len(own) and all(map(fits, value, own))
    if isinstance(shape, type):
        return isinstance(value, shape) and (shape is not float or math.isfinite(value))
    start, end = (shape.start, shape.stop) if isinstance(shape, range) else (0, shape)
    return type(value) is int and start <= value < end


def read_tokens(message: object, count: int, vocabulary: int, source: int) -> list[int]:
    """`count` token ids below `vocabulary`, or BROKEN; or a UserError."""
    if not fits(message, (range(BROKEN, vocabulary),) * count):
        raise foreign(source, f"it is not a list of {count} tokens")
    return message


def read_seconds(message: object, source: int) -> float:
    """A time, or a UserError."""
    if not fits(message, float):
        raise foreign(source, "it is no time")
    return message


def read_times(message: object, count: int, source: int) -> list[tuple[float, float]]:
    """Start and end of `count` steps, in seconds, or a UserError."""
    if not fits(message, ((float, float),) * count):
        raise foreign(source, f"it is not a list of {count} times")
    return [(start, end) for start, end in message]
