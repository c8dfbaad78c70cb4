"""Same tokens, whatever happens: one random play, several drivers, one oracle.

A *play* says which requests come before which step, alone or several in one call, who leaves, how
the policy changes, and how little memory there is. A *driver* performs it: the loop, an LLM with
its streams, the server's runner, the micro-batches of a pipeline, the real stages of one. What a
driver cannot do, it leaves out. In the end, each request must have the tokens that it gets alone,
and nothing of it may be left.

The oracle recomputes everything for each new token: no cache, no batch, no scheduler. The models
are tiny and in float64, so that tokens agree exactly.
"""

import command.enter  # noqa: F401

import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch

from attention import PLAIN
from batch import Batch, Request
from command.checks import UserError, shown
from command.cli import progress, run_main
from command.flags import Parser
from configs import MODELS
from executor import ModelExecutor
from kvcache import KVCache
from loop import Loop, Result
from model import Transformer
from more.beam.executor import BeamExecutor
from more.beam.outputs import beam_requests
from more.beam.request import CACHES, BeamRequest, BeamSearchParams, count_beams
from more.beam.search import BeamSearch, best_candidates
from more.fast.backends import choose_backend, speed_up
from more.loading.policyfile import is_ours, knows_end, load_policies
from more.paged.blocks import BlockMemory, Blocks
from more.paged.cache import make_cache, manage
from more.pipeline import Rules, make_micro_batches
from more.pipeline.micro_batches import DEALS
from more.pipeline.one_pool import OnePool
from more.pipeline.phases import STEALING
from more.policies.engines import PrefillFirst
from more.policies.qoserve import QoServe
from more.policies.srpt import SRPT
from more.policies.variants import ChunkedOnly, HybridOnly
from more.policies.vtc import VTC
from more.web.real import RealEngine
from more.web.runner import Delta, Runner
from nano_sarathi import LLM
from sampling import Sampler, SamplingParams
from scheduler import (
    POLICIES,
    Orca,
    RequestLevel,
    Sarathi,
    SarathiServe,
    Scheduler,
    VLLMv0,
    held,
    make_scheduler,
)
from tests.shared import TINY, PlainLLM, last_logits, one_at_a_time, small_llm, tiny_model

LONGEST = 40  # tokens of prompt and output: fewer than the tiny models have positions
OUTPUT = 14  # tokens, at most
PROMPTS = 12  # of each model
PLAYS = 50  # of a user's own policy, with each driver
STEPS = 5000  # more than any play needs
REORDER = (VTC, SRPT, QoServe)  # all others are first come, first served
PATIENCE = 60.0  # s until a runner is given up
TICK = 1e-3  # s of a real clock, for a step of a virtual one
SERVED = "llama-gqa"  # the model of an LLM

# ------------------------------------------------------------------------- what each request gets


@dataclass(frozen=True)
class Known:
    """A prompt, how its tokens are chosen, and the tokens."""

    prompt: list[int]
    params: SamplingParams | None  # None: greedy
    seed: int
    tokens: list[int]


@cache
def model_of(family: str) -> Transformer:
    demo = family == "demo"
    return LLM("demo", dtype="float64", device="cpu").model if demo else tiny_model(family)


@cache
def known(family: str) -> list[Known]:
    """Prompts of a model, with the tokens that follow: the same for all plays."""
    rng = random.Random(family)
    model = model_of(family)
    found = []
    for number in range(PROMPTS):
        length = rng.choice((1, 2, 3, rng.randint(4, 12), rng.randint(12, LONGEST - OUTPUT)))
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
        if number % 2:  # it begins as another one does
            begin = rng.choice(found).prompt
            prompt[: len(begin)] = begin[:length]
        params = None
        if number % 3 == 0:
            how = rng.choice((0.5, 1.0, 3.0)), rng.choice((0, 7)), rng.choice((1.0, 0.8))
            params = SamplingParams(OUTPUT, *how)
        sampler = Sampler(params, number) if params else None
        tokens = one_at_a_time(model, prompt, OUTPUT, sampler)
        found.append(Known(prompt, params, number, tokens))
    return found


@dataclass(frozen=True)
class Asked:
    """A request, and the tokens that it must get."""

    known: Known
    count: int
    stop_ids: tuple[int, ...]

    @property
    def prompt(self) -> list[int]:
        return self.known.prompt

    @property
    def expected(self) -> list[int]:
        tokens = self.known.tokens[: self.count]
        ends = [place for place, token in enumerate(tokens) if token in self.stop_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    @property
    def reason(self) -> str:
        return "stop" if self.expected[-1] in self.stop_ids else "length"

    @property
    def tags(self) -> dict[str, str]:
        """For policies that ask: a user, a guess of the length, and what is promised."""
        rng = random.Random(f"tags {self.known.seed} {self.count}")
        promised = {"ttft": rng.choice("159"), "tbt": rng.choice("29")}
        if rng.random() < 0.3:
            promised = {"ttlt": rng.choice(("20", "100"))}
        return {"user": rng.choice("abc"), "predicted_tokens": str(rng.randint(1, 20))} | promised

    def request(self, number: int, arrival: float = 0.0) -> Request:
        known = self.known
        sampler = Sampler(known.params, known.seed) if known.params else None
        stop_ids = frozenset(self.stop_ids)
        made = Request(number, known.prompt, self.count, stop_ids, arrival, sampler=sampler)
        made.tags = self.tags
        return made

    def params(self) -> SamplingParams:
        how = self.known.params or SamplingParams()
        return replace(
            how, max_tokens=self.count, seed=self.known.seed, stop_ids=self.stop_ids, tags=self.tags
        )


@dataclass(frozen=True)
class Search:
    """A beam search, and the sequences that it must find."""

    family: str
    prompt: list[int]
    params: BeamSearchParams
    cache: str

    @property
    def expected(self) -> list[list[int]]:
        return searched(self.family, tuple(self.prompt), self.params)

    def request(self, number: int, arrival: float = 0.0) -> Request:
        plain = Request(number, self.prompt, self.params.max_tokens, arrival=arrival)
        plain.stop_ids = frozenset(self.params.stop_ids)
        config = model_of(self.family).config
        slots = KVCache(config, 1, config.max_length)
        return beam_requests([plain], self.params, self.cache, config, slots)[0]


@cache
def searched(family: str, prompt: tuple[int, ...], params: BeamSearchParams) -> list[list[int]]:
    model = model_of(family)
    search = BeamSearch(params, frozenset(params.stop_ids), model.config.vocab_size)
    beams: list[list[int]] = [[]]
    while not search.done:
        logits = torch.stack([last_logits(model, [*prompt, *beam]) for beam in beams])
        search.step(best_candidates([search], logits)[0])
        pairs = zip(search.parents, search.tokens, strict=True)
        beams = [[*beams[parent], token] for parent, token in pairs]
    return [each.token_ids for each in search.finished]


def ask(family: str, rng: random.Random) -> Asked:
    """A request at random. One in four has a token that ends it, most often early."""
    drawn = rng.choice(known(family))
    stop_ids = (rng.choice(drawn.tokens),) if rng.random() < 0.25 else ()
    return Asked(drawn, rng.choice((OUTPUT, rng.randint(1, OUTPUT))), stop_ids)


# ----------------------------------------------------------------------------------------- a play


@dataclass(frozen=True)
class Call:
    """Requests that come together, before a step.

    arrivals: steps from there until each arrives. leaves: the step before which all of them are
    cancelled; None: never. whole: its tokens are wanted all at once (`LLM.generate`).
    """

    step: int
    asked: tuple[Asked | Search, ...]
    arrivals: tuple[float, ...]
    leaves: int | None
    whole: bool


@dataclass(frozen=True)
class Play:
    """size: B. chunk: C. memory: tokens of the cache. switches: (step, policy, C).

    stages, micro_batches, filling: of a pipeline, for `make_micro_batches`. blocks: of the cache;
    None: slots.
    """

    seed: str
    family: str
    policy: str
    backend: str
    size: int
    chunk: int
    memory: int | None
    calls: tuple[Call, ...]
    switches: tuple[tuple[int, str, int], ...] = ()
    stages: int = 1
    micro_batches: int = 1
    filling: dict = field(default_factory=dict)
    blocks: Blocks | None = None

    @property
    def asked(self) -> list[Asked | Search]:
        """Of all calls. The place in this list is the number of a request."""
        return [asked for call in self.calls for asked in call.asked]

    def numbered(self) -> list[tuple[Call, range]]:
        """Each call, and the numbers of its requests."""
        ends = accumulate(len(call.asked) for call in self.calls)
        pairs = zip(self.calls, ends, strict=True)
        return [(call, range(end - len(call.asked), end)) for call, end in pairs]

    def script(self) -> deque[tuple[int, str, tuple]]:
        """(step, act, what it is about) in the order of the steps: "come", "leave", "switch"."""
        acts: list[tuple[int, str, tuple]] = []
        for call, numbers in self.numbered():
            acts.append((call.step, "come", (call, numbers)))
            if call.leaves is not None:
                acts.append((call.leaves, "leave", (call, numbers)))
        acts += [(step, "switch", (policy, size)) for step, policy, size in self.switches]
        return deque(sorted(acts, key=lambda act: act[0]))


def due(script: deque, step: int, idle: bool) -> Iterator[tuple[str, tuple]]:
    """The acts before this step. If nobody is here, the next one comes at once."""
    while script and (script[0][0] <= step or idle):
        _, act, what = script.popleft()
        yield act, what
        idle = idle and act != "come"


def random_policy(rng: random.Random) -> str:
    sizes = sorted((rng.randint(1, 20) for _ in range(rng.randint(1, 3))), reverse=True)
    options = {"dynamic": ",".join(map(str, sizes)), "vllm_v0": sizes[0], "vllm_v1": sizes[-1]}
    name = rng.choice(list(POLICIES))
    return rng.choice((name, f"{name}:{options[name]}" if name in options else name))


def draw(
    seed: object, policy: str | None = None, family: str | None = None, beams: bool = False
) -> Play:
    """A play at random. policy, family: None is any."""
    rng = random.Random(f"play {seed} {policy}")
    family = family or rng.choice(list(TINY))
    calls = []
    searches = beams and not TINY[family].narrow and rng.random() < 0.3
    for _ in range(rng.randint(1, 5)):
        step = rng.choice((0, 0, rng.randint(0, 15)))
        asked = tuple(ask(family, rng) for _ in range(rng.randint(1, 4)))
        if searches and rng.random() < 0.5:
            one = draw_search(family, rng)
            other = draw_search(family, rng)
            asked = one, replace(other, cache=one.cache)
        waits = [rng.choice((0.0, 0.0, 9 * rng.random())) for _ in asked]
        leaves = step + rng.randint(0, 12) if rng.random() < 0.3 else None
        calls.append(Call(step, asked, tuple(waits), leaves, rng.random() < 0.2))
    every = [each.request(0).most_cached for call in calls for each in call.asked]
    tight = max(every) + rng.randint(0, 5)
    memory = tight if searches else rng.choice((None, tight, max(every) + rng.randint(0, 40)))
    size = rng.randint(1, 6)
    chunk = rng.choice((1, 3, rng.randint(4, 24), rng.randint(4, 24), 64))
    switches = [
        (rng.randint(1, 20), random_policy(rng), rng.choice((1, 5, 8, 17, 64)))
        for _ in range(rng.choice((0, 3, 9)))
    ]
    filling: dict = {"memory": rng.choice(("split", "pool"))}
    if policy and policy.startswith("td_pipe"):
        filling["memory"] = rng.choice(("split", "pool", "pool"))
        if policy == "td_pipe":
            limit = rng.choice((1.0, 0.7))
            pack = rng.choice((1, 30, 192))
            filling["rules"] = Rules(stealing=rng.choice(STEALING), limit=limit, pack=pack)
    else:
        filling["deal"] = rng.choice(DEALS)
    play = Play(
        f"{seed}",
        family,
        policy or random_policy(rng),
        rng.choice(list(PLAIN)),
        size,
        chunk,
        memory,
        tuple(calls),
        tuple(switches),
        rng.randint(1, 4),
        rng.randint(1, 5),
        filling,
    )
    return play if searches or rng.random() < 0.5 else in_blocks(play)


def in_blocks(play: Play) -> Play:
    """The same play with a cache in blocks: most often small ones, which prompts share."""
    rng = random.Random(f"blocks {play.seed} {play.policy}")
    size = rng.choice((1, 2, 3, 4, 5, 8, 16, rng.randint(1, 64)))
    memory = -(-play.memory // size) * size if play.memory else None
    return replace(play, memory=memory, blocks=Blocks(size, rng.random() < 0.8))


def draw_search(family: str, rng: random.Random) -> Search:
    vocab = model_of(family).config.vocab_size
    prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 20))]
    stop_ids = tuple(rng.sample(range(vocab), rng.choice((0, 2, 6))))
    params = BeamSearchParams(
        rng.randint(1, 4),
        rng.randint(1, 18),
        stop_ids=stop_ids,
        length_penalty=rng.choice((0.0, 1.0)),
        early_stopping=rng.choice((False, True)),
    )
    return Search(family, prompt, params, rng.choice(CACHES))


Found = dict[int, tuple[list, str | None]]
"""Number of a request -> its tokens (of a search: the sequences), and why it ended."""


def check(play: Play, found: Found) -> None:
    """Who has ended has its tokens alone; who was cancelled or rejected, the first of them."""
    leavers = {n for call, numbers in play.numbered() if call.leaves is not None for n in numbers}
    for number, asked in enumerate(play.asked):
        (tokens, reason), expected = found[number], asked.expected
        early = (number in leavers and reason == "abort") or reason == "reject"
        who = f"request {number} does not end as alone"
        for place, (token, right) in enumerate(zip(tokens, expected, strict=False)):
            hold(f"{who}, output token {place}", token, right)
        count = min(len(tokens), len(expected)) if early else len(expected)
        hold(f"{who}, how many tokens it has", len(tokens), count)
        if not early and not isinstance(asked, Search):
            hold(f"{who}, why it ends", reason, asked.reason)


# ------------------------------------------------------------------------------ what always holds


def hold(rule: str, found: object, expected: object) -> None:
    """An AssertionError that says which rule is broken, what was found, and what should be."""
    assert found == expected, f"{rule}: it is {shown(found)}, and must be {shown(expected)}"


def nobody_left(schedulers: Sequence[Scheduler]) -> None:
    left = [r.request_id for each in schedulers for r in (*each.running, *each.waiting)]
    assert not left, f"requests {left} starve: they wait or run after {STEPS} steps"


def check_rules(scheduler: Scheduler, batch: Batch, alone: bool = True) -> None:
    """Of our policies: the token budget, no decode that waits, what a batch may hold, and the
    order of arrival. (A micro-batch may preempt what another one has overtaken.)
    """
    if not is_ours(type(scheduler)):
        return
    alternates = isinstance(scheduler, ChunkedOnly | PrefillFirst)
    if isinstance(scheduler, Sarathi):
        assert len(batch.chunks) <= 1, "two chunks"
    if alternates or isinstance(scheduler, RequestLevel | VLLMv0):
        assert not (batch.chunks and batch.decodes), "prefills beside decodes"
    if isinstance(scheduler, RequestLevel | Orca | VLLMv0 | HybridOnly):
        assert all(chunk.is_last for chunk in batch.chunks), "a part of a prompt"
    rows = batch.num_prefill_tokens + scheduler.rows(batch.decodes)  # of a search: BW
    if isinstance(scheduler, Sarathi | SarathiServe) and (batch.chunks or not alternates):
        assert rows <= scheduler.chunk_size or not batch.chunks, "the budget is exceeded"
        ready = [request for request in scheduler.running if not request.in_prefill]
        assert alternates or {*batch.decodes} == {*ready}, "a decode waits"
    if isinstance(scheduler, HybridOnly) and len(batch.chunks) > 1:
        assert rows <= scheduler.chunk_size, "only one prompt may exceed the budget"
    started = [chunk.request.arrival for chunk in batch.chunks if not chunk.request.chunks_run]
    if alone and started and scheduler.waiting and not isinstance(scheduler, REORDER):
        first = min(request.arrival for request in scheduler.waiting)
        assert max(started) <= first, "somebody is overtaken"


def check_books(executor: ModelExecutor, schedulers: Sequence[Scheduler]) -> None:
    """Who runs holds what the schedulers, the executor and the cache say that it holds."""
    running = [request for scheduler in schedulers for request in scheduler.running]
    started = [request for request in running if request.chunks_run]
    slot_of = executor.slot_of
    used = executor.cache.used
    ids = sorted(request.request_id for request in started)
    hold("the requests that have a slot are those that run and have begun", sorted(slot_of), ids)
    hold("each has a slot of its own: how many", len(set(slot_of.values())), len(started))
    in_use = [slot for slot, tokens in enumerate(used) if tokens is not None]
    hold("slots in use are those of running requests", in_use, sorted(slot_of.values()))
    for request in started:
        in_slot = request.prefilled if isinstance(request, BeamRequest) else request.context
        what = f"request {request.request_id}: tokens in its slot, and `context`"
        hold(what, used[slot_of[request.request_id]], in_slot)
    if isinstance(schedulers[0].memory, BlockMemory):
        check_blocks(executor, schedulers[0].memory, running)
    check_memories(schedulers)


def check_memories(schedulers: Sequence[Scheduler], flying: int = 0) -> None:
    """The memory, or that of all micro-batches together, knows what is in it and in flight."""
    memories = {id(each.memory): each.memory for each in schedulers}.values()
    flying_here = sum(getattr(memory, "flying", 0) for memory in memories)
    hold("next tokens in flight, in `memory.flying`", flying_here, flying)
    for memory in memories:
        sharers = [each for each in schedulers if each.memory is memory]
        if not isinstance(memory, BlockMemory):
            total = sum(held(r) for each in sharers for r in each.running)
            hold("tokens that running requests hold, in `memory.taken`", memory.taken, total)
        most = memory.capacity
        assert memory.room >= 0, f"the cache overflows: {most - memory.room} tokens of {most}"
    for each in schedulers:
        ids = [request.request_id for request in each.running]
        most = each.max_batch_size
        assert len(ids) <= most, f"requests {ids} run at once, and B is {most}"


def check_blocks(
    executor: ModelExecutor | None, memory: BlockMemory, running: Sequence[Request]
) -> None:
    """Each block is held as often as the tables say, or idle, or free: none is lost, none twice."""
    size = memory.block_size
    tables = memory.tables
    ids = [sorted(request.request_id for request in each) for each in (tables, running)]
    hold("the requests that have blocks are those that run", *ids)
    for request, table in tables.items():
        who = f"request {request.request_id}: "
        hold(f"{who}its blocks", len(set(table.blocks)), len(table.blocks))
        hold(f"{who}blocks of what it holds", len(table.blocks), -(-held(request) // size))
        if executor and request.chunks_run:
            row = executor.cache.table[executor.slot_of[request.request_id]]
            hold(f"{who}its row of the table", row[: len(table.blocks)].tolist(), table.blocks)
    references = Counter(block for table in tables.values() for block in table.blocks)
    blocks = range(len(memory.references))
    hold("who holds each block", memory.references, [references[block] for block in blocks])
    every = sorted([*references, *memory.idle, *memory.free])
    hold("each block is held, idle or free", every, list(blocks))
    assert memory.most is None or len(blocks) <= memory.most, "more blocks than there are"
    hold("tokens of blocks that are held, in `memory.taken`", memory.taken, size * len(references))
    keys = {block: key for key, block in memory.block_of.items()}
    assert keys == memory.key_of, "a block has one key, and a key one block"
    assert set(memory.idle) <= set(memory.key_of), "an idle block has no key"
    assert not set(memory.free) & set(memory.key_of), "a free block has a key"


def check_end(executor: ModelExecutor, schedulers: Sequence[Scheduler]) -> None:
    """Nothing is left anywhere."""
    nobody_left(schedulers)
    for memory in [each.memory for each in schedulers]:
        left = memory.taken, getattr(memory, "flying", 0)
        hold("at the end, tokens taken and in flight", left, (0, 0))
    hold("at the end, who has a slot", executor.slot_of, {})
    hold("at the end, slots in use", set(executor.cache.used), {None})
    assert not getattr(executor, "memories", None), "a beam leaks"


class Virtual:
    """Of an executor: a clock of its own, so that a seed gives the same schedule anywhere."""

    clock = 0.0
    rng = random.Random(0)
    scheduler: Scheduler | None = None  # its batches must keep the rules

    def now(self) -> float:
        return self.clock

    def wait_until(self, moment: float) -> None:
        assert moment >= self.clock, "time goes back"
        self.clock = moment

    def execute(self, batch: Batch) -> Result:
        if self.scheduler:
            check_rules(self.scheduler, batch)
        result = super().execute(batch)
        seconds = self.rng.choice((0.1, 1.0, 3.0))
        self.clock += seconds
        return Result(result.tokens, seconds)


class VirtualExecutor(Virtual, ModelExecutor):
    pass


class VirtualBeams(Virtual, BeamExecutor):
    pass


def make_executor(play: Play, slots: int) -> VirtualExecutor | VirtualBeams:
    model = model_of(play.family)
    size = model.config, slots, LONGEST + 1, model.dtype, model.device
    cache = make_cache(*size, play.blocks, play.memory)
    executor = VirtualExecutor(model, cache, PLAIN[play.backend], cost=price)
    if any(isinstance(asked, Search) for asked in play.asked):
        executor = VirtualBeams(executor, play.backend)
    executor.rng = random.Random(f"clock {play.seed}")
    return executor


def price(batch: Batch) -> float:
    """Seconds, for policies that ask."""
    rows = sum(chunk.length * (1 + chunk.start / 50) for chunk in batch.chunks)
    return 0.5 + rows / 20 + len(batch.decodes) / 50


# ----------------------------------------------------------------------------------------- drivers


@contextmanager
def numbered(step: int) -> Iterator[None]:
    """An error says in which step of a play it was raised, as the driver counts."""
    try:
        yield
    except (AssertionError, UserError) as error:
        error.add_note(f"step {step}")
        raise


def by_loop(play: Play) -> Found:
    executor = make_executor(play, play.size)
    scheduler = make_scheduler(play.policy, play.size, play.chunk, play.memory)
    executor.scheduler = manage(scheduler, executor.cache)
    if isinstance(executor, BeamExecutor):
        count_beams(scheduler)
    loop = Loop(scheduler, executor)
    script = play.script()
    requests = {}
    gone: list[int] = []
    for step in range(STEPS):
        with numbered(step):
            for act, what in due(script, step, not loop.busy):
                if act == "come":
                    call, numbers = what
                    for number, asked, wait in zip(numbers, call.asked, call.arrivals, strict=True):
                        requests[number] = asked.request(number, executor.now() + wait)
                        loop.add(requests[number])
                elif act == "leave":
                    for request in [requests[number] for number in what[1]]:
                        alive = request.finish_reason is None
                        hold(f"request {request.request_id}: `cancel`", loop.cancel(request), alive)
                        gone += [request.request_id] * alive
                check_books(executor, [scheduler])
            iteration = loop.step()
            if iteration is None:
                if not script:
                    break
                continue
            assert iteration is loop.trace.iterations[-1], "the trace lacks this iteration"
            ids = [[chunk.request.request_id for chunk in loop.batch.chunks]]
            ids.append([request.request_id for request in loop.batch.decodes])
            recorded = [[own for own, *_ in iteration.chunks], list(iteration.decodes)]
            hold("chunks and decodes of the iteration, in the trace", recorded, ids)
            check_books(executor, [scheduler])
    check_end(executor, [scheduler])
    trace = loop.trace
    early = ("abort", "reject")
    ended = [own for own, request in requests.items() if request.finish_reason not in early]
    hold("the requests that end", sorted(own for own, _ in trace.finished), sorted(ended))
    hold("the requests that are cancelled", [own for own, _ in trace.cancelled], gone)
    rejected = [own for own, request in requests.items() if request.finish_reason == "reject"]
    told = [own for own, _ in trace.rejected]
    hold("the requests that are rejected", sorted(told), sorted(rejected))
    for own, life in trace.lives.items():
        assert life.scheduled >= requests[own].arrival, f"request {own} runs before it arrives"
        counted = requests[own].preemptions
        hold(f"request {own}: times that it lost its cache", life.preemptions, counted)
    return {number: outcome(request) for number, request in requests.items()}


def outcome(request: Request) -> tuple[list, str | None]:
    if not isinstance(request, BeamRequest):
        return request.output, request.finish_reason
    finished = request.search.finished if request.search else []
    ended = request.finish_reason != "abort"
    return [each.token_ids for each in finished] if ended else [], request.finish_reason


@cache
def llm_of(fast: bool) -> LLM:
    """An LLM with the weights of SERVED, and with or without the folder more/fast/."""
    size = {"max_batch_size": 6, "max_length": LONGEST + 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small", replace(TINY[SERVED], name="small"))
        llm = small_llm(PlainLLM, cost=price, **size)
    if fast:
        llm.attention = choose_backend("auto", llm.device, llm.dtype, llm.config)
        made = speed_up(llm.model, llm.cache, llm.attention, measure=False)
        llm.attention, llm.attend, llm.surroundings = made
    return llm


def ready(play: Play) -> LLM:
    """The LLM of a play. Nothing may run on it."""
    llm = llm_of(play.backend == "sdpa")
    assert set(llm.cache.used) == {None} and not (llm._loop and llm._loop.busy), "a slot leaks"
    if play.blocks or llm.blocks:
        llm.blocks = play.blocks
        llm.cache_tokens = play.memory
        llm.resize_cache(6)
    llm.policy = play.policy
    llm.chunk_size = play.chunk
    llm.max_batch_size = play.size
    llm.cache_tokens = play.memory
    return llm


def by_stream(play: Play, llm: LLM | None = None) -> Found:
    """A call is a stream, a `generate` or a `beam_search`. Its cancel closes the stream."""
    llm = llm or ready(play)
    script = play.script()
    found = {}
    rng = random.Random(f"streams {play.seed}")
    streams: dict[range, Iterator] = {}
    for step in range(STEPS):
        with numbered(step):
            for act, what in due(script, step, not streams):
                if act == "come":
                    call, numbers = what
                    prompts = [a.prompt for a in call.asked]
                    params = [a.params for a in call.asked]
                    if isinstance(call.asked[0], Search):
                        outputs = llm.beam_search(prompts, params, cache=call.asked[0].cache)
                        for number, output in zip(numbers, outputs, strict=True):
                            sequences = [each.token_ids for each in output.sequences]
                            reason = output.sequences[0].finish_reason
                            found[number] = [] if reason == "reject" else sequences, reason
                        continue
                    params = [each() for each in params]
                    waits = [TICK * w for w in call.arrivals]
                    if call.whole:
                        begin = time.perf_counter()
                        outputs = llm.generate(prompts, params, waits)
                        passed = time.perf_counter() - begin
                        for number, output in zip(numbers, outputs, strict=True):
                            prompt = play.asked[number].prompt
                            hold(f"request {number}: its prompt", output.prompt_token_ids, prompt)
                            times = 0, output.ttft, output.latency, passed
                            in_order = list(times) == sorted(times)
                            early = output.finish_reason == "reject"
                            assert in_order or early, f"request {number}: its times"
                            found[number] = output.token_ids, output.finish_reason
                    else:
                        found |= {number: ([], None) for number in numbers}
                        streams[numbers] = llm.stream(prompts, params, waits)
                elif act == "leave" and what[1] in streams:
                    streams.pop(what[1]).close()
                    for number in what[1]:  # nobody tells it why it ends
                        found[number] = found[number][0], found[number][1] or "abort"
                elif act == "switch" and not streams:
                    llm.policy, llm.chunk_size = what
            if streams:
                numbers = rng.choice(list(streams))
                token = next(streams[numbers], None)
                if token is None:
                    del streams[numbers]
                else:
                    tokens, reason = found[numbers[token.index]]
                    assert reason is None, "tokens come after the end"
                    if token.finish_reason != "reject":  # else it is no token
                        tokens = [*tokens, token.token_id]
                    found[numbers[token.index]] = tokens, token.finish_reason
            elif not script:
                break
    assert set(llm.cache.used) == {None} and not (llm._loop and llm._loop.busy), "a slot leaks"
    lives = llm._loop.trace.lives if llm._loop else {}  # a stream that never began has no trace
    assert set(lives) <= set(range(llm._next_id)), "a new loop counts ids on"
    return found


class Clients:
    """Collects what a runner delivers, and what it tells.

    deltas: by tag. events: all of them. at: iteration -> what to do after it (the engine thread
    does it, so that the moment is the same in each run).
    """

    def __init__(self, engine: object, queue: int = 1000):
        self.deltas: dict[object, list[Delta]] = defaultdict(list)
        self.events: list[dict] = []
        self.at: dict[int, list[Callable[[], object]]] = defaultdict(list)
        self.runner = Runner(engine, queue=queue, deliver=self.deliver)
        self.runner.watch(self.watch)

    def deliver(self, news: list[tuple[object, Delta]]) -> None:
        for tag, delta in news:
            self.deltas[tag].append(delta)

    def watch(self, event: dict) -> None:
        self.events.append(event)
        if event["type"] == "iteration":
            for do in self.at.pop(event["n"], ()):
                do()

    def submit(self, tags: Sequence[object], prompt: Sequence[int], most: int) -> None:
        """A request for each tag."""
        self.runner.submit([Request(0, prompt, most) for _ in tags], tags)

    def wait(self, tags: Sequence[object]) -> None:
        with self.runner.changed:
            ended = self.runner.changed.wait_for(lambda: not self.runner.streams, PATIENCE)
        assert ended and all(map(self.reason, tags)), "a stream did not end"

    def reason(self, tag: object) -> str | None:
        return self.deltas[tag][-1].finish_reason if self.deltas[tag] else None

    def tokens(self, tag: object) -> list[int]:
        """Of a stream that has ended: it ended once, at its end."""
        *before, last = self.deltas[tag]
        assert last.finish_reason, f"{tag} goes on"
        assert not any(delta.finish_reason for delta in before), f"{tag} ended twice"
        return [delta.token for delta in self.deltas[tag] if delta.token is not None]

    def told(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["type"] == kind]

    def finish(self) -> None:
        """Run all to its end. Then nothing of any request may be left."""
        runner = self.runner
        if not runner.thread.is_alive():
            runner.start()
        assert runner.drain(PATIENCE), "requests are left"
        runner.close()
        assert not runner.thread.is_alive(), "the engine does not end"
        check_runner(runner)
        queued, ended = [
            sorted(event["id"] for event in self.told(kind)) for kind in ("queued", "ended")
        ]
        hold("requests that have ended are those that came", ended, queued)


def by_runner(play: Play) -> Found:
    """The acts come in the engine thread, after its steps. So they are the same in each run."""
    clients = Clients(RealEngine(ready(play)))
    script = play.script()
    requests = {number: asked.request(number) for number, asked in enumerate(play.asked)}
    runner = clients.runner
    failed = []
    switches: list[Future[list[int]]] = []  # what they answer: the requests that they preempt

    def act_before(step: int, idle: bool) -> None:
        for act, what in due(script, step, idle):
            if act == "come":
                runner.submit([requests[number] for number in what[1]], what[1])
            elif act == "leave":
                for number in what[1]:
                    runner.cancel(requests[number])
            else:
                switches.append(runner.switch(*what))

    def watch(event: dict) -> None:
        try:
            if event["type"] == "iteration":
                with numbered(event["n"]):
                    check_books(runner.loop.executor, [runner.loop.scheduler])
                    act_before(event["n"], False)
        except BaseException as error:  # noqa: BLE001 (raised below, in the thread of the test)
            failed.append(error)

    runner.watch(watch)
    act_before(0, True)
    runner.start()
    try:
        while True:
            clients.wait(())
            if not script or failed:
                break
            act_before(runner.iterations, True)
    finally:
        runner.close()
    if failed:
        raise failed[0]
    assert not runner.failures, f"{runner.error}"
    check_runner(runner)
    check_lanes(clients.events, play.size)
    said = [event["preempted"] for event in clients.told("switched")]
    answers = [each.result() for each in switches if not each.exception()]
    assert answers == said, "or it was closed before"
    found = {}
    for number, deltas in clients.deltas.items():
        moments = [requests[number].arrival, *(delta.moment for delta in deltas)]
        assert moments == sorted(moments), "the moments of its news go back"
        found[number] = clients.tokens(number), clients.reason(number)
    return found


def check_runner(runner: Runner) -> None:
    """Nothing is left of any request."""
    loop = runner.loop
    lanes = runner.lanes
    for kept in (
        runner.streams,
        lanes.of,
        runner.inbox,
        runner.news,
        runner.ended,
        loop.arriving,
        loop.trace.lives,
        loop.trace.preempted,
    ):
        hold("at the end, what is kept of requests", len(kept), 0)
    assert sorted(lanes.free) == list(range(len(lanes.free))), "each lane comes back"
    if runner.engine.priced:
        hold("at the end, tokens taken", loop.scheduler.memory.taken, 0)
        nobody_left([loop.scheduler])
    else:
        check_end(loop.executor, [loop.scheduler])


def check_lanes(events: Sequence[dict], most: int) -> None:
    """A request keeps its lane until it ends or is preempted; a newcomer gets the lowest free."""
    lanes: dict[int, int] = {}
    for event in events:
        if event["type"] in ("started", "iteration"):
            for own, lane, *_ in [*event["chunks"], *event["decodes"]]:
                lowest = min({*range(most)} - {*lanes.values()}, default=None)
                hold(f"request {own}: its lane", lane, lanes.setdefault(own, lowest))
        elif event["type"] in ("ended", "preempted"):
            lanes.pop(event["id"], None)
    hold("at the end, lanes in use", lanes, {})


def by_micro_batches(play: Play) -> Found:
    """As stage 0 does: no more are in flight than there are, and they come back in their order."""
    work = make_micro_batches(
        play.policy,
        play.micro_batches,
        play.stages,
        play.size,
        play.chunk,
        play.memory,
        seconds_of=lambda rows: 1.0 + rows / 8,
        cost=price,
        **play.filling,
    )
    memories = {id(scheduler.memory) for scheduler in work.schedulers}
    assert len(memories) == 1 or play.filling.get("memory") != "pool", "they share one pool"
    executor = make_executor(replace(play, blocks=None), play.size * play.micro_batches)
    rng = executor.rng
    script = play.script()
    requests = {}
    flying: deque[tuple[int, Batch, list[int]]] = deque()
    idle = list(range(work.count))
    fruitless = 0
    for step in range(STEPS):
        with numbered(step):
            for act, what in due(script, step, not (flying or work.busy)):
                if act == "come":
                    call, numbers = what
                    for number, asked, wait in zip(numbers, call.asked, call.arrivals, strict=True):
                        requests[number] = asked.request(number, executor.now() + wait)
                        work.add(requests[number])
            for number in list(idle):
                batch, _ = work.next(number, executor.now())
                for request in work.take_preempted():
                    executor.release(request)
                for request in work.take_rejected():
                    if request.chunks_run:
                        executor.release(request)
                if batch is not None:
                    idle.remove(number)
                    if not isinstance(work, OnePool):  # there, decodes may be in flight
                        check_rules(
                            work.schedulers[number % len(work.schedulers)], batch, alone=False
                        )
                    flying.append((number, batch, executor.execute(batch).tokens))
                check_memories(work.schedulers, sum(len(batch.decodes) for _, batch, _ in flying))
                if flying and rng.random() < 0.3:
                    break
            if flying:
                fruitless = 0
                number, batch, tokens = flying.popleft()
                for request in work.done(number, batch, tokens):
                    executor.release(request)
                idle.append(number)
                check_memories(work.schedulers, sum(len(batch.decodes) for _, batch, _ in flying))
            elif work.next_arrival is not None:
                executor.wait_until(max(executor.now(), work.next_arrival))
            elif not work.busy and not script:
                break
            elif work.busy:
                fruitless += 1
                assert fruitless <= 2, "it schedules nothing, and nothing is in flight"
    check_end(executor, work.schedulers)
    return {number: outcome(request) for number, request in requests.items()}


DRIVERS: dict[str, Callable[[Play], Found]] = {
    "Loop": by_loop,
    "LLM": by_stream,
    "Runner": by_runner,
    "MicroBatches": by_micro_batches,
}


def crowd(policy: str, tight: bool) -> Play:
    """Nine requests at once on three stages, for what many have in common."""
    rng = random.Random("crowd")
    asked = tuple(ask("demo", rng) for _ in range(9))
    memory = max(each.request(0).most_cached for each in asked) + 3 if tight else None
    call = Call(0, asked, (0.0,) * 9, None, True)
    return Play("crowd", "demo", policy, "sdpa", 2, 16, memory, (call,), (), 3, 3)


def by_stages(llm: LLM, play: Play) -> Found:
    """In every process of a pipeline (tests/pipeline_worker.py): all calls at once.

    llm: a PipelineLLM of `play.family`. Only process 0 finds anything.
    """
    llm.policy = play.policy
    llm.chunk_size = play.chunk
    llm.cache_tokens = play.memory
    llm.micro_batch_size = min(play.size, llm.cache.slots // llm.micro_batches)
    llm.filling = play.filling
    waits = [TICK * wait for call in play.calls for wait in call.arrivals]
    prompts = [each.prompt for each in play.asked]
    params = [each.params() for each in play.asked]
    outputs = llm.generate(prompts, params, waits)
    return {i: (output.token_ids, output.finish_reason) for i, output in enumerate(outputs)}


def perform(driver: str, seed: object, policy: str | None = None, paged: bool = False) -> Play:
    """Draw a play that this driver can perform, let it, and check what it found.

    paged: its cache is in blocks; else that of some plays is.
    """
    served = driver in ("LLM", "Runner")
    beams = driver in ("Loop", "LLM") and not paged
    play = draw(seed, policy, SERVED if served else None, beams)
    play = in_blocks(replace(play, blocks=None)) if paged else play
    try:
        check(play, DRIVERS[driver](play))
    except AssertionError as error:
        error.add_note(f"{play}")
        raise
    return play


def check_source(path: Path) -> None:
    """Refuse a policy that knows when a request will end."""
    if said := knows_end(path):
        raise UserError(said)


def main() -> None:
    """Whether the policies of a file keep all tokens."""
    parser = Parser(main.__doc__, {})
    parser.add_argument("files", nargs="+", type=Path, help="Python files with policies")
    files = parser.parse_args().files
    names = [name for path in files for name in load_policies(path)]
    for path in files:
        check_source(path)
    for name in names:
        plays = list(product(DRIVERS, range(PLAYS)))
        for driver, seed in progress(plays, f"{name}, plays"):
            try:
                perform(driver, seed, name)
            except (AssertionError, UserError) as error:
                why = f"{error}".partition("\n")[0]
                notes = getattr(error, "__notes__", [])
                step = next((note for note in notes if note.startswith("step ")), "at the end")
                where = f"policy {name!r}, driver {driver}, play {seed}, {step}"
                raise UserError(f"{where}: {why}") from error
        print(f"{name}: the same tokens as alone, in {PLAYS} plays of each of {', '.join(DRIVERS)}")


if __name__ == "__main__":
    run_main(main)
