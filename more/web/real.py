"""A real model as an engine that serves."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batch import Batch, Request
from command.checks import UserError, shown
from command.cli import one_line
from executor import ModelExecutor
from more.loading.requests import check_requests
from more.paged.cache import manage
from nano_sarathi import LLM
from sampling import Sampler, SamplingParams
from scheduler import Scheduler, make_scheduler


class RealEngine:
    """An `LLM` behind a runner. While the runner runs, the `LLM` refuses all calls."""

    priced = False

    def __init__(self, llm: LLM):
        self.llm, self.origin = llm, time.perf_counter()
        self.name = one_line(llm.config.name).strip()  # of a folder, which may have line ends
        self.vocab_size = llm.config.vocab_size
        self.policy, self.chunk_size = llm.policy, llm.chunk_size
        self.max_batch_size, self.max_length = llm.max_batch_size, llm.max_length
        self.tokenizer, self.stop_ids = llm.tokenizer, llm.stop_ids
        dtype = str(llm.dtype).removeprefix("torch.")
        weights = "" if llm.directory else " with random weights"
        self.description = f"{self.name}{weights} in {dtype} on {llm.device}, run for real"

    @property
    def cost(self) -> Callable[[Batch], float] | None:
        return self.llm.cost

    def scheduler(self, policy: str, chunk_size: int) -> Scheduler:
        scheduling = policy, self.max_batch_size, chunk_size, self.llm.cache_tokens
        return manage(make_scheduler(*scheduling), self.llm.cache)

    def executor(self) -> ModelExecutor:
        """A new one on an empty cache."""
        with self.llm.turn(self):
            self.llm.check_idle("who runs the model")
            self.llm.cache.reset()
            executor = self.llm.make_executor()
        executor.origin = self.origin  # one clock for all executors
        return executor

    def check(self, requests: Sequence[Request]) -> None:
        """A UserError for a request that is too long, or wants what there is not."""
        check_requests(requests, self.max_length, "max_length")
        for request in requests:
            for token in (min(request.prompt), max(request.prompt), *request.stop_ids):
                if not 0 <= token < self.vocab_size:
                    raise UserError(f"token id {shown(token)} is not in 0 .. {self.vocab_size - 1}")

    def sampler(self, seed: int, **params: float) -> Sampler | None:
        """What draws the tokens of one request, as SamplingParams(**params) say; None: greedy."""
        return Sampler(SamplingParams(**params), seed) if params["temperature"] else None

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        with self.llm.lend(self), self.llm.surroundings():
            yield

    def stop(self) -> None:
        """A batch of the model runs to its end."""
