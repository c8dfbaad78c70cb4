"""A GPU that you do not have, as an engine that serves: the cost model in real time. No torch."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from batch import Batch, Request
from command.checks import UserError, check_whole
from costmodel import CostModel, requests_that_fit
from loop import Result
from more.loading.requests import USUAL_LENGTH, check_requests
from more.simulate import CostExecutor, make_cost_model
from scheduler import Scheduler, make_scheduler

SOFTWARE = "xformers-2023"  # whose constants the cost model takes
MOST_SLOTS = 256  # B, where more requests would fit


class Clock:
    """Real time, in seconds. `stop` ends all waiting, now and later."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()
        self.stopped = threading.Event()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def wait(self, seconds: float) -> None:
        self.stopped.wait(max(0.0, seconds))

    def stop(self) -> None:
        self.stopped.set()


class RealTimeExecutor(CostExecutor):
    """A `CostExecutor` that waits for the seconds of each batch."""

    def __init__(self, cost_model: CostModel, clock: Clock):
        super().__init__(cost_model)
        self.real = clock

    def now(self) -> float:
        return self.real.now()

    def wait_until(self, moment: float) -> None:
        self.real.wait(moment - self.now())

    def execute(self, batch: Batch) -> Result:
        start = self.now()
        result = super().execute(batch)
        self.wait_until(start + result.seconds)  # what the lines above took is part of it
        return result


class Placeholders:
    """Stands where a model's tokenizer would: a token for each word, a dot for each token."""

    chat = None

    def encode(self, text: str) -> list[int]:
        return [0] * max(1, len(text.split()))

    def decode(self, tokens: Sequence[int]) -> str:
        return " ·" * len(tokens)


class PricedEngine:
    """A named model on named GPUs: batches take as long as the cost model says. All tokens are 0.

    model, gpu, tp, policy, chunk_size, cache_tokens: as in `simulate`.
    max_length: tokens of one request, prompt + output - 1; None: as many as the model allows, 8192
    at most, because one request of 131072 tokens may fill a GPU. max_batch_size: B; None: as many
    requests of that length as fit the GPUs' memory, 256 at most.
    Raises UserError for an unknown name, and for a model that does not fit.
    """

    priced = True
    stop_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        model: str = "llama-13b",
        gpu: str = "a6000",
        *,
        policy: str = "sarathi",
        chunk_size: int = 256,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        tp: int = 1,
        clock: Clock | None = None,
    ):
        self.cost_model = make_cost_model(model, gpu, tp, None, SOFTWARE)
        config = self.cost_model.model
        usual = min(config.max_length, USUAL_LENGTH)
        self.max_length = usual if max_length is None else max_length
        check_whole("max_length", self.max_length, 1, config.max_length)
        where = f"{tp} x {gpu}" if tp > 1 else gpu
        if max_batch_size is None:
            fits = requests_that_fit(config, self.cost_model.gpu, self.max_length, tp=tp)
            max_batch_size = min(fits, MOST_SLOTS)
            if not max_batch_size:
                raise UserError(
                    f"{config.name} does not fit {where} with a request of {self.max_length}"
                    " tokens: give more tp, a smaller max_length, or a max_batch_size, which asks"
                    " for no memory"
                )
        self.name = config.name
        self.policy = policy
        self.chunk_size = chunk_size
        self.max_batch_size = max_batch_size
        self.cache_tokens = cache_tokens
        self.description = f"{config.name} on {where}, predicted by the cost model ({SOFTWARE})"
        self.tokenizer = Placeholders()
        self.clock = clock or Clock()
        self.scheduler(policy, chunk_size)  # complains at once

    @property
    def cost(self) -> Callable[[Batch], float]:
        return self.cost_model.seconds

    def scheduler(self, policy: str, chunk_size: int) -> Scheduler:
        return make_scheduler(policy, self.max_batch_size, chunk_size, self.cache_tokens)

    def executor(self) -> RealTimeExecutor:
        return RealTimeExecutor(self.cost_model, self.clock)

    def check(self, requests: Sequence[Request]) -> None:
        """A UserError for a request that is too long."""
        check_requests(requests, self.max_length, "max_length")

    def sampler(self, seed: int, **params: float) -> None:
        """Nothing is drawn."""

    def surroundings(self) -> AbstractContextManager:
        return nullcontext()

    def stop(self) -> None:
        """End the batch that runs, and all later ones, at once."""
        self.clock.stop()
