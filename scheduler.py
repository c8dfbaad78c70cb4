"""Who runs next: requests, chunks, batches, and one short class per scheduling policy.

Pure Python: no torch, no clock of its own. A scheduler is told the time, says which batch to run
(`schedule`), and is told which tokens came out of it (`update`). The same object drives the real
model and the cost model.

A request of P prompt tokens first runs as *chunks* (its prefill, whole or in parts), then as one
*decode* per iteration. The last chunk already yields the first output token, so D decodes yield D +
1 output tokens, and at the end P + D tokens have their keys and values in the cache.

The policies, one class each, below `Scheduler`:

    request_level   FasterTransformer: a batch of requests starts and ends together (SARATHI's
                    baseline)
    orca            iteration-level: whole prompts join the decodes as soon as a slot is free
    vllm_v0         whole prompts first and alone; decodes wait for them
    sarathi         one chunk beside all decodes, C tokens together
    sarathi_serve   all decodes, then as many chunks as the token budget C has room for
    dynamic         the same, but a request's chunks shrink as its prefill goes on
    chunked_only    half of sarathi_serve: chunks, but never beside decodes
    hybrid_only     the other half: prompts beside decodes, but never cut into chunks
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs import UserError, lookup


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way through the engine.

    prompt: token ids; `range(n)` serves as n placeholder tokens where only the length matters
    (simulation). max_tokens: output tokens after which the request ends with finish_reason
    "length". stop_ids: output tokens that end it at once, with finish_reason "stop". arrival:
    seconds on the engine's clock before which no scheduler sees it.
    """

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    prefilled: int = 0  # tokens of its prefill whose K and V are in the cache
    context: int = 0  # all tokens whose K and V are in the cache
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    # tokens to prefill: the prompt and, after a preemption, the output so far
    prefill_length: int = field(init=False)
    preemptions: int = 0
    # what the executor needs to draw this request's tokens; schedulers never look at it
    sampler: object = None

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise UserError(
                f"request {self.request_id}: the prompt is empty; it needs at least one token"
            )
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise UserError(
                f"request {self.request_id}: max_tokens is {self.max_tokens}; it must be a whole"
                " number, at least 1"
            )
        if not 0 <= self.arrival < math.inf:
            raise UserError(
                f"request {self.request_id}: arrival is {self.arrival}; it must be a number of"
                " seconds, at least 0"
            )
        self.prefill_length = len(self.prompt)

    @property
    def in_prefill(self) -> bool:
        return self.prefilled < self.prefill_length

    @property
    def most_cached(self) -> int:
        """Tokens that the cache holds at its end, at most: the last output token is never fed back."""
        return len(self.prompt) + self.max_tokens - 1

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Tokens start .. end - 1 of what is prefilled."""
        if end <= len(self.prompt):
            return self.prompt[start:end]
        return [*self.prompt, *self.output][start:end]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens start .. start + length - 1 of one request, prefilled together (SARATHI, Sec
    4.2).
    """

    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """The last chunk of a prefill: an output token is sampled from its last row."""
        return self.start + self.length == self.request.prefill_length


@dataclass(slots=True)
class Batch:
    """What one iteration runs. Chunks only: prefill-only; decodes only: decode-only; both: a hybrid
    batch.
    """

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
        """Requests that get a token from this batch, in the order in which the executor returns
        them.
        """
        return [chunk.request for chunk in self.chunks if chunk.is_last] + self.decodes


NOTHING_SCHEDULED = "requests wait or run, nobody else will arrive, and it schedules nothing"


class Scheduler:
    """What all policies share: the queue, the running requests, the memory, and the bookkeeping
    after an iteration.

    A policy is a subclass with `schedule`. `waiting` is first come, first served; `running` holds
    at most `max_batch_size` requests (B: each of them holds one slot of the KV cache), in order of
    admission.

    cache_tokens: what the KV cache holds, in tokens of all requests together; None: as much as B
    requests ever need. A running request takes its whole prefill at once, then a token per decode.
    When the decodes' next tokens do not fit, the newest request is preempted: it loses its cache,
    waits at the head of the queue, and prefills its prompt and its output so far again (vLLM's
    recomputation). The oldest is never preempted, so that the work always ends.
    """

    name = "?"

    def __init__(self, max_batch_size: int, chunk_size: int = 256, cache_tokens: int | None = None):
        for option, value in (
            ("max_batch_size", max_batch_size),
            ("chunk_size", chunk_size),
            ("cache_tokens", cache_tokens),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{option} is {value}; it must be a whole number, at least 1")
        self.max_batch_size = max_batch_size  # B
        # C, the token budget; policies that run whole prompts ignore it
        self.chunk_size = chunk_size
        self.cache_tokens = cache_tokens
        self.reserved = 0  # tokens of the cache that running requests have taken
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[Request] = []  # by the last `schedule`: the loop frees their slots

    def schedule(self, now: float) -> Batch | None:
        """The next batch, or None when there is nothing to run. `now`: seconds on the engine's
        clock.
        """
        raise NotImplementedError

    def check(self, request: Request) -> None:
        """A UserError if the request can never fit the cache, or has run before."""
        if request.context or request.output:
            raise UserError(
                f"request {request.request_id} has run before: make a new Request for each run"
            )
        if self.cache_tokens is not None and request.most_cached > self.cache_tokens:
            raise UserError(
                f"request {request.request_id} can never run: {len(request.prompt)} prompt tokens +"
                f" max_tokens {request.max_tokens} need {request.most_cached} tokens of cache,"
                f" which holds {self.cache_tokens}"
            )

    def add(self, request: Request) -> None:
        """Queue a request that has arrived; refuses what `check` refuses."""
        self.check(request)
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> Request | None:
        """Move the oldest waiting request into the running batch, if one waits, a slot is free and
        its prefill fits the cache.
        """
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return None
        request = self.waiting[0]
        if self.cache_tokens is not None and self.running:
            # one for each, else the newcomer would be preempted at once
            next_tokens = len(self.running) + 1
            if self.reserved + request.prefill_length + next_tokens > self.cache_tokens:
                return None
        assert request.prefilled == 0, "a request holds one slot"
        self.running.append(self.waiting.popleft())
        self.reserved += request.prefill_length
        return request

    def decodes(self) -> list[Request]:
        """All running requests that are past their prefill, once the newest have been preempted
        until a token for each fits.
        """
        decodes = [
            request for request in self.running if request.prefilled >= request.prefill_length
        ]
        if self.cache_tokens is not None:
            while self.reserved + len(decodes) > self.cache_tokens:
                newest = self.preempt()
                decodes = [request for request in decodes if request is not newest]
        return decodes

    def preempt(self) -> Request:
        """Send the newest running request back to the head of the queue; its output so far becomes
        part of its prefill.
        """
        request = self.running.pop()
        self.reserved -= request.prefill_length if request.in_prefill else request.context
        # else it was admitted but has not run: it has no slot to free, and loses nothing
        if request.prefilled:
            request.preemptions += 1
            self.preempted.append(request)
        request.prefilled = request.context = 0
        request.prefill_length = len(request.prompt) + len(request.output)
        self.waiting.appendleft(request)
        return request

    def check_batch(self, batch: Batch) -> None:
        """A UserError, before the batch runs, if the policy broke a rule that holds for all of
        them: whoever writes one should hear which.
        """
        chunks, decodes = batch.chunks, batch.decodes
        members = {chunk.request for chunk in chunks}.union(decodes)
        if not members:
            raise self.broken("the batch is empty; return None where there is nothing to run")
        if len(members) < len(chunks) + len(decodes):
            raise self.broken("a request is in the batch twice")
        if not members.issubset(self.running):
            stray = min(request.request_id for request in members.difference(self.running))
            raise self.broken(
                f"request {stray} is in the batch but not running: `admit` takes it in, and"
                " `decodes`, called first, may preempt it"
            )
        if len(members) > self.max_batch_size:
            raise self.broken(
                f"the batch exceeds B: {len(members)} requests, where {self.max_batch_size} may run"
            )
        for chunk in chunks:
            request, end = chunk.request, chunk.start + chunk.length
            if not chunk.start == request.prefilled < end <= request.prefill_length:
                raise self.broken(
                    f"request {request.request_id} has prefilled {request.prefilled} of"
                    f" {request.prefill_length} tokens, and its chunk is {chunk.start} to"
                    f" {end - 1}: prompt tokens run exactly once and in order"
                )
        for request in decodes:
            if request.prefilled < request.prefill_length:
                raise self.broken(
                    f"request {request.request_id} decodes, but has prefilled {request.prefilled}"
                    f" of {request.prefill_length} tokens"
                )
        if self.cache_tokens is not None and self.reserved + len(decodes) > self.cache_tokens:
            need = self.reserved + len(decodes)
            raise self.broken(
                f"the cache overflows: {need} tokens, and it holds {self.cache_tokens}; `decodes`"
                " preempts until they fit"
            )

    def broken(self, rule: str) -> UserError:
        return UserError(f"policy {self.name!r} ({type(self).__name__}): {rule}")

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Account for a batch that ran; `tokens` belong to `batch.sampled`. Returns the requests
        that have ended.
        """
        sampled = batch.sampled
        for chunk in batch.chunks:
            request = chunk.request
            request.prefilled = request.context = chunk.start + chunk.length
        for request in batch.decodes:
            request.context += 1
        self.reserved += len(batch.decodes)
        ended = []
        for request, token in zip(sampled, tokens, strict=True):
            request.output.append(token)
            if token in request.stop_ids:
                request.finish_reason = "stop"
            elif len(request.output) >= request.max_tokens:
                request.finish_reason = "length"
            else:
                continue
            ended.append(request)
            self.reserved -= request.context
        if ended:
            self.running = [request for request in self.running if request.finish_reason is None]
        return ended


def whole(request: Request) -> Chunk:
    """The whole prefill of a request as one chunk."""
    return Chunk(request, 0, request.prefill_length)


class RequestLevel(Scheduler):
    """Request-level scheduling, as FasterTransformer does it: the baseline of SARATHI (Sec 4.1,
    5.1) and Sarathi-Serve (Algorithm 1).

    A batch of requests is admitted only when the one before has ended. It runs one prefill-only
    iteration of whole prompts, then decode-only iterations until its last request is done.
    """

    name = "request_level"

    def schedule(self, now: float) -> Batch | None:
        if self.running:
            return Batch([], self.decodes())
        while self.admit():
            pass
        return Batch([whole(request) for request in self.running], []) if self.running else None


class VLLMv0(Scheduler):
    """Prefill-prioritised scheduling, as vLLM did it before chunked prefill (Sarathi-Serve,
    Algorithm 2).

    Whoever can be admitted prefills at once, whole and without decodes beside it; decodes run when
    nobody can. New requests get their first token early, and the running ones pay for it with
    generation stalls.
    """

    name = "vllm_v0"

    def schedule(self, now: float) -> Batch | None:
        chunks = []
        while (request := self.admit()) is not None:
            chunks.append(whole(request))
        if chunks:
            return Batch(chunks, [])
        return Batch([], self.decodes()) if self.running else None


class IterationLevel(Scheduler):
    """What Orca, SARATHI and Sarathi-Serve share: requests enter and leave between any two
    iterations, and chunks run beside decodes.

    A batch is one decode of every running request that is past its prefill, and the chunks that the
    policy picks (SARATHI, Sec 4.5: its Orca is its own mixed batching, without a bound on the
    prefills of a batch). The policies differ in `prefills` alone.
    """

    def schedule(self, now: float) -> Batch | None:
        decodes = self.decodes()
        chunks = self.prefills(len(decodes))
        return Batch(chunks, decodes) if chunks or decodes else None

    def prefills(self, num_decodes: int) -> list[Chunk]:
        """The chunks of the next batch, which also runs `num_decodes` decodes."""
        raise NotImplementedError


class Orca(IterationLevel):
    """Iteration-level scheduling with whole prompts (SARATHI, Sec 5.2): a request enters as soon as
    a slot is free.

    How well its prefills meet decodes is the workload's doing. If all requests start and end
    together, it is the baseline; if they are staggered, so that one starts at a time, it is SARATHI
    with C = the longest prompt (and room for the decodes).
    """

    name = "orca"

    def prefills(self, num_decodes: int) -> list[Chunk]:
        chunks = []
        while (request := self.admit()) is not None:
            chunks.append(whole(request))
        return chunks


class Sarathi(IterationLevel):
    """Chunked prefills and decode-maximal batching (SARATHI, Sec 4.2 to 4.4).

    Each batch has at most one prefill chunk; every other slot is a decode. The chunk shrinks to C
    minus the number of decodes, so that the fused linears see C tokens, unless the prompt's last
    chunk is shorter: choose C as a multiple of the GPU's tile (Sec 4.4). Without a prompt to
    prefill, decodes run alone. Never more than C tokens: decodes that fill C come one by one from
    batches that had room.
    """

    name = "sarathi"

    def prefills(self, num_decodes: int) -> list[Chunk]:
        room = self.chunk_size - num_decodes
        if room < 1:
            return []
        request = (
            next(
                (request for request in self.running if request.prefilled < request.prefill_length),
                None,
            )
            or self.admit()
        )
        if request is None:
            return []
        return [
            Chunk(request, request.prefilled, min(room, request.prefill_length - request.prefilled))
        ]


class SarathiServe(IterationLevel):
    """Stall-free batching (Sarathi-Serve, Algorithm 3): running decodes first, then started
    prefills, then new requests.

    C is the token budget of the whole batch, which several chunks may share: no iteration is longer
    than C tokens, and no decode ever waits.
    """

    name = "sarathi_serve"

    def prefills(self, num_decodes: int) -> list[Chunk]:
        chunks, tokens = [], num_decodes
        started = deque(
            [request for request in self.running if request.prefilled < request.prefill_length]
        )
        while (
            tokens < self.chunk_size
            and (request := started.popleft() if started else self.admit()) is not None
        ):
            room = self.budget(request) - tokens
            if room < 1:
                break
            chunks.append(
                Chunk(
                    request,
                    request.prefilled,
                    min(room, request.prefill_length - request.prefilled),
                )
            )
            tokens += chunks[-1].length
        return chunks

    def budget(self, request: Request) -> int:
        """Tokens to which the batch may grow with this request's chunk."""
        return self.chunk_size


class Dynamic(SarathiServe):
    """Sarathi-Serve with a dynamic chunk schedule: the budget falls with the stage of a request's
    prefill, C, C/2, C/4.

    A late chunk attends to all the tokens before it, so that equal chunks take longer and longer;
    smaller ones even the iterations out. A request leaves a stage when it has prefilled as many
    tokens as the stages so far are long.
    """

    name = "dynamic"

    def budget(self, request: Request) -> int:
        stages, behind = (self.chunk_size, self.chunk_size // 2, self.chunk_size // 4), 0
        for stage in stages[:-1]:
            behind += stage
            if request.prefilled < behind:
                return stage
        return max(1, stages[-1])


class ChunkedOnly(SarathiServe):
    """Ablation (Sarathi-Serve, Sec 5.4): chunks up to the token budget, but in batches of their
    own, in turn with decode-only ones.
    """

    name = "chunked_only"
    prefill_last = False  # was the last batch one of chunks?

    def schedule(self, now: float) -> Batch | None:
        chunks = (
            []
            if self.prefill_last and any(not request.in_prefill for request in self.running)
            else self.prefills(0)
        )
        self.prefill_last = bool(chunks)
        if chunks:
            return Batch(chunks, [])
        decodes = self.decodes()
        return Batch([], decodes) if decodes else None


class HybridOnly(IterationLevel):
    """Ablation (Sarathi-Serve, Sec 5.4): whole prompts beside the decodes while the token budget
    lasts, but at least one.
    """

    name = "hybrid_only"

    def prefills(self, num_decodes: int) -> list[Chunk]:
        chunks, tokens = [], num_decodes
        while self.waiting and (
            not chunks or tokens + self.waiting[0].prefill_length <= self.chunk_size
        ):
            request = self.admit()
            if request is None:
                break
            chunks.append(whole(request))
            tokens += request.prefill_length
        return chunks


POLICIES: dict[str, type[Scheduler]] = {
    policy.name: policy
    for policy in (
        RequestLevel,
        Orca,
        VLLMv0,
        Sarathi,
        SarathiServe,
        Dynamic,
        ChunkedOnly,
        HybridOnly,
    )
}


def make_scheduler(
    policy: str, max_batch_size: int, chunk_size: int, cache_tokens: int | None = None
) -> Scheduler:
    """A scheduler by its policy's name; "baseline" is SARATHI's word for request_level."""
    name = "request_level" if policy == "baseline" else policy
    return lookup(POLICIES, name, "policy")(max_batch_size, chunk_size, cache_tokens)
