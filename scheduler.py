"""Who runs next: requests, chunks, batches, and one short class per scheduling policy.

Pure Python: no torch, no clock of its own. A scheduler is told the time, says which batch to run (`schedule`), and is told
which tokens came out of it (`update`). The same object drives the real model and the cost model.

A request of P prompt tokens first runs as *chunks* (its prefill, whole or in parts), then as one *decode* per iteration. The
last chunk already yields the first output token, so D decodes yield D + 1 output tokens, and at the end P + D tokens
have their keys and values in the cache.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs import UserError, lookup


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through the engine.

    prompt: token ids; `range(n)` serves as n placeholder tokens where only the length matters (simulation).
    max_tokens: output tokens after which the request ends with finish_reason "length".
    stop_ids: output tokens that end it at once, with finish_reason "stop".
    arrival: seconds on the engine's clock before which no scheduler sees it.
    """

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    prefilled: int = 0  # prompt tokens whose K and V are in the cache
    context: int = 0  # all tokens whose K and V are in the cache
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sampler: object = None  # what the executor needs to draw this request's tokens; schedulers never look at it

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise UserError(f"request {self.request_id}: the prompt is empty; it needs at least one token")
        if self.max_tokens < 1:
            raise UserError(f"request {self.request_id}: max_tokens is {self.max_tokens}; it must be at least 1")

    @property
    def in_prefill(self) -> bool:
        return self.prefilled < len(self.prompt)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens start .. start + length - 1 of one request, prefilled together (SARATHI, Sec 4.2)."""

    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """The last chunk of a prompt: the first output token is sampled from its last row."""
        return self.start + self.length == len(self.request.prompt)


@dataclass(slots=True)
class Batch:
    """What one iteration runs. Chunks only: prefill-only; decodes only: decode-only; both: a hybrid batch."""

    chunks: list[Chunk]
    decodes: list[Request]

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.length for chunk in self.chunks])

    @property
    def num_tokens(self) -> int:
        """T: rows of every fused linear operator."""
        return self.num_prefill_tokens + len(self.decodes)

    @property
    def sampled(self) -> list[Request]:
        """Requests that get a token from this batch, in the order in which the executor returns them."""
        return [chunk.request for chunk in self.chunks if chunk.is_last] + self.decodes


class Scheduler:
    """What all policies share: the queue, the running requests, and the bookkeeping after an iteration.

    A policy is a subclass with `schedule`. `waiting` is first come, first served; `running` holds at most
    `max_batch_size` requests (B: each of them holds one slot of the KV cache), in order of admission.
    """

    name = "?"

    def __init__(self, max_batch_size: int, chunk_size: int = 256):
        for option, value in (("max_batch_size", max_batch_size), ("chunk_size", chunk_size)):
            if value < 1:
                raise UserError(f"{option} is {value}; it must be at least 1")
        self.max_batch_size = max_batch_size  # B
        self.chunk_size = chunk_size  # C; policies that run whole prompts ignore it
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def schedule(self, now: float) -> Batch | None:
        """The next batch, or None when there is nothing to run. `now`: seconds on the engine's clock."""
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Queue a request that has arrived."""
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> Request | None:
        """Move the oldest waiting request into the running batch, if one waits and a slot is free."""
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return None
        request = self.waiting.popleft()
        assert request.prefilled == 0 and request not in self.running, "a request holds one slot"
        self.running.append(request)
        return request

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Account for a batch that ran; `tokens` belong to `batch.sampled`. Returns the requests that have ended."""
        assert len(batch.chunks) + len(batch.decodes) <= self.max_batch_size, "a batch exceeds B"
        for chunk in batch.chunks:
            request = chunk.request
            assert chunk.start == request.prefilled and chunk.length > 0, "prompt tokens run exactly once and in order"
            request.prefilled = request.context = chunk.start + chunk.length
            assert request.prefilled <= len(request.prompt), "a chunk runs past its prompt"
        for request in batch.decodes:
            request.context += 1
        ended = []
        for request, token in zip(batch.sampled, tokens, strict=True):
            request.output.append(token)
            if token in request.stop_ids:
                request.finish_reason = "stop"
            elif len(request.output) == request.max_tokens:
                request.finish_reason = "length"
            else:
                continue
            ended.append(request)
        if ended:
            self.running = [request for request in self.running if request.finish_reason is None]
        return ended


class Baseline(Scheduler):
    """Request-level scheduling, as FasterTransformer does it: the paper's baseline (SARATHI, Sec 4.1 and 5.1).

    A batch of requests is admitted only when the one before has ended. It runs one prefill-only iteration of
    whole prompts, then decode-only iterations until its last request is done.
    """

    name = "baseline"

    def schedule(self, now: float) -> Batch | None:
        if not self.running:
            while self.admit():
                pass
            return Batch([Chunk(request, 0, len(request.prompt)) for request in self.running], []) if self.running else None
        return Batch([], list(self.running))


class IterationLevel(Scheduler):
    """What Orca and SARATHI share: requests enter and leave between any two iterations, and chunks run beside decodes.

    A batch is the chunks that the policy picks, and one decode of every other running request (SARATHI, Sec 4.5: its Orca is its
    own mixed batching, without a bound on the prefills of a batch). The policies differ in `prefills` alone.
    """

    def schedule(self, now: float) -> Batch | None:
        decodes = [request for request in self.running if not request.in_prefill]
        chunks = self.prefills(len(decodes))
        return Batch(chunks, decodes) if chunks or decodes else None

    def prefills(self, num_decodes: int) -> list[Chunk]:
        """The chunks of the next batch, which also runs `num_decodes` decodes."""
        raise NotImplementedError


class Orca(IterationLevel):
    """Iteration-level scheduling with whole prompts (SARATHI, Sec 5.2): a request enters as soon as a slot is free.

    How well its prefills meet decodes is the workload's doing. If all requests start and end together, it is the baseline; if they are
    staggered, so that one starts at a time, it is SARATHI with C = the longest prompt (and room for the decodes).
    """

    name = "orca"

    def prefills(self, num_decodes: int) -> list[Chunk]:
        chunks = []
        while (request := self.admit()) is not None:
            chunks.append(Chunk(request, 0, len(request.prompt)))
        return chunks


class Sarathi(IterationLevel):
    """Chunked prefills and decode-maximal batching (SARATHI, Sec 4.2 to 4.4).

    Each batch has at most one prefill chunk; every other slot is a decode. The chunk shrinks to C minus the number of decodes,
    so that the fused linears see exactly C tokens: choose C as a multiple of the GPU's tile (Sec 4.4). The chunk keeps at
    least one token, for else a prompt would starve behind C decodes. Without a prompt to prefill, decodes run alone.
    """

    name = "sarathi"

    def prefills(self, num_decodes: int) -> list[Chunk]:
        request = next((request for request in self.running if request.in_prefill), None) or self.admit()
        if request is None:
            return []
        room = max(1, self.chunk_size - num_decodes)
        return [Chunk(request, request.prefilled, min(room, len(request.prompt) - request.prefilled))]


POLICIES: dict[str, type[Scheduler]] = {policy.name: policy for policy in (Baseline, Orca, Sarathi)}


def make_scheduler(policy: str, max_batch_size: int, chunk_size: int) -> Scheduler:
    """A scheduler by its policy's name."""
    return lookup(POLICIES, policy, "policy")(max_batch_size, chunk_size)
