"""The loop on a virtual clock: how long a schedule takes on a GPU that you do not have. No torch.

`simulate` runs the same `Loop` and the same `Scheduler` as the real engine. Only the executor
differs: it asks the cost model for the seconds of a batch, and moves a virtual clock by them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import more.policies  # those outside the book  # noqa: F401
from batch import Batch, Request
from command.checks import lookup
from configs import GPU, GPUS, LINKS, Link, ModelConfig
from configs.constants import Efficiency
from configs.hosts import HOSTS, Host
from costmodel import CostModel
from loop import Loop, Result
from more.loading.priced import priced_model
from more.loading.requests import OneByOne, checked
from more.paged.blocks import choose_blocks
from scheduler import make_scheduler
from timeline import Fleeting, Life, Trace


class CostExecutor:
    """Runs nothing. Its clock is virtual, its tokens are all 0."""

    def __init__(self, cost_model: CostModel):
        self.cost_model, self.cost = cost_model, cost_model.seconds
        self.clock = 0.0  # s

    def now(self) -> float:
        return self.clock

    def wait_until(self, moment: float) -> None:
        self.clock = moment

    def execute(self, batch: Batch) -> Result:
        seconds = self.cost_model.seconds(batch)
        self.clock += seconds
        return Result([0] * len(batch.sampled), seconds)

    def release(self, request: Request) -> None:
        pass


def named(table: dict, each: object, kind: str, own: type) -> Any:
    """What has this name in the table. An object of type `own` is itself."""
    return each if isinstance(each, own) else lookup(table, each, kind)


def make_cost_model(
    model: str | ModelConfig,
    gpu: str | GPU,
    tp: int,
    link: str | Link | None,
    software: str,
    host: str | Host = "none",
    efficiency: Efficiency | None = None,
) -> CostModel:
    """Look up model, GPU, link, software and host by name, and price with them.

    model: as `priced_model` reads it: also a folder with a config.json. link: None is the GPU's
    own. Each of them may also be one of your own. efficiency: in place of the software's.

    If the software was not measured on this GPU, the model's `guess` says so.
    """
    return CostModel(
        priced_model(model),
        named(GPUS, gpu, "GPU", GPU),
        efficiency,
        tp=tp,
        link=None if link is None else named(LINKS, link, "link", Link),
        software=software,
        host=named(HOSTS, host, "host", Host),
    )


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
    software: str = "sarathi",
    host: str = "none",
    cache: str = "slots",
    block_size: int | None = None,
    prefix_caching: bool = False,
    done: Callable[[Life], None] | None = None,
) -> Trace:
    """Predicted times of these requests, with placeholder tokens.

    tp: GPUs that share the model. link: joins them, a name of configs.LINKS; None: the GPU's own.
    software: a name of costmodel.SOFTWARE: the constants are fitted to its measurements. The
    default is SARATHI's, of 2023; "vllm" is today's. If it was not measured on this GPU, the
    trace's `guess` says whose constants are taken.
    host: a name of configs.hosts.HOSTS: the CPU's time for each iteration.
    cache, block_size, prefix_caching: see `engine.LLM`. Only prompts that say which tokens they
    share can share them, and `range(n)` says nothing: see more/paged/prompts.py.

    done: is given each request's life when it has ended, and nothing is kept. So a million requests
    may come from a generator, in order of arrival. (With prefix_caching, give cache_tokens, too.)

    What does not fit the GPU's memory is priced all the same: `guess` says so. Without
    cache_tokens, B requests run at once (`costmodel.requests_that_fit` says how many fit).
    Raises UserError if a request is too long for the model or for `cache_tokens`.
    """
    cost_model = make_cost_model(model, gpu, tp, link, software, host)
    ready = checked(requests, cost_model.model, prefix_caching, done is not None)
    scheduler = make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
    if blocks := choose_blocks(cache, block_size, prefix_caching):
        scheduler.memory = blocks.memory(cache_tokens)
    loop = Loop(scheduler, CostExecutor(cost_model))
    if done is None:
        run_all(loop, ready)
    else:
        loop.trace, loop.arriving = Fleeting(scheduler.name), OneByOne(ready)
        while loop.step():
            for _, life in loop.trace.ended:
                done(life)
    loop.trace.guess = cost_model.doubts(cache_tokens)
    return loop.trace


def run_all(loop: Loop, requests: Iterable[Request]) -> Trace:
    """Add the requests, and run the loop to its end."""
    for request in sorted(requests, key=lambda request: request.arrival):
        loop.add(request)
    return loop.run()
