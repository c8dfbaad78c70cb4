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

import torch
import torch.distributed as dist
from torch import Tensor

from apart.fleet import Fetch, Passing
from apart.halves import First, KeepsSlots, ReceivesSlots, may_run, second_half
from apart.post import OVER, Post, ask_for, read_id, read_iteration, read_second, tell
from apart.simulate import FleetTrace
from attention import FlatBatch
from batch import Batch, Request
from command.checks import UserError, shown
from engine import LLM
from executor import ModelExecutor
from loading.requests import refuse_beams
from loop import Loop
from pipeline.stages import clock_offset
from pipeline.wire import Wire, foreign, is_time
from scheduler import Scheduler
from timeline import Life, Trace


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
            policy, chunk_size = decode_policy or policy, decode_chunk_size or chunk_size
        options |= {"policy": policy, "chunk_size": chunk_size, "cuda_graphs": "off"}
        super().__init__(model, **options)
        part = self.config
        self.kv_values = 2 * part.n_layer * part.n_kv_head * part.head_dim  # of a token
        self.wire = Wire(self.kv_values, self.dtype, torch.device("cpu"), self.cache.length)
        self.offset = clock_offset(self.wire)
        self.post: Post | None = None  # from the first request to `close`
        self.fleet = FleetTrace()

    def _scheduler(self) -> Scheduler:
        scheduler = super()._scheduler()
        scheduler.memory = (ReceivesSlots if self.stage else KeepsSlots)(self.cache_tokens)
        return scheduler

    def make_executor(self) -> ModelExecutor:
        return HalfExecutor(self.model, self.cache, self.attend, self.time_operators, self.cost)

    def _open(self) -> Post:
        self.post = self.post or Post(self.wire, 1 - self.stage, self.offset)
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

    fetched: keys and values, by request id, as `copy` gives them.
    """

    def __init__(self, *parts: object):
        super().__init__(*parts)
        self.fetched: dict[int, Tensor] = {}

    def release(self, request: Request) -> None:
        if not (isinstance(request, First) and request.goes_on):
            super().release(request)

    def let_go(self, first: First) -> None:
        super().release(first)

    def copy(self, first: First) -> Tensor:
        """Keys and values of its prompt: (2, n_layer, n_kv_head, tokens, head_dim), on the CPU."""
        slot, end = self.slot_of[first.request_id], len(first.prompt)
        parts = [each[:, :, slot, :end] for each in (self.cache.k, self.cache.v)]
        return torch.stack(parts).cpu()

    def flatten(self, batch: Batch) -> FlatBatch:
        for chunk in batch.chunks if self.fetched else ():
            x = self.fetched.pop(chunk.request.request_id, None)
            if x is not None and chunk.start:  # else its room was taken back
                slot = self.slot_of[chunk.request.request_id] = self.cache.allocate()
                self.cache.extend(slot, chunk.start)
                for cache, new in zip((self.cache.k, self.cache.v), x, strict=True):
                    cache[:, :, slot, : chunk.start] = new
        return super().flatten(batch)


class FirstHalves(Loop):
    """The loop of the prefill half, for whole requests. open: those that have not ended, by id."""

    def __init__(self, llm: ApartLLM, post: Post):
        super().__init__(llm._scheduler(), llm.make_executor())
        self.post, self.vocabulary, self.most = post, llm.config.vocab_size, llm.max_batch_size
        self.trace, self.slots = Passing(keep=True), llm.cache.slots
        self.fleet = FleetTrace(engines=[self.trace, Trace()])
        self.open: dict[int, First] = {}
        self.kept: dict[int, First] = {}  # ended here, and not yet at the decode half
        self.sent: dict[int, tuple[First, float, float]] = {}  # under way: asked, sent
        self.acts = {"fetch": self.send, "got": self.got, "did": self.did}
        self.next_id = 0

    @property
    def busy(self) -> bool:
        """True of a new one, too: `LLM._join` then takes it as it is."""
        return bool(self.open) or not self.next_id

    def add(self, request: Request) -> None:
        refuse_beams([request], "make an LLM in one process")
        first = First.of(request)
        super().add(first)
        self.open[request.request_id], self.next_id = first, request.request_id + 1

    def cancel(self, request: Request) -> bool:
        if self._stepping:
            self._leaving.append(request)
            return True
        first = self.open.pop(request.request_id, None)
        if first is None:
            return False
        if not super().cancel(first):
            self.let_go(first)
            self.post.send(["cancel", request.request_id])
        request.finish_reason = "abort"
        self.fleet.requests.cancelled.append((request.request_id, self.executor.now()))
        return True

    def step(self) -> None:
        """Run an iteration. If there is nothing to run, wait for news or for an arrival."""
        self.read(0.0)
        # one who is kept has a slot of the cache, too
        self.scheduler.max_batch_size = min(self.most, self.slots - len(self.kept))
        if may_run(self, self.executor.now()):
            super().step()
            for first, life in self.trace.ended:
                if first.request_id in self.open:  # else it was cancelled meanwhile
                    self.end_first(first, life)
        elif self.open:
            coming = self.arriving[0].arrival - self.executor.now() if self.arriving else None
            self.read(coming and max(0.0, coming))

    def end_first(self, first: First, life: Life) -> None:
        whole = first.whole
        self.fleet.requests.lives[whole.request_id] = life
        whole.output += first.output
        if not first.goes_on:
            self.end(whole, first.finish_reason, life)
            return
        life.finished = None
        self.kept[whole.request_id] = first
        self.post.send(ask_for(second_half(first)))

    def end(self, whole: Request, reason: str, life: Life) -> None:
        whole.finish_reason, life.finished = reason, life.tokens[-1]
        self.fleet.requests.finished.append((whole.request_id, life.finished))
        self.open.pop(whole.request_id, None)

    # ---- what the decode half says

    def read(self, patience: float | None) -> None:
        for news in self.post.news(patience):
            self.post.act(*news, self.acts)

    def send(self, rest: list, x: Tensor | None, moment: float) -> None:
        own = read_id(rest, 1)
        if own not in self.open:
            return  # it was cancelled meanwhile
        if own not in self.kept or own in self.sent:
            raise foreign(1, f"it fetches request {own}")
        first = self.kept[own]
        asked = self.fleet.requests.lives[own].tokens[0]
        self.sent[own] = first, asked, self.executor.now()
        self.post.send(["give", own], self.executor.copy(first).view(len(first.prompt), -1))

    def got(self, rest: list, x: Tensor | None, moment: float) -> None:
        own, end = read_id(rest[:1], 1), rest[-1]
        if not is_time(end):
            raise foreign(1, "it is no time")
        if own not in self.sent:
            return  # of a call before
        first, asked, start = self.sent.pop(own)
        end -= self.executor.origin
        self.fleet.fetches.append(Fetch(own, 0, 1, len(first.prompt), asked, start, end))
        self.let_go(first)

    def let_go(self, first: First) -> None:
        self.kept.pop(first.request_id, None)
        if first.request_id in self.executor.slot_of:  # else it was cancelled, or has no slot
            self.executor.let_go(first)
            self.scheduler.memory.let_go(first)

    def did(self, rest: list, x: Tensor | None, moment: float) -> None:
        iteration, tokens = read_iteration(rest, self.vocabulary)
        iteration.start -= self.executor.origin
        if iteration.start < 0:
            return  # of a call before
        engine, end = self.fleet.engines[1], iteration.start + iteration.seconds
        engine.iterations.append(iteration)
        for own, token, preemptions in tokens:
            first = self.open.get(own)
            if first is None:
                continue  # it was cancelled meanwhile
            if not first.goes_on:
                raise foreign(1, f"request {own} has no second half")
            whole, life = first.whole, self.fleet.requests.lives[own]
            whole.output.append(token)
            life.tokens.append(end)
            stops, full = token in whole.stop_ids, len(whole.output) == whole.max_tokens
            if stops or full:
                life.preemptions += preemptions
                engine.finished.append((own, end))
                self.end(whole, "stop" if stops else "length", life)


# ---- the decode half


class SecondHalves:
    """The decode half. open: second halves that have not ended, by id. queue: no room yet.

    under_way: those that have been fetched, and have not come.
    """

    def __init__(self, llm: ApartLLM, post: Post):
        self.loop = Loop(llm._scheduler(), llm.make_executor())
        self.loop.executor.origin = llm.offset  # so its clock is the prefill half's
        self.loop.trace = Passing()
        self.post, self.model, self.longest = post, llm.config, llm.max_length
        self.open: dict[int, Request] = {}
        self.queue: deque[Request] = deque()
        self.under_way: dict[int, Request] = {}
        self.acts = {"ask": self.asked, "give": self.given, "cancel": self.cancel}

    def run(self) -> None:
        loop, idle = self.loop, True
        while True:
            for message, x, moment in self.post.news(None if idle else 0.0):
                if message == OVER and not self.open:
                    self.post.close()
                    return
                self.post.act(message, x, moment, self.acts)
            self.fetch()
            idle = not may_run(loop, loop.executor.now())
            if not idle:
                iteration = loop.step()
                self.post.send(tell(iteration, loop.batch.sampled))
                for second, _ in loop.trace.ended:
                    del self.open[second.request_id]

    def fetch(self) -> None:
        """As `Fleet.fetch`: the oldest first, and after what was preempted here."""
        scheduler = self.loop.scheduler
        memory = scheduler.memory
        while self.queue and not (scheduler.waiting or self.loop.arriving):
            slots = len(scheduler.running) + len(memory.coming)
            free = slots < scheduler.max_batch_size
            if not (free and memory.reserve(self.queue[0], scheduler.running)):
                return
            second = self.queue.popleft()
            self.under_way[second.request_id] = second
            self.post.send(["fetch", second.request_id])

    # ---- what the prefill half says

    def asked(self, rest: list, x: Tensor | None, moment: float) -> None:
        second = read_second(rest, self.model.vocab_size, self.longest)
        if second.request_id in self.open or second.request_id in self.under_way:
            raise foreign(0, f"request {second.request_id} is here already")
        self.loop.scheduler.check(second)
        self.open[second.request_id] = second
        self.queue.append(second)

    def given(self, rest: list, x: Tensor | None, moment: float) -> None:
        own = read_id(rest, 0)
        second = self.under_way.pop(own, None)
        tokens = len(second.prompt) - 1 if second else 0
        if x is None or len(x) != tokens:
            raise foreign(0, f"it gives request {own}, and {tokens} tokens were asked for")
        if own not in self.open:
            return  # it was cancelled meanwhile
        if second in self.loop.scheduler.memory.coming:
            model = self.model
            shape = 2, model.n_layer, model.n_kv_head, tokens, model.head_dim
            self.loop.executor.fetched[own] = x.view(shape)
        second.arrival = moment
        self.loop.add(second)

    def cancel(self, rest: list, x: Tensor | None, moment: float) -> None:
        second = self.open.pop(read_id(rest, 0), None)
        if second is None:
            return  # it has ended meanwhile
        self.loop.executor.fetched.pop(second.request_id, None)
        if second in self.queue:
            self.queue.remove(second)
        self.loop.scheduler.memory.revoke(second)
        self.loop.cancel(second)
        self.loop.trace.lives.pop(second.request_id, None)
