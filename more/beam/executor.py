"""Runs batches that may hold beam searches, beside the chunks and decodes of other requests.

A search prefills like any request: into one slot of the cache, and in chunks if the policy makes
chunks. All its beams begin with the logits of the last prompt token. After that, each decode has
BW rows.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention import FlatBatch, reference, sdpa, span_by_span
from batch import BROKEN, Batch, Request
from executor import ModelExecutor
from loop import Loop
from more.beam import native
from more.beam.attention import plain, with_beams
from more.beam.memory import MEMORIES, BeamSpan, SegmentMemory, StandardMemory
from more.beam.request import ENDED, BeamRequest, count_beams
from more.beam.search import best_candidates
from more.loading.variants import Windowed, near
from sampling import sample


class BeamExecutor(ModelExecutor):
    """A `ModelExecutor` that also runs beams. It takes over the slots and the clock of `before`.

    backend: the name of the attention. With "native", beams attend in C++, too.
    """

    def __init__(self, before: ModelExecutor, backend: str):
        parts = before.model, before.cache, before.attention, before.time_operators
        super().__init__(*parts, before.cost)
        self.slot_of = before.slot_of
        self.origin = before.origin
        written_out = plain(reference if backend == "math" else sdpa)
        of_beams = native.attention if backend == "native" else written_out
        self.attention = with_beams(before.attention, of_beams)
        window = self.model.config.window
        in_window = partial(near, window=window)
        self.in_window = with_beams(span_by_span(in_window), plain(in_window, window))
        self.memories: dict[int, SegmentMemory | StandardMemory] = {}  # by request id

    def forward(self, flat: FlatBatch, call: Callable) -> Tensor:
        if not isinstance(self.model, Windowed):
            return super().forward(flat, call)
        own = {"in_window": self.in_window}
        return self.model(flat, self.cache, self.attention, call, **own)

    def flatten(self, batch: Batch) -> FlatBatch:
        """Rows of beams come last. All other rows are as in a batch without beams."""
        others, searches = apart(batch.decodes)
        flat = super().flatten(Batch(batch.chunks, others))
        tokens = []
        slots = []
        positions = []
        for request in searches:
            memory = self.memories[request.request_id]
            memory.extend()
            first = len(flat.tokens) + len(tokens)
            slot = self.slot_of[request.request_id]
            place = memory.prompt + memory.steps - 1
            span = BeamSpan(slice(first, first + request.beam_width), (slot,), (place + 1,), memory)
            flat.spans.append(span)
            tokens += request.search.tokens
            slots += [slot] * request.beam_width
            positions += [place] * request.beam_width
        if searches:
            columns = self.to_device([tokens, slots, positions])  # (3, beams)
            first = len(flat.tokens)
            flat.tokens = torch.cat((flat.tokens, columns[0]))
            flat.slots = torch.cat((flat.slots, columns[1]))
            flat.positions = torch.cat((flat.positions, columns[2]))
            own = torch.arange(first, len(flat.tokens), device=self.model.device)
            flat.logit_rows = torch.cat((flat.logit_rows, own))
        return flat

    def choose(self, batch: Batch, logits: Tensor) -> list[int]:
        """Samples for ordinary requests; a step for each search. logits (S, vocab)."""
        others, decoding = apart(batch.decodes)
        last = [chunk.request for chunk in batch.chunks if chunk.is_last]
        single = [*last, *others]  # requests with one row of logits each
        ordinary = [row for row, request in enumerate(single) if not is_beam(request)]
        starting = [row for row, request in enumerate(single) if is_beam(request)]
        chosen: dict[int, int] = {}  # by request id
        if ordinary:
            requests = [single[row] for row in ordinary]
            found = sample(logits[ordinary], [request.sampler for request in requests])
            chosen.update(zip([request.request_id for request in requests], found, strict=True))
        searching = [single[row] for row in starting] + decoding
        if searching:
            own = torch.tensor([*starting, *range(len(single), len(logits))])
            for request in searching:
                request.search = request.search or request.make_search()
            searches = [request.search for request in searching]
            every = best_candidates(searches, logits[own.to(logits.device)])
            for request, candidates in zip(searching, every, strict=True):
                if candidates:
                    request.search.step(candidates)
                found = self.go_on(request) if candidates else BROKEN
                chosen[request.request_id] = found
        return [chosen[request.request_id] for request in batch.sampled]

    def go_on(self, request: BeamRequest) -> int:
        """Keep the caches of the beams that survive. Returns the best beam's token, or ENDED."""
        search = request.search
        own = request.request_id
        if search.done:
            # the scheduler ends a request itself at max_tokens
            return search.tokens[0] if search.steps == request.max_tokens else ENDED
        if own in self.memories:
            self.memories[own].reorder(search.parents)
        else:
            slot = self.slot_of[own]
            prompt = len(request.prompt)
            memory = MEMORIES[request.cache]
            self.memories[own] = memory(self.cache, slot, prompt, request.beam_width)
        return search.tokens[0]

    def release(self, request: Request) -> None:
        super().release(request)
        self.memories.pop(request.request_id, None)


def is_beam(request: Request) -> bool:
    return isinstance(request, BeamRequest)


def apart(requests: list[Request]) -> tuple[list[Request], list[BeamRequest]]:
    """Ordinary requests, and beam searches."""
    return [r for r in requests if not is_beam(r)], [r for r in requests if is_beam(r)]


def enable_beams(loop: Loop, backend: str) -> None:
    """Let a loop run beam searches, beside the requests that it runs already.

    backend: the name of the attention. The loop replays no CUDA graphs from now on: the shapes of
    a search grow.
    """
    if not isinstance(loop.executor, BeamExecutor):
        loop.executor = BeamExecutor(loop.executor, backend)
        count_beams(loop.scheduler)
