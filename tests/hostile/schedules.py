"""Random schedules with cancels, late arrivals and little memory: every token must be right.

Three ways to run them: the loop; an LLM with streams that are closed early; and the micro-batches
of a pipeline, TD-Pipe's too. In the end no slot and no token of memory may be taken.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from attention import PLAIN
from batch import Batch, Request
from engine import LLM, StreamedToken
from executor import ModelExecutor
from fast.backends import speed_up
from kvcache import KVCache
from loop import Loop, Result
from pipeline import MicroBatches, Rules, make_micro_batches
from pipeline.phases import STEALING
from scheduler import POLICIES, make_scheduler
from tests.conftest import TINY, tiny_model
from tests.hostile.oracle import LONGEST, Asked, ask, known, model_of
from tests.hostile.recipes import small_llm
from tests.hostile.sandbox import Case

BLOCK = 25  # schedules of a case
SCHEDULES = 3000
STEPS = 5000  # more than any schedule here needs
STREAMED = "llama-gqa"  # the model of `small_llm`


class VirtualExecutor(ModelExecutor):
    """A real model, and a clock of its own: the same seed gives the same schedule anywhere."""

    def __init__(self, family: str, slots: int, backend: str, rng: random.Random):
        model = model_of(family)
        cache = KVCache(model.config, slots, LONGEST + 1, model.dtype)
        super().__init__(model, cache, PLAIN[backend])
        self.clock, self.rng = 0.0, rng

    def now(self) -> float:
        return self.clock

    def wait_until(self, moment: float) -> None:
        self.clock = moment

    def execute(self, batch: Batch) -> Result:
        result = super().execute(batch)
        self.clock += self.rng.choice((0.1, 1.0, 3.0))
        return result


def random_policy(rng: random.Random) -> str:
    sizes = sorted((rng.randint(1, 20) for _ in range(rng.randint(1, 3))), reverse=True)
    options = {"dynamic": f"dynamic:{','.join(map(str, sizes))}", "vllm_v0": f"vllm_v0:{sizes[0]}"}
    name = rng.choice(list(POLICIES))
    return rng.choice((name, options.get(name, name)))


def random_sizes(rng: random.Random, asked: Sequence[Asked]) -> tuple[int, int, int | None]:
    """B, C, and the tokens of the cache: often hardly more than the longest request needs."""
    most = max(len(each.known.prompt) + each.count for each in asked)
    memory = rng.choice((None, most + rng.randint(0, 5), most + rng.randint(0, 60)))
    return rng.randint(1, 6), rng.choice((1, 2, 3, rng.randint(1, 24), 64)), memory


def loop_schedule(rng: random.Random) -> str:
    """Requests come before and while a loop runs, and some are cancelled at any moment."""
    family = rng.choice(list(TINY))
    asked = [ask(family, rng) for _ in range(rng.randint(1, 7))]
    size, chunk, memory = random_sizes(rng, asked)
    executor = VirtualExecutor(family, size, rng.choice(list(PLAIN)), rng)
    scheduler = make_scheduler(random_policy(rng), size, chunk, memory)
    loop = Loop(scheduler, executor)
    requests = [
        each.request(i, rng.choice((0.0, 9 * rng.random()))) for i, each in enumerate(asked)
    ]
    late = [request for request in requests if rng.random() < 0.3]
    for request in requests:
        if request not in late:
            loop.add(request)
    cancels = 0.1 * rng.random() if rng.random() < 0.6 else 0.0
    for _ in range(STEPS):
        if late and rng.random() < 0.3:
            loop.add(late.pop())
        if rng.random() < cancels:
            loop.cancel(rng.choice(requests))
        if loop.step() is None and not late:
            break
    for request in late:
        loop.cancel(request)
    settings = f"{family}, {scheduler.name}, B {size}, C {chunk}, memory {memory}"
    check_requests(settings, asked, requests)
    left = executor.slot_of, [slot for slot in executor.cache.used if slot is not None], loop.busy
    if any(left) or scheduler.memory.taken:
        print(f"leaks: {settings}: {left}, {scheduler.memory.taken} tokens", file=sys.stderr)
    return settings


def pipeline_schedule(rng: random.Random) -> str:
    """Micro-batches come back in the order in which they left, each after some others."""
    family = rng.choice(list(TINY))
    asked = [ask(family, rng) for _ in range(rng.randint(1, 8))]
    size, chunk, memory = random_sizes(rng, asked)
    stages, count = rng.randint(1, 4), rng.randint(1, 5)
    options: dict = {"memory": rng.choice(("split", "pool"))}
    if rng.random() < 0.4:
        policy = rng.choice(("td_pipe", "td_pipe:constant=3"))
        limit, drain = rng.choice((1.0, 0.7)), rng.random() < 0.5
        options["rules"] = Rules(stealing=rng.choice(list(STEALING)), limit=limit, drain=drain,
                                 pack=rng.choice((1, 30, 192)))  # fmt: skip
        if policy != "td_pipe":
            options.pop("rules")
    else:
        policy = random_policy(rng)
        options["deal"] = rng.choice(("queue", "turns"))
        options["refill_every"] = rng.choice((1, 1, 3))
    work = make_micro_batches(
        policy,
        count,
        stages,
        size,
        chunk,
        memory,
        seconds_of=lambda rows: 1.0 + rows / 8,
        **options,
    )
    executor = VirtualExecutor(family, size * count, rng.choice(list(PLAIN)), rng)
    requests = [
        each.request(i, rng.choice((0.0, 9 * rng.random()))) for i, each in enumerate(asked)
    ]
    for request in requests:
        work.add(request)
    settings = f"{family}, {policy}, {count} micro-batches, {stages} stages, B {size}, C {chunk}"
    settings += f", memory {memory} {options}"
    drive(work, executor, rng)
    check_requests(settings, asked, requests)
    taken = [scheduler.memory.taken + scheduler.memory.flying for scheduler in work.schedulers]
    if executor.slot_of or any(taken) or work.busy:
        print(f"leaks: {settings}: {executor.slot_of}, {taken} tokens", file=sys.stderr)
    return settings


def drive(work: MicroBatches, executor: VirtualExecutor, rng: random.Random) -> None:
    """Run micro-batches as stage 0 does: no more in flight than there are, first in, first out."""
    flying: deque[tuple[int, Batch, list[int]]] = deque()
    idle, fruitless = list(range(work.count)), 0
    for _ in range(STEPS):
        for number in list(idle):
            batch, _ = work.next(number, executor.now())
            for request in work.take_preempted():
                executor.release(request)
            if batch is not None:
                idle.remove(number)
                flying.append((number, batch, executor.execute(batch).tokens))
            if flying and rng.random() < 0.3:
                break
        if flying:
            fruitless = 0
            number, batch, tokens = flying.popleft()
            for request in work.done(number, batch, tokens):
                executor.release(request)
            idle.append(number)
        elif work.next_arrival is not None:
            executor.wait_until(max(executor.now(), work.next_arrival))
        elif not work.busy:
            return
        elif (fruitless := fruitless + 1) > 2 * work.refill_every:
            raise work.stuck()
    raise RuntimeError(f"requests are left after {STEPS} steps")


def stream_schedule(llm: LLM, rng: random.Random) -> str:
    """Streams that interleave, and are closed early; calls of `generate` between them."""
    groups = [[ask(STREAMED, rng) for _ in range(rng.randint(1, 3))] for _ in range(3)]
    size, llm.chunk_size, llm.cache_tokens = random_sizes(rng, list(chain(*groups)))
    llm.max_batch_size, llm.policy = min(size, llm.cache.slots), random_policy(rng)
    settings = (
        f"{llm.policy}, B {llm.max_batch_size}, C {llm.chunk_size}, {llm.cache_tokens} tokens"
    )
    open_streams: list[tuple[Iterator[StreamedToken], list[Asked], list[list[int]]]] = []
    while groups or open_streams:
        if groups and rng.random() < 0.3:
            group = groups.pop()
            prompts, params = (
                [each.known.prompt for each in group],
                [each.params() for each in group],
            )
            if rng.random() < 0.2:
                outputs = llm.generate(prompts, params)
                compare(settings, group, [output.token_ids for output in outputs], whole=True)
            else:
                stream = llm.stream(prompts, params)
                open_streams.append((stream, group, [[] for _ in group]))
        if open_streams:
            stream, group, found = rng.choice(open_streams)
            token = next(stream, None)
            if token is not None:
                found[token.index].append(token.token_id)
            if token is None or rng.random() < 0.02:
                stream.close()
                compare(settings, group, found, whole=token is None)
                open_streams = [each for each in open_streams if each[0] is not stream]
    used = [slot for slot in llm.cache.used if slot is not None]
    if used or (llm._loop is not None and llm._loop.busy):
        print(f"leaks: {settings}: slots with {used} tokens", file=sys.stderr)
    return settings


def check_requests(settings: str, asked: Sequence[Asked], requests: Sequence[Request]) -> None:
    """Output and reason of each request; what a cancelled one got must be right so far."""
    for each, request in zip(asked, requests, strict=True):
        ended = request.finish_reason not in (None, "abort")
        compare(settings, [each], [request.output], whole=ended)
        if ended and request.finish_reason != each.reason:
            print(f"wrong tokens: {settings}: {request.finish_reason}", file=sys.stderr)
        if request.finish_reason is None and request.request_id >= 0 and request.prefilled:
            print(f"leaks: {settings}: request {request.request_id} never ended", file=sys.stderr)


def compare(settings: str, asked: Sequence[Asked], found: Sequence[list[int]], whole: bool) -> None:
    for each, tokens in zip(asked, found, strict=True):
        expected = each.expected if whole else each.expected[: len(tokens)]
        if tokens != expected:
            print(f"wrong tokens: {settings}: {tokens}, not {expected}", file=sys.stderr)


def run_block(seed: int, first: int) -> None:
    """BLOCK schedules, each from a seed of its own."""
    llm = small_llm(max_batch_size=6, max_length=LONGEST + 1)
    llm.model = tiny_model(STREAMED)
    made = speed_up(llm.model, llm.cache, llm.attention, measure=False)
    llm.attention, llm.attend, llm.surroundings = made
    kinds: tuple[Callable[[random.Random], str], ...] = (
        loop_schedule, loop_schedule, pipeline_schedule, partial(stream_schedule, llm),
    )  # fmt: skip
    for number in range(first, first + BLOCK):
        rng = random.Random(f"schedules {seed} {number}")
        try:
            kinds[number % len(kinds)](rng)
        except Exception:
            print(f"in schedule {number}", file=sys.stderr)
            raise


def make_cases(seed: int, quick: bool) -> list[Case]:
    for family in TINY:
        known(family)  # here, once, and not in each process
    cases = []
    for first in range(0, 300 if quick else SCHEDULES, BLOCK):
        name = f"schedules {first} to {first + BLOCK - 1} of seed {seed}"
        act = partial(run_block, seed, first)
        cases.append(Case(name, name, act, limit=120.0, weighs=BLOCK))
    return cases
