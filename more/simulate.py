"""`simulate` with all that is in more/: every policy, blocks, a model by its config.json.

It is faster (fast_forward.py). And its requests may come from a generator, a million of them.
"""

from collections.abc import Callable, Iterable, Sequence

import more.policies  # those outside the book  # noqa: F401
import simulate as book
from batch import Batch, Request
from configs import ModelConfig
from configs.hosts import Host
from costmodel import CostModel
from loop import Loop
from more.fast_forward import FastForward
from more.loading.priced import priced_model
from more.loading.requests import OneByOne, checked
from more.paged.blocks import choose_blocks
from more.paged.prompts import continuations
from scheduler import make_scheduler
from simulate import CostExecutor, run_all
from timeline import Iteration, Life, Recorder, Trace


def make_cost_model(
    model: str | ModelConfig,
    gpu: str,
    tp: int,
    link: str | None,
    software: str,
    host: str | Host = "none",
) -> CostModel:
    """As `simulate.make_cost_model`; a model may also be a folder with a config.json."""
    return book.make_cost_model(priced_model(model), gpu, tp, link, software, host)


def simulate(
    requests: Iterable[Request],
    model: str | ModelConfig = "llama-13b",
    gpu: str = "a6000",
    *,
    policy: str = "sarathi",
    chunk_size: int = 256,
    max_batch_size: int = 18,
    cache_tokens: int | None = None,
    tp: int = 1,
    link: str | None = None,
    software: str = "xformers-2023",
    host: str = "none",
    cache: str = "slots",
    block_size: int | None = None,
    prefix_caching: bool = False,
    done: Callable[[Life], None] | None = None,
) -> Trace:
    """As `simulate.simulate`, with a few options more. model: also a folder with a config.json.

    cache, block_size, prefix_caching: see `nano_sarathi.LLM`. Only prompts that say which tokens
    they share can share them, and `range(n)` says nothing: see more/paged/prompts.py. An answer is
    in the cache, too: a prompt that begins with an earlier one has its answer behind it.

    done: is given each request's life when it has ended, and nothing is kept. So a million requests
    may come from a generator, in order of arrival. (With prefix_caching, give cache_tokens, too.)

    Raises UserError if a request is too long for the model or for `cache_tokens`.
    """
    cost_model = make_cost_model(model, gpu, tp, link, software, host)
    ready = checked(requests, cost_model.model, prefix_caching, done is not None)
    scheduler = make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
    if blocks := choose_blocks(cache, block_size, prefix_caching):
        scheduler.memory = blocks.memory(cache_tokens)
    executor = CostExecutor(cost_model)
    if done is None:
        if prefix_caching:
            ready = list(ready)
            scheduler.memory.continued = continuations(ready)
        loop = FastForward(scheduler, executor)
        run_all(loop, ready)
    else:
        loop = Loop(scheduler, executor)
        loop.trace = Fleeting(scheduler.name)
        loop.arriving = OneByOne(ready)
        while loop.step():
            for _, life in loop.trace.ended:
                done(life)
    loop.trace.guess = cost_model.doubts(cache_tokens)
    return loop.trace


class Passing(Recorder):
    """It lets go of the lives that have ended. So it has no totals: add up what `done` is given.

    ended: requests of the last iteration, with their lives.
    """

    def __init__(self, policy: str = ""):
        super().__init__(policy=policy)
        self.ended: list[tuple[Request, Life]] = []

    def record(
        self,
        batch: Batch,
        start: float,
        seconds: float,
        operators: dict[str, float] | None,
        ended: Sequence[Request],
        end: float = 0.0,
    ) -> Iteration:
        iteration = super().record(batch, start, seconds, operators, ended, end)
        self.ended = [(request, self.lives.pop(request.request_id)) for request in ended]
        return iteration


class Fleeting(Passing):
    """It lets go of iterations and events, too: its memory does not grow with the run."""

    def record(self, *what: object) -> Iteration:
        iteration = super().record(*what)
        self.iterations = []
        self.finished = []
        self.preempted = []
        self.cancelled = []
        self.rejected = []
        return iteration
