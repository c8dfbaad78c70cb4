"""A real model as an engine that serves, with the log-probabilities of its tokens."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from torch import Tensor

from batch import BROKEN, Batch, Request
from command.checks import UserError, check_whole
from command.cli import one_line
from engine import LLM
from executor import ModelExecutor
from loading.requests import check_requests, refuse_beams
from loop import Result
from paged.cache import manage
from sampling import Sampler, SamplingParams
from scheduler import Scheduler, make_scheduler

MOST_LOGPROBS = 20  # of one token, as in OpenAI's API

Logprobs = tuple[float, tuple[tuple[int, float], ...]]  # of a token; (token id, its own) of the top


class LogprobExecutor(ModelExecutor):
    """A `ModelExecutor` that also reports how likely the tokens were. It replaces `before`.

    wanted: request id -> how many of the likeliest tokens to report. found: log-probabilities of
    the last batch, by request id. The temperature does not change them. begin: called with each
    batch before it runs.
    """

    def __init__(
        self, before: ModelExecutor, wanted: dict[int, int], begin: Callable[[Batch], None]
    ):
        super().__init__(
            before.model, before.cache, before.attention, before.time_operators, before.cost
        )
        self.forward = before.forward  # may replay CUDA graphs
        self.wanted, self.found, self.begin = wanted, {}, begin

    def execute(self, batch: Batch) -> Result:
        self.begin(batch)
        return super().execute(batch)

    def choose(self, batch: Batch, logits: Tensor) -> list[int]:
        tokens = super().choose(batch, logits)
        self.found = {}
        for row, request in enumerate(batch.sampled if self.wanted else []):
            most = self.wanted.get(request.request_id)
            if most is not None and tokens[row] != BROKEN:
                self.found[request.request_id] = logprobs(logits[row], tokens[row], most)
        return tokens


def logprobs(logits: Tensor, token: int, most: int) -> Logprobs:
    """The log-probability of a token, and the `most` likeliest tokens. logits (vocab,)."""
    found = logits.double().log_softmax(dim=0)  # (vocab,)
    values, ids = found.topk(min(most, len(found)))
    return float(found[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))


class RealEngine:
    """An `LLM` behind a runner. While the runner runs, call nothing of the `LLM`."""

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

    def executor(self, wanted: dict[int, int], begin: Callable[[Batch], None]) -> LogprobExecutor:
        """A new one on an empty cache. wanted, begin: see `LogprobExecutor`."""
        self.llm.cache.reset()
        executor = LogprobExecutor(self.llm.make_executor(), wanted, begin)
        executor.origin = self.origin  # one clock for all executors
        return executor

    def check(self, requests: Iterable[Request], logprobs: int | None) -> None:
        """A UserError for a request that is too long, or wants what there is not."""
        requests = list(requests)
        refuse_beams(requests, "the server runs none")
        check_requests(requests, self.max_length, "max_length")
        if logprobs is not None:
            check_whole("logprobs", logprobs, 0, MOST_LOGPROBS)
        for request in requests:
            for token in (min(request.prompt), max(request.prompt)):
                if not 0 <= token < self.vocab_size:
                    raise UserError(f"token id {token} is not in 0 .. {self.vocab_size - 1}")

    def sampler(self, seed: int, **params: float) -> Sampler | None:
        """What draws the tokens of one request, as SamplingParams(**params) say; None: greedy."""
        return Sampler(SamplingParams(**params), seed) if params["temperature"] else None

    def surroundings(self) -> AbstractContextManager:
        return self.llm.surroundings()

    def stop(self) -> None:
        """A batch of the model runs to its end."""
