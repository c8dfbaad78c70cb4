"""A real model as an engine that serves."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batch import Batch, Request
from command.cli import one_line
from executor import ModelExecutor
from more.loading.prompts import check_ids
from more.loading.requests import check_requests
from more.paged.cache import manage
from nano_sarathi import LLM
from sampling import Sampler, SamplingParams
from scheduler import Scheduler, make_scheduler


class RealEngine:
    """An `LLM` behind a runner. Until the runner has ended, the `LLM` refuses all calls."""

    priced = False

    def __init__(self, llm: LLM):
        self.llm = llm
        self.origin = time.perf_counter()
        self.name = one_line(llm.config.name).strip()  # of a folder, which may have line ends
        self.vocab_size = llm.config.vocab_size
        self.policy = llm.policy
        self.chunk_size = llm.chunk_size
        self.max_batch_size = llm.max_batch_size
        self.max_length = llm.max_length
        self.tokenizer = llm.tokenizer
        self.stop_ids = llm.stop_ids
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
        """A new one on an empty cache. The first one borrows the `LLM`."""
        if self.llm.lent_to is not self:
            with self.llm.turn():
                self.llm.check_idle("who runs the model")
                self.llm.lent_to = self
        self.llm.cache.reset()
        executor = self.llm.make_executor()
        executor.origin = self.origin  # one clock for all executors
        return executor

    def check(self, requests: Sequence[Request]) -> None:
        """A UserError for a request that is too long, or wants what there is not."""
        check_requests(requests, self.max_length, "max_length")
        for request in requests:
            check_ids("prompt", (min(request.prompt), max(request.prompt)), self.vocab_size)
            check_ids("stop_token_ids", request.stop_ids, self.vocab_size)

    def sampler(self, seed: int, **params: float) -> Sampler | None:
        """What draws the tokens of one request, as SamplingParams(**params) say; None: greedy."""
        return Sampler(SamplingParams(**params), seed) if params["temperature"] else None

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        try:
            with self.llm.surroundings():
                yield
        finally:
            self.llm.lent_to = None

    def stop(self) -> None:
        """A batch of the model runs to its end."""
