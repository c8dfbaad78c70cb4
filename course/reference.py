"""The solutions: the project's own code, under the names that the stubs have. For checkers alone.

Where a stub has another form than the project, a short adapter stands between.
"""

from collections.abc import Sequence
from itertools import takewhile
from types import SimpleNamespace

from batch import Batch
from configs import GPU, ModelConfig
from costmodel import padded as padded_rows
from course.stubs import e13
from course.stubs.e07 import ATTENTION, COMPUTE, MEMORY, roofline
from pipeline.account import BUBBLES, PipelineTrace, Step
from pipeline.phases import share_out as steal
from scheduler import Sarathi, SarathiServe  # noqa: F401  (solutions of E6 and E8)
from serving.search import percentile
from timeline import Life, Trace


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    weights = model.n_layer * model.layer_weights
    size = 2 * weights + cached * model.kv_bytes_per_token()
    return max(size / gpu.bandwidth, 2 * rows * weights / gpu.peak)


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int | None]) -> SimpleNamespace:
    """`ModelExecutor.flatten`, on lists."""
    import torch  # heavy, and only four exercises need it

    from course.drive import FIELDS
    from executor import ModelExecutor
    from kvcache import KVCache

    executor = ModelExecutor.__new__(ModelExecutor)
    executor.cache = KVCache.__new__(KVCache)
    executor.cache.used, executor.cache.slots, executor.cache.length = used, len(used), 10**6
    executor.slot_of, executor.model = slot_of, SimpleNamespace(device=torch.device("cpu"))
    flat = executor.flatten(batch)
    return SimpleNamespace(**{name: getattr(flat, name).tolist() for name in FIELDS})


def padded(rows: int) -> int:
    return padded_rows(rows)


def seconds(batch: Batch, model: ModelConfig, gpu: GPU) -> float:
    """The short law of the exercise. `CostModel` prices waves, masks and hybrid batches, too."""

    def product(rows: int, inputs: int, outputs: int) -> float:
        size = 2 * (inputs * outputs + rows * (inputs + outputs))
        return roofline(2 * padded(rows) * inputs * outputs, size, gpu, COMPUTE)

    kv, channels = model.kv_bytes_per_token(), model.n_layer * model.n_head * model.head_dim
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


def life_of(times: SimpleNamespace) -> Life:
    return Life(0, times.arrival, 1, times.scheduled, times.tokens)


def ttft(times: SimpleNamespace) -> float:
    return life_of(times).ttft


def tbts(times: SimpleNamespace) -> list[float]:
    return life_of(times).tbt


def stalls(times: SimpleNamespace, bound: float) -> list[tuple[float, float]]:
    found = Trace(lives={0: life_of(times)}).stalls(bound)
    return [(start, long) for _, start, long in found]


def p99(requests: list[SimpleNamespace]) -> float:
    lives = {i: life_of(times) for i, times in enumerate(requests)}
    return percentile(Trace(lives=lives).tbts, 99)


def starts(seconds: list[list[float]], micro_batches: int) -> list[list[float]]:
    """A clock for the rule of `pipeline.simulate.run_pipeline`, without its queue."""
    free, found = [0.0] * len(seconds[0]), []
    for number, work in enumerate(seconds):
        back = number - micro_batches
        now, row = found[back][-1] + seconds[back][-1] if back >= 0 else 0.0, []
        for stage, length in enumerate(work):
            row.append(max(now, free[stage]))
            now = free[stage] = row[-1] + length
        found.append(row)
    return found


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    """The account of `PipelineTrace`, its causes summed up."""
    trace = PipelineTrace(len(seconds[0]), 1)
    for work, row in zip(seconds, starts, strict=True):
        trace.record(Step(0, 0, 1, list(row), list(work)), Batch([], []), [])
    trace.close()
    named = {"start-up": trace.idle["start-up"], "drain": trace.idle["drain"]}
    bubble = sum(trace.idle[cause] for cause in (*BUBBLES, "starved"))
    return {"bubble": bubble, **named}


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    return steal("window", own, withheld, total, groups, 0, most)


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
    left = [len(prompt) for prompt in run.prompts]
    outputs = [0] * len(left)
    for chunks, decodes in run.batches:
        ready = [i for i, rest in enumerate(left) if rest == 0 and outputs[i] < run.most[i]]
        rows = sum(length for _, _, length in chunks) + len(decodes)
        if set(ready) - set(decodes) or (chunks and rows > run.chunk_size) or len(chunks) > 1:
            return True
        started = [i for i, rest in enumerate(left) if 0 < rest < len(run.prompts[i])]
        new = [i for i, rest in enumerate(left) if rest == len(run.prompts[i])]
        for i, start, length in chunks:
            if i != [*started, *new, i][0] or length < 1 or start != len(run.prompts[i]) - left[i]:
                return True
            left[i] -= length
            outputs[i] += left[i] == 0
            if left[i] and rows < run.chunk_size:
                return True
        free = len(ready) + len(started) < run.max_batch_size
        if not chunks and rows < run.chunk_size and (started or (free and new)):
            return True
        for i in decodes:
            if i not in ready:
                return True
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
