"""Who runs next: one short class per scheduling policy, all on one base.

Pure Python: no torch, no clock of its own. A scheduler is told the time and says which batch to run
(`schedule`). Then it is told which tokens came out (`update`). The same object drives the real
model and the cost model. The policies, below `Scheduler`:

    request_level   FasterTransformer: a batch of requests starts and ends together
    orca            iteration-level: whole prompts join the decodes as soon as a slot is free
    vllm_v0         whole prompts first and alone; decodes wait for them
    sarathi         one chunk beside all decodes, C tokens together
    sarathi_serve   all decodes, then as many chunks as the token budget C has room for
    more/policies/ has variants of these, today's engines, and the papers after Sarathi-Serve
"""

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from batch import Batch, Chunk, Request
from command.checks import Range, UserError, by_name, check_whole, lookup, name_of, tag_number

SIZE = re.compile("[0-9]{1,9}")  # of a chunk, in tokens
MOST_CACHED = 10**15  # tokens
NOTHING_SCHEDULED = "it schedules nothing, while requests wait or run and no more will arrive"


@dataclass(slots=True)
class Memory:
    """The KV cache as a number of tokens, and what the running requests have taken of it.

    A request takes room for its whole prefill when it is admitted, then for a token per decode.
    """

    capacity: int | None  # None: as much as B requests ever need
    taken: int = 0

    @property
    def room(self) -> float:
        """Tokens that nobody has taken."""
        return inf if self.capacity is None else self.capacity - self.taken

    def holds(self, decodes: Sequence[Request], newcomer: Request | None = None) -> bool:
        """Whether the next token of each decode fits; and a newcomer's prefill, and its token."""
        prefill = 0 if newcomer is None else newcomer.prefill_length + 1
        return len(decodes) + prefill <= self.room

    def to_run(self, newcomer: Request) -> int:
        """Tokens of its prefill that have to run: all. (more/paged/ finds some in the cache.)"""
        return newcomer.prefill_length

    def take(self, newcomer: Request) -> None:
        """It is admitted: it takes room for its whole prefill."""
        self.taken += newcomer.prefill_length

    def plan(self, request: Request, end: int) -> None:
        """The batch that is being made prefills up to token `end`. (more/paged/ writes it down.)"""

    def grow(self, decodes: Sequence[Request]) -> None:
        """These decodes have run: each takes room for one more token."""
        self.taken += len(decodes)

    def give(self, request: Request) -> None:
        """A running request gives back all the room that it has taken."""
        self.taken -= held(request)


class Scheduler:
    """What all policies share: the queue, the running requests, the memory, the bookkeeping.

    A policy is a subclass with a `name` and `schedule`, listed in POLICIES below. `waiting` is the
    queue, in order of `rank`: first come, first served, where a policy does not say more. `running`
    holds at most `max_batch_size` requests in order of admission (B: each holds one slot of the
    cache).

    cache_tokens: what the KV cache holds, in tokens of all requests together; None: enough for all.
    A running request takes room for its whole prefill at once, then for a token per decode. When
    the decodes' next tokens do not fit, a request is preempted (`victim`). It loses its cache, and
    waits before its equals. Later it prefills its prompt and its output so far (vLLM's
    recomputation). So no output token is lost.
    """

    name = "?"
    example = ""  # a name with an option
    reads: Mapping[str, Range] = {}  # the tags that it reads as numbers, and which these may be
    now = 0.0  # s on the engine's clock, at the last `schedule` or `update`. The driver sets it

    def __init__(self, max_batch_size: int, chunk_size: int = 256, cache_tokens: int | None = None):
        check_whole("max_batch_size", max_batch_size)
        check_whole("chunk_size", chunk_size)
        if cache_tokens is not None:
            check_whole("cache_tokens", cache_tokens, most=MOST_CACHED)
        self.max_batch_size = max_batch_size  # B
        self.chunk_size = chunk_size  # C, the token budget; policies of whole prompts ignore it
        self.memory = Memory(cache_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._preempted = []
        self.rejected: list[Request] = []  # whoever drives takes them out

    def schedule(self, now: float) -> Batch | None:
        """The next batch, or None when there is nothing to run. `now`: s on the engine's clock."""
        raise NotImplementedError

    def configure(self, option: str) -> None:
        """Take the option after the colon of a name. Here: `most_tokens`, as VLLMv0 has it."""
        if not self.example:
            raise UserError(f"policy {self.name!r} takes no option, and {option!r} is given")
        if not SIZE.fullmatch(option) or int(option) < 1:
            raise UserError(
                f"policy '{self.name}:{option}': it needs a whole number of tokens, at least 1,"
                f" such as {self.example}"
            )
        self.most_tokens = int(option)

    def cost(self, batch: Batch) -> float:
        """Seconds that a batch would take. `Loop` replaces this by the executor's own function."""
        raise self.broken("it asks what a batch costs: give a --calibration of calibrate.py")

    # ---- the order of requests

    def rank(self, request: Request) -> object:
        """The smallest is next, of those that wait and of started prompts; the largest must leave.

        Of equals, the first come is next. If ranks change while requests wait, call `sort_queue`.
        """
        return 0

    def enqueue(self, request: Request, first: bool = False) -> None:
        """Let it wait behind its equals, or before them."""
        place = bisect_left if first else bisect_right
        self.waiting.insert(place(self.waiting, self.rank(request), key=self.rank), request)

    def sort_queue(self) -> None:
        self.waiting = deque(sorted(self.waiting, key=self.rank))

    def first(self) -> Request:
        """Which waiting request is next."""
        return self.waiting[0]

    def victim(self) -> Request:
        """Whom to preempt where the cache is full: of the largest rank, the newest."""
        return max(reversed(self.running), key=self.rank)

    # ---- requests come and go

    def check(self, request: Request) -> None:
        """A UserError if the request can never fit the cache, or has a tag that nobody can read.

        It is asked of each request that arrives, and of all that are here when the policy changes.
        """
        capacity = self.memory.capacity
        for tag in self.reads:
            self.number(request, tag)
        if capacity is not None and request.most_cached > capacity:
            raise UserError(
                f"request {request.request_id} can never run: {len(request.prompt)} prompt tokens +"
                f" max_tokens {request.max_tokens} need {request.most_cached} tokens of cache, and"
                f" it holds {capacity}"
            )

    def add(self, request: Request) -> None:
        """Queue a request that has arrived; refuses what `check` refuses, and what has run."""
        request.check_new()
        self.check(request)
        self.enqueue(request)

    def cancel(self, request: Request) -> bool:
        """Let a request go, waiting or running. False if it is neither."""
        if request in self.running:
            self.running.remove(request)
            self.memory.give(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return False
        self.forget(request)
        return True

    def reject(self, request: Request) -> None:
        """Refuse to serve a request, waiting or running: it ends with "reject"."""
        self.cancel(request)
        request.finish_reason = "reject"
        self.rejected.append(request)

    def forget(self, request: Request) -> None:
        """A request has gone: it has ended, or was cancelled or rejected. Drop what you keep."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # ---- what policies call

    def can_admit(self) -> bool:
        """Whether a request waits, a slot is free, and its prefill fits the cache."""
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return False
        if not self.memory.taken:
            return True  # `check` let it pass, so it fits. (`holds` may ask for a token more.)
        # all next tokens must fit, too: else the newcomer, the newest, is preempted at once
        return self.memory.holds(self.running, self.first())

    def admit(self) -> Request | None:
        """Let the `first` waiting request run, if it can be admitted."""
        if not self.can_admit():
            return None
        request = self.first()
        self.waiting.remove(request)
        assert request.prefilled == 0, "a request that waits has nothing in the cache"
        self.running.append(request)
        self.memory.take(request)
        return request

    def decodes(self) -> list[Request]:
        """All running requests that are past their prefill.

        If the cache has no room for a token of each, some are preempted first (`victim`). So call
        it before you pick chunks.
        """
        # `in_prefill`, written out: this runs for every request in every iteration
        decodes = [r for r in self.running if r.prefilled >= r.prefill_length]
        while decodes and not self.memory.holds(decodes):
            victim = self.preempt()
            decodes = [request for request in decodes if request is not victim]
        return decodes

    def decode_only(self) -> Batch | None:
        decodes = self.decodes()
        return Batch([], decodes) if decodes else None

    def started(self) -> list[Request]:
        """Running requests that are still in their prefill, by rank."""
        started = [r for r in self.running if r.prefilled < r.prefill_length]  # `in_prefill`
        return sorted(started, key=self.rank)

    def started_then_new(self) -> Iterator[Request]:
        """Started requests, then new ones. A new one is admitted when the caller asks for it."""
        yield from self.started()
        while (request := self.admit()) is not None:
            yield request

    def admit_all(self, room: float = inf) -> list[Chunk]:
        """Admit whole prompts: as many as fit, up to `room` tokens, but always the first."""
        chunks: list[Chunk] = []
        while self.can_admit():
            room -= self.memory.to_run(self.first())
            if chunks and room < 0:
                break
            newcomer = self.admit()
            chunks.append(self.plan(newcomer, newcomer.prefill_length))
        return chunks

    def plan(self, request: Request, room: float) -> Chunk:
        """The next chunk of a request that runs, for the batch that is being made.

        From then on, others may share what it fills (more/paged/). For a trial, take `next_chunk`.
        """
        chunk = next_chunk(request, room)
        self.memory.plan(request, chunk.start + chunk.length)
        return chunk

    def rows(self, decodes: Sequence[Request]) -> int:
        """Rows that these decodes take in a batch: one each. (more/ has requests of several.)"""
        return len(decodes)

    # ---- what the loop calls

    def preempt(self, request: Request | None = None) -> Request:
        """Send a running request (None: the victim) back to the queue, before its equals."""
        request = request or self.victim()
        self.running.remove(request)
        self.memory.give(request)
        if request.chunks_run:  # else it has no slot yet, and loses nothing
            request.preemptions += 1
            self._preempted.append(request)
        request.restart()
        self.enqueue(request, first=True)
        return request

    def take_preempted(self) -> list[Request]:
        """Requests that `schedule` has preempted since the last call: their slots can be freed."""
        preempted = self._preempted
        self._preempted = []
        return preempted

    def update(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Record a batch that ran. Returns the requests that have ended.

        tokens: one for each of `batch.sampled`.
        """
        ended: list[Request] = []
        for chunk in batch.chunks:
            request = chunk.request
            request.prefilled = request.context = chunk.start + chunk.length
            request.chunks_run += 1
        self.memory.grow(batch.decodes)
        for request in batch.decodes:
            request.context += 1
        for request, token in zip(batch.sampled, tokens, strict=True):
            if request.take(token):
                ended.append(request)
                self.memory.give(request)
                self.forget(request)
        if ended:
            self.running = [request for request in self.running if request.finish_reason is None]
        return ended

    def number(self, request: Request, tag: str, usual: float = 0.0) -> float:
        """What a tag of `reads` says; `usual` without it."""
        return tag_number(request, tag, self.reads[tag], usual)

    def broken(self, rule: str) -> UserError:
        return UserError(f"policy {self.name!r} ({type(self).__name__}): {rule}")


def held(request: Request) -> int:
    """Tokens of the cache that a running request has taken."""
    return request.prefill_length if request.in_prefill else request.context


def next_chunk(request: Request, room: float = inf) -> Chunk:
    """As much of what is left of a prefill as `room` tokens hold. It changes nothing."""
    start = request.prefilled
    return Chunk(request, start, min(room, request.prefill_length - start))


class RequestLevel(Scheduler):
    """FasterTransformer's request-level scheduling (SARATHI, Sec 4.1; Sarathi-Serve, Algorithm 1).

    A batch of requests is admitted only when the one before has ended. It runs one prefill-only
    iteration of whole prompts, then decode-only iterations until its last request is done.
    """

    name = "request_level"

    def schedule(self, now: float) -> Batch | None:
        chunks = [] if self.running else self.admit_all()
        return Batch(chunks, []) if chunks else self.decode_only()


class VLLMv0(Scheduler):
    """Prefill-prioritised scheduling: vLLM before chunked prefill (Sarathi-Serve, Algorithm 2).

    Requests that can be admitted prefill at once, whole, and without decodes beside them. Decodes
    run only when no request can be admitted. So new requests get their first token early, but the
    others wait (generation stalls). "vllm_v0:4096" prefills at most 4096 tokens at a time
    (max_num_batched_tokens; vLLM's default was the model's longest sequence).
    """

    name = "vllm_v0"
    example = "vllm_v0:4096"
    most_tokens = inf  # of a batch of prompts

    def schedule(self, now: float) -> Batch | None:
        chunks = self.admit_all(self.most_tokens)
        return Batch(chunks, []) if chunks else self.decode_only()


class IterationLevel(Scheduler):
    """What Orca, SARATHI and Sarathi-Serve share: requests enter and leave between two iterations.

    A batch is one decode of every running request that is past its prefill, and the chunks that the
    policy picks. The policies differ in `prefills` alone.
    """

    def schedule(self, now: float) -> Batch | None:
        decodes = self.decodes()
        chunks = self.prefills(self.rows(decodes))
        return Batch(chunks, decodes) if chunks or decodes else None

    def prefills(self, decode_rows: int) -> list[Chunk]:
        """The chunks of the next batch, whose decodes take `decode_rows` of its rows."""
        raise NotImplementedError

    def budget(self) -> int:
        """Tokens of the next batch, at most."""
        return self.chunk_size

    def fit(self, seconds: float, step: int = 128) -> int:
        """The largest budget whose batch takes at most so long: C, or a multiple of `step` below.

        At least one step, so that prompts go on.
        """
        decodes = self.decodes()
        if self.cost(self.trial(self.chunk_size, decodes)) <= seconds:
            return self.chunk_size
        smaller = range(step, self.chunk_size, step)
        fitting = bisect_right(smaller, seconds, key=lambda C: self.cost(self.trial(C, decodes)))
        return min(self.chunk_size, step * max(1, fitting))

    def prompts(self) -> Iterator[Request]:
        """All prompts that run or wait, in order of `started_then_new`."""
        yield from self.started()
        yield from self.waiting

    def trial(self, budget: int, decodes: list[Request]) -> Batch:
        """The batch of this budget, if the cache had room for all. Nothing changes by it."""
        chunks: list[Chunk] = []
        room = budget - self.rows(decodes)
        for request in self.prompts():
            if room < 1:
                break
            chunk = next_chunk(request, room)
            chunks.append(chunk)
            room -= chunk.length
        return Batch(chunks, decodes)


class Orca(IterationLevel):
    """Iteration-level scheduling with whole prompts, as SARATHI compares it (Sec 4.5, 5.2).

    A request enters as soon as a slot is free. Whether decodes run beside its prefill depends on
    the workload. If all requests start and end together, the batches are those of request_level. If
    they start one by one, each prompt runs whole beside the decodes of the others, as in SARATHI
    with a C that no prompt exceeds.
    """

    name = "orca"

    def prefills(self, decode_rows: int) -> list[Chunk]:
        return self.admit_all()


class Sarathi(IterationLevel):
    """Chunked prefills and decode-maximal batching (SARATHI, Sec 4.2 to 4.4).

    Each batch has at most one chunk; every other slot is a decode. The chunk shrinks to C minus the
    number of decodes, so that the fused linears see C tokens (unless the prompt ends before).
    Choose C as a multiple of the GPU's tile. Without a prompt to prefill, decodes run alone. If the
    decodes already fill C, no chunk is added.
    """

    name = "sarathi"

    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = self.budget() - decode_rows
        if room < 1:
            return []
        request = next(self.started_then_new(), None)
        return [self.plan(request, room)] if request else []


class SarathiServe(IterationLevel):
    """Stall-free batching (Sarathi-Serve, Algorithm 3): decodes, then started prefills, then new.

    C is the token budget of the whole batch. Several chunks may share it. No iteration is longer
    than C tokens, and no decode ever waits.
    """

    name = "sarathi_serve"

    def prefills(self, decode_rows: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        room = self.budget() - decode_rows
        if room < 1:
            return []
        for request in self.started_then_new():
            chunk = self.plan(request, self.share(request, room))
            chunks.append(chunk)
            room -= chunk.length
            if room < 1:
                break
        return chunks

    def share(self, request: Request, room: int) -> int:
        """How many of the `room` tokens left in the batch this request may take: at least one."""
        return room


POLICIES: dict[str, type[Scheduler]] = by_name([RequestLevel, Orca, VLLMv0, Sarathi, SarathiServe])
ELSEWHERE: dict[str, str] = {}  # policies that cannot run here, and why. Empty: more/ fills it
ALIASES = {"baseline": "request_level"}  # SARATHI's word


def make_scheduler(
    policy: str, max_batch_size: int, chunk_size: int, cache_tokens: int | None = None
) -> Scheduler:
    """A scheduler by its policy's name, or an alias.

    A name may carry an option after a colon: see `configure` of the policies.
    """
    name, colon, option = name_of(policy).partition(":")
    if name in ELSEWHERE:
        raise UserError(f"policy {name!r} {ELSEWHERE[name]}")
    kind = lookup(POLICIES, ALIASES.get(name, name), "policy")
    scheduler = kind(max_batch_size, chunk_size, cache_tokens)
    if colon:
        scheduler.configure(option)
        scheduler.name = f"{kind.name}:{option}"
    return scheduler
