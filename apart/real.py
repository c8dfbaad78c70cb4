"""Prefill apart from decode, for real: two processes, each with the whole model, over gloo.

    process 0   the prefill half: takes the prompts, runs first halves, collects all tokens
    process 1   the decode half: fetches keys and values, runs second halves, sends tokens

Each half has its own loop, policy and chunk size. Both loops are the book's. Neither waits for the
other while it has work. What the priced fleet does with a prompt, this one does:

    1. A first half ends with its first token. Its slot stays, and the decode half is asked.
    2. The decode half takes room for the prompt as soon as it has room, and fetches.
    3. Keys and values go over. Only then, the prefill half lets its slot go.
    4. At the decode half, they are put into a slot in the iteration that first needs them.

On CUDA, keys and values go over the CPU's memory, by gloo. No GPU has run that.
"""

from collections import deque
from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import Tensor

from apart.fleet import Fetch
from apart.halves import First, HalfSlots, may_run, second_half
from apart.post import Post
from apart.simulate import FleetTrace
from attention import FlatBatch
from batch import BROKEN, Batch, Request
from command.checks import UserError, shown
from engine import LLM
from executor import ModelExecutor
from loading.requests import check_requests, refuse_beams
from loop import Loop
from pipeline.stages import clock_offset
from pipeline.wire import Wire, foreign
from sampling import Sampler, SamplingParams
from scheduler import Scheduler
from timeline import Iteration, Passing, Trace


class ApartLLM(LLM):
    """An LLM in two processes. Both make the same one.

    In process 0, use it as an `LLM`: `generate`, `stream`. At the end, `close` it. Meanwhile,
    process 1 is in `follow`.

    decode_policy, decode_chunk_size: of the decode half; None: the same. max_batch_size,
    max_length, cache_tokens: of each half. Other options: see `LLM`.

    After a call, `fleet` in process 0 has both halves' iterations, and what was fetched. `trace`
    has the lives of the requests. All times are on process 0's clock.
    """

    def __init__(
        self, model: str = "demo", *, policy: str = "sarathi", chunk_size: int = 256,
        decode_policy: str | None = None, decode_chunk_size: int | None = None, **options: object,
    ):  # fmt: skip
        self.stage, self.stages = dist.get_rank(), dist.get_world_size()
        self.decode_policy = decode_policy or policy
        if self.stages != 2:
            raise UserError(f"two halves are two processes, not {self.stages}")
        if options.get("cache", "slots") != "slots":
            raise UserError(f"two halves have cache 'slots' only, not {shown(options['cache'])}")
        if self.stage == 1:
            policy = self.decode_policy
            chunk_size = chunk_size if decode_chunk_size is None else decode_chunk_size
        options |= {"policy": policy, "chunk_size": chunk_size, "cuda_graphs": "off"}
        super().__init__(model, **options)
        self.kv_values = self.config.kv_bytes_per_token(1)
        self.wire = Wire(self.kv_values, self.dtype, torch.device("cpu"), self.cache.length)
        self.offset = clock_offset(self.wire)
        self.post: Post | None = None  # from the first request to `close`
        self.fleet = FleetTrace()

    def _scheduler(self) -> Scheduler:
        scheduler = super()._scheduler()
        scheduler.memory = HalfSlots(self.cache_tokens)
        return scheduler

    def make_executor(self) -> ModelExecutor:
        return HalfExecutor(self.model, self.cache, self.attend, self.time_operators, self.cost)

    def _open(self) -> Post:
        self.post = self.post or Post(self.wire, self.stage, self.offset, self.config.vocab_size)
        return self.post

    def _join(self, requests: list[Request]) -> Loop:
        if self.stage == 1:
            raise UserError("process 1 is the decode half: it calls `follow`, and nothing else")
        if self._loop is None or not self._loop.open:
            self.cache.reset()
            self._loop = FirstHalves(self, self._open())
            scheduling = self.policy, self.chunk_size, self.max_batch_size, self.cache_tokens
            self._options = *scheduling, self.time_operators
            self.fleet, self.trace = self._loop.fleet, self._loop.fleet.requests
        return super()._join(requests)

    def resize_cache(self, max_batch_size: int, max_length: int | None = None) -> None:
        """Refused: the other half's would stay as it is."""
        raise UserError("the caches of two halves cannot be resized: make another ApartLLM")

    def close(self) -> None:
        """In process 0: let `follow` in process 1 end. A later call needs another `follow`."""
        if self._loop and self._loop.open:
            self._check_idle("the decode half")
        self._open().close()
        self.post = self._loop = None

    def follow(self) -> None:
        """In process 1: run second halves until process 0 closes its LLM."""
        self.cache.reset()
        with self.surroundings():
            SecondHalves(self, self._open()).run()
        self.post = None


# ---- the prefill half


class HalfExecutor(ModelExecutor):
    """It keeps the slot of a first half that goes on, and fills the slot of a second half.

    fetched: keys and values, by request id, as they came: keys first.
    """

    def __init__(self, *parts: object):
        super().__init__(*parts)
        self.fetched: dict[int, Tensor] = {}

    def release(self, request: Request) -> None:
        if not getattr(request, "stays", False):
            super().release(request)

    def places(self, own: int, tokens: int) -> list[Tensor]:
        """Keys and values of a request's first tokens: (n_layer, n_kv_head, tokens, head_dim)."""
        slot = self.slot_of[own]
        return [each[:, :, slot, :tokens] for each in (self.cache.k, self.cache.v)]

    def flatten(self, batch: Batch) -> FlatBatch:
        for chunk in batch.chunks if self.fetched else ():
            own = chunk.request.request_id
            x = self.fetched.pop(own, None)
            if x is not None and chunk.start:  # else its room was taken back
                self.slot_of[own] = self.cache.allocate()
                self.cache.extend(self.slot_of[own], chunk.start)
                for place, new in zip(self.places(own, chunk.start), x.chunk(2), strict=True):
                    place.copy_(new.view(place.shape))
        return super().flatten(batch)


class FirstHalves(Loop):
    """The loop of the prefill half, for whole requests. open: those that have not ended, by id."""

    def __init__(self, llm: ApartLLM, post: Post):
        super().__init__(llm._scheduler(), llm.make_executor())
        self.post, self.most, self.slots = post, llm.max_batch_size, llm.cache.slots
        self.trace = Passing(keep=True)
        self.fleet = FleetTrace(engines=[self.trace, Trace()])
        self.open: dict[int, First] = {}
        self.kept: dict[int, First] = {}  # ended here, and not yet at the decode half
        self.sent: dict[int, float] = {}  # when; those that are under way

    @property
    def busy(self) -> bool:
        """True of a new one, too: `LLM._join` then takes it as it is."""
        return bool(self.open) or self.batch is None

    def add(self, request: Request) -> None:
        refuse_beams([request], "make an LLM in one process")
        first = First.of(request)
        super().add(first)
        self.open[request.request_id] = first

    def cancel(self, request: Request) -> bool:
        if self._stepping:
            self._leaving.append(request)
            return True
        if (first := self.open.pop(request.request_id, None)) is None:
            return False
        if not super().cancel(first):
            self.let_go(first)
            self.post.send(["cancel", request.request_id])
        request.finish_reason = "abort"
        self.trace.lives.pop(request.request_id, None)
        self.fleet.requests.cancelled.append((request.request_id, self.executor.now()))
        return True

    def step(self) -> None:
        """Run an iteration. If there is nothing to run, wait for news or for an arrival."""
        self._stepping = True  # so who is cancelled meanwhile leaves at the end
        try:
            self.post.read(self, 0.0)
            # one who is kept has a slot of the cache, too
            self.scheduler.max_batch_size = min(self.most, self.slots - len(self.kept))
            if may_run(self, now := self.executor.now()):
                super().step()
                for first, life in self.trace.ended:
                    if first.request_id in self.open:
                        self.fleet.requests.lives[first.request_id] = life
                        self.take(first, first.output[0], 0)
                        if first.stays:
                            self.ask_for(first)
            elif self.open:
                wait = max(0.0, self.arriving[0].arrival - now) if self.arriving else None
                self.post.read(self, wait)
        except BaseException:  # such as Ctrl-C: the next call finds the decode half empty
            for own in self.open:
                self.post.send(["cancel", own])
            raise
        self._stepping = False
        while self._leaving:
            self.cancel(self._leaving.pop())

    def ask_for(self, first: First) -> None:
        """Ask the decode half to take its second half."""
        self.kept[first.request_id], second, how = first, second_half(first), []
        ids, stops = list(second.prompt), sorted(second.stop_ids)
        if sampler := second.sampler:
            params, seed = sampler.params, sampler.generator.initial_seed()
            how = [[float(params.temperature), params.top_k, float(params.top_p), seed]]
        self.post.send(["ask", second.request_id, ids, second.max_tokens, stops, how, second.tags])

    def take(self, first: First, token: int, preemptions: int) -> None:
        """A token of a request has come. Perhaps it was the last one."""
        whole, life = first.whole, self.fleet.requests.lives[first.request_id]
        whole.output.append(token)
        reason = "stop" if token in whole.stop_ids else "error" if token == BROKEN else "length"
        life.finished = None
        if reason != "length" or len(whole.output) == whole.max_tokens:
            whole.finish_reason = reason
            life.finished, life.preemptions = life.tokens[-1], life.preemptions + preemptions
            self.fleet.requests.finished.append((whole.request_id, life.finished))
            self.open.pop(whole.request_id, None)

    def let_go(self, first: First) -> None:
        self.kept.pop(first.request_id, None)
        if first.stays:  # else it was cancelled, or has no slot
            first.fetched = True
            self.executor.release(first)
            self.scheduler.memory.give(first)

    # ---- what the decode half says

    def fetch(self, own: int) -> None:
        if own not in self.open:
            return  # it was cancelled meanwhile
        if own not in self.kept or own in self.sent:
            raise foreign(1, f"it fetches request {own}")
        self.sent[own], tokens = self.executor.now(), len(self.kept[own].prompt)
        x = torch.stack(self.executor.places(own, tokens)).cpu()
        self.post.send(["give", own], x.view(tokens, -1))

    def got(self, own: int, end: float) -> None:
        start, first = self.sent.pop(own, None), self.kept.get(own)
        if start and first:  # else it was cancelled meanwhile
            asked, end = self.fleet.requests.lives[own].tokens[0], end - self.executor.origin
            self.fleet.fetches.append(Fetch(own, 0, 1, len(first.prompt), asked, start, end))
            self.let_go(first)

    def did(self, values: list, tokens: list) -> None:
        iteration, engine = Iteration(*values), self.fleet.engines[1]
        iteration.start -= self.executor.origin
        if iteration.start < 0:
            return  # of a call before
        end = iteration.start + iteration.seconds
        engine.iterations.append(iteration)
        for own, token, preemptions in tokens:
            if first := self.open.get(own):  # else it was cancelled meanwhile
                if not first.fetched:
                    raise foreign(1, f"request {own} has no second half")
                self.fleet.requests.lives[own].tokens.append(end)
                self.take(first, token, preemptions)
                if first.whole.finish_reason:
                    engine.finished.append((own, end))


# ---- the decode half


class SecondHalves:
    """The decode half. open: second halves that have not ended, by id. queue: no room yet.

    under_way: those that have been fetched, and have not come.
    """

    def __init__(self, llm: ApartLLM, post: Post):
        self.loop = Loop(llm._scheduler(), llm.make_executor())
        self.loop.executor.origin = llm.offset  # so its clock is the prefill half's
        self.loop.trace = Passing()
        self.post, self.longest = post, llm.max_length
        self.open: dict[int, Request] = {}
        self.queue: deque[Request] = deque()
        self.under_way: dict[int, Request] = {}

    def run(self) -> None:
        loop, idle = self.loop, True
        while not self.post.over:
            self.post.read(self, None if idle else 0.0)
            self.fetch()
            idle = not may_run(loop, loop.executor.now())
            if not idle:
                did, sampled = astuple(loop.step()), loop.batch.sampled
                tokens = [[r.request_id, r.output[-1], r.preemptions] for r in sampled]
                self.post.send(["did", did, tokens])
                for second, _ in loop.trace.ended:
                    del self.open[second.request_id]
        self.post.close()

    def fetch(self) -> None:
        """As `Fleet.fetch`."""
        scheduler = self.loop.scheduler
        while self.queue and scheduler.memory.reserve(self.queue[0], scheduler):
            second = self.queue.popleft()
            self.under_way[second.request_id] = second
            self.post.send(["fetch", second.request_id])

    # ---- what the prefill half says

    def ask(self, own: int, ids: list, most: int, stops: list, how: list, tags: dict) -> None:
        if own in self.open:
            raise foreign(0, f"request {own} is here already")
        sampler = None
        for *params, seed in how:
            sampler = Sampler(SamplingParams(1, *params), seed)
            # its first token has taken one number from the generator: see sampling.py
            torch.rand((), generator=sampler.generator, dtype=torch.float64)
        second = Request(own, ids, most, frozenset(stops), sampler=sampler, tags=tags)
        check_requests([second], self.longest, "max_length")
        self.loop.scheduler.check(second)
        self.open[own] = second
        self.queue.append(second)

    def give(self, own: int) -> None:
        second, (x, moment) = self.under_way.pop(own, None), self.post.came
        tokens = len(second.prompt) - 1 if second else 0
        if x is None or len(x) != tokens:
            raise foreign(0, f"it gives request {own}, and {tokens} tokens were asked for")
        if second in self.loop.scheduler.memory.coming:
            self.loop.executor.fetched[own] = x.view(2, -1)
        second.arrival = moment
        self.loop.add(second)

    def cancel(self, own: int) -> None:
        if second := self.open.pop(own, None):  # else it has ended meanwhile
            self.loop.executor.fetched.pop(own, None)
            self.under_way.pop(own, None)  # it will not be given any more
            if second in self.queue:
                self.queue.remove(second)
            self.loop.scheduler.memory.revoke(second)
            self.loop.cancel(second)
            self.loop.trace.lives.pop(own, None)
