"""The solutions, under the names that the stubs have. For checkers alone.

They are the project's own code, or do what it does in the form of the stub: tests/test_course.py.
`course.plants.right` puts all of them into the stubs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING

from batch import Batch
from configs import GPU, ModelConfig
from costmodel import padded as padded_rows
from course.stubs import e13
from course.stubs.e05 import Rows
from course.stubs.e07 import ATTENTION, COMPUTE, MEMORY, roofline
from more.serving.search import percentile
from scheduler import Sarathi, SarathiServe  # noqa: F401  (solutions of E6 and E8)

if TYPE_CHECKING:  # torch is heavy; where these methods run, the stub of E2 has imported both
    from torch import Tensor

    from kvcache import CacheError  # noqa: TC004


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    weights = model.n_layer * model.layer_weights
    size = 2 * weights + cached * model.kv_bytes_per_token()
    return max(size / gpu.bandwidth, 2 * rows * weights / gpu.peak)


class Slots:
    def allocate(self) -> int:
        if None not in self.used:
            raise CacheError("no slot is free")
        slot = self.used.index(None)
        self.used[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        if self.used[slot] is None:
            raise CacheError("it is free")
        self.used[slot] = None

    def extend(self, slot: int, tokens: int) -> int:
        start = self.used[slot]
        if start is None or start + tokens > self.length:
            raise CacheError("they do not fit")
        self.used[slot] = start + tokens
        return start

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        for cache, new in ((self.k, k), (self.v, v)):
            cache[layer][:, slots, positions] = new.transpose(0, 1)


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int | None]) -> Rows:
    tokens = []
    slots = []
    positions = []
    logit_rows = []
    for chunk in batch.chunks:
        request = chunk.request
        end = chunk.start + chunk.length
        if chunk.start == 0:
            slot_of[request.request_id] = used.index(None)
            used[slot_of[request.request_id]] = 0
        slot = slot_of[request.request_id]
        tokens += request.tokens(chunk.start, end)
        slots += [slot] * chunk.length
        positions += range(chunk.start, end)
        used[slot] += chunk.length
        if chunk.is_last:
            logit_rows.append(len(tokens) - 1)
    for request in batch.decodes:
        slot = slot_of[request.request_id]
        logit_rows.append(len(tokens))
        tokens.append(request.output[-1])
        slots.append(slot)
        positions.append(used[slot])
        used[slot] += 1
    return Rows(tokens, slots, positions, logit_rows)


def padded(rows: int) -> int:
    return padded_rows(rows)


def seconds(batch: Batch, model: ModelConfig, gpu: GPU) -> float:
    """The short law of the exercise. `CostModel` prices waves, masks and hybrid batches, too."""

    def product(rows: int, inputs: int, outputs: int) -> float:
        size = 2 * (inputs * outputs + rows * (inputs + outputs))
        return roofline(2 * padded(rows) * inputs * outputs, size, gpu, COMPUTE)

    kv = model.kv_bytes_per_token()
    channels = model.n_layer * model.n_head * model.head_dim
    layer = sum(product(batch.num_tokens, *shape) for shape in model.linears.values())
    total = model.n_layer * layer
    if batch.sampled:
        total += product(len(batch.sampled), model.hidden, model.vocab_size)
    for chunk in batch.chunks:
        keys = chunk.start + chunk.length
        size = keys * kv + 4 * chunk.length * channels
        total += roofline(4 * chunk.length * keys * channels, size, gpu, ATTENTION)
    read = sum(request.context + 1 for request in batch.decodes)
    return total + read * kv / (gpu.bandwidth * MEMORY)


def ttft(times: SimpleNamespace) -> float:
    return times.tokens[0] - times.arrival


def tbts(times: SimpleNamespace) -> list[float]:
    return [b - a for a, b in pairwise(times.tokens)]


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    return [(a, b - a) for a, b in pairwise(times.tokens) if b - a > bound]


def p99(requests: list[SimpleNamespace]) -> float:
    return percentile([gap for times in requests for gap in tbts(times)], 99)


def starts(seconds: list[list[float]], micro_batches: int) -> list[list[float]]:
    """A clock for the rule of `more.pipeline.simulate.run_pipeline`, without its queue."""
    free = [0.0] * len(seconds[0])
    found = []
    for number, work in enumerate(seconds):
        back = number - micro_batches
        now = found[back][-1] + seconds[back][-1] if back >= 0 else 0.0
        row = []
        for stage, length in enumerate(work):
            row.append(max(now, free[stage]))
            now = free[stage] = row[-1] + length
        found.append(row)
    return found


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    ends = [start + work for start, work in zip(starts[-1], seconds[-1], strict=True)]
    early = sum(starts[0])
    late = sum(max(ends) - end for end in ends)
    whole = len(ends) * max(ends) - sum(map(sum, seconds))
    return {"start-up": early, "drain": late, "bubble": whole - early - late}


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    size = min(most, -(-total // groups))
    keep = own[:size]
    more = max(0, size - len(keep))
    return keep + withheld[:more], withheld[more:] + own[len(keep) :]


def reorder(table: list[list[int]], parents: list[int]) -> list[list[int]]:
    """`SegmentMemory.reorder` and `extend`, on lists."""
    return [list(table[parent]) for parent in parents]


def extend(table: list[list[int]]) -> list[list[int]]:
    return [[*row, beam] for beam, row in enumerate(table)]


class Blocks(e13.Blocks):
    def hashes(self, tokens: Sequence[int]) -> list[int]:
        found: list = [None]
        for end in range(self.size, len(tokens) + 1, self.size):
            found.append(hash((found[-1], *tokens[end - self.size : end])))
        return found[1:]

    def hits(self, tokens: Sequence[int]) -> list[int]:
        known = takewhile(self.block_of.__contains__, self.hashes(tokens[:-1]))
        return [self.block_of[key] for key in known]

    def take(self) -> int:
        block = self.free.popleft()
        self.block_of.pop(self.hash_of.pop(block, None), None)
        self.references[block] = 1
        return block

    def allocate(self, tokens: Sequence[int]) -> list[int]:
        table = self.hits(tokens)
        for block in table:
            if not self.references[block]:
                self.free.remove(block)
            self.references[block] += 1
        while len(table) * self.size < len(tokens):
            table.append(self.take())
        return table

    def release(self, table: Sequence[int]) -> None:
        for block in reversed(table):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)


def bad(run: SimpleNamespace) -> bool:
    """A run that breaks K1 to K5. The project's rules are the checker's: this is an excerpt."""
    whole = [len(prompt) for prompt in run.prompts]
    left = list(whole)
    outputs = [0] * len(whole)
    for chunks, decodes in run.batches:
        ready = [i for i, rest in enumerate(left) if not rest and outputs[i] < run.most[i]]
        started = [i for i, rest in enumerate(left) if 0 < rest < whole[i]]
        new = [i for i, rest in enumerate(left) if rest == whole[i]]
        rows = sum(length for _, _, length in chunks) + len(decodes)
        if sorted(decodes) != ready or (chunks and rows > run.chunk_size) or len(chunks) > 1:
            return True
        free = len(ready) + len(started) < run.max_batch_size
        if not chunks and rows < run.chunk_size and (started or (free and new)):
            return True
        for i, start, length in chunks:
            left[i] -= length
            if i != (started + new)[0] or start + length != whole[i] - left[i]:
                return True
            if length < 1 or (left[i] and rows < run.chunk_size):
                return True
            outputs[i] += not left[i]
        for i in decodes:
            outputs[i] += 1
    return False


class Final(SarathiServe):
    """The baseline of the final project."""


def solution(file: str) -> SimpleNamespace:
    """The reference of an exercise, as a module would look."""
    if file == "e02":
        from kvcache import KVCache

        return SimpleNamespace(Slots=KVCache)
    if file in ("e03", "e04"):
        from attention import chunk_mask, reference

        return SimpleNamespace(chunk_mask=chunk_mask, attend=reference)
    return SimpleNamespace(**globals(), Mine=Final)
