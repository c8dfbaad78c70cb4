"""`LLM`: a real model behind the loop. The names follow vLLM.

    llm = LLM("demo", policy="sarathi")
    llm.generate(["def open("], SamplingParams(max_tokens=24))      all at once
    for token in llm.stream(["def open("]): ...                     as they come

With these files alone, a debugger stays on the page. nano_sarathi.py adds what is not the subject:
all other models, fast kernels, and other ways to search and to store. Threads may share an LLM:
they take turns.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from threading import RLock

import torch

from attention import PLAIN
from batch import Batch, Request
from command.checks import UserError, did_you_mean, lookup
from executor import ModelExecutor
from kvcache import KVCache
from loader import DTYPES, MORE, find, load_model
from loop import Loop
from model import Transformer
from sampling import Sampler, SamplingParams
from scheduler import Scheduler, make_scheduler
from timeline import Trace
from tokenizer import Pieces, Tokenizer, load_stop_ids, load_tokenizer

__all__ = ["LLM", "RequestOutput", "SamplingParams", "StreamedToken"]

Prompts = str | Sequence  # one, or many: strings or lists of token ids
Params = SamplingParams | Sequence | None  # for all, or one for each
Times = Sequence[float] | None  # s, one for each
NO_TEXT = "stop", "error"  # where these are the finish_reason, the last token is no text


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. Times in seconds from the request's arrival."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str  # "" where the model has no tokenizer
    finish_reason: str  # "stop", "length", or "error": the logits are NaN or infinite
    ttft: float  # time to first token
    latency: float  # time to last token


@dataclass(frozen=True)
class StreamedToken:
    """One token as it comes."""

    index: int  # of the prompt
    token_id: int  # -1 where finish_reason is "error"
    text: str  # what this token adds; "" inside a multi-token character
    finish_reason: str | None


def in_turn(call: Callable) -> Callable:
    """A method that has its LLM for itself: while another thread is in one, it waits."""

    @wraps(call)
    def waiting(llm: "LLM", *arguments: object, **options: object) -> object:
        with llm.turn():
            return call(llm, *arguments, **options)

    return waiting


class Stream(Iterator[StreamedToken]):
    """Tokens as they come. Each token takes a turn, and so does closing.

    Python closes a stream that nobody refers to any more. That, too, waits for its turn.
    """

    def __init__(self, llm: "LLM", tokens: Generator[StreamedToken, None, None]):
        self.llm = llm
        self.tokens = tokens

    def __next__(self) -> StreamedToken:
        with self.llm.turn():
            return next(self.tokens)

    def close(self) -> None:
        """Cancel what still runs of it."""
        with self.llm.lock:  # not turn(): that may refuse (nano_sarathi.py), and an end must not
            self.tokens.close()

    __del__ = close


class LLM:
    """A model, its cache and a scheduling policy.

    model: "demo" (trained, included), a directory of Hugging Face's files (loader.py), or a
        Transformer of your own, such as one with random weights; then prompts are token ids, and
        dtype and device are the model's.
    policy, chunk_size (C, tokens), cache_tokens (a limit for all requests together, or None): see
        scheduler.py. Change them only while no request runs.
    max_batch_size (B): requests that run at once.
    max_length: tokens of one request, prompt + output - 1. The cache is allocated at once, for B
        requests of that length. None: as many as the model allows.
    dtype, device: PyTorch's names. attention: "sdpa", or "math": every step written out.
    time_operators: keep the seconds of each operator.
    cost: a function: batch -> seconds, for a policy that asks (`Scheduler.cost`).

    After a call, `trace` tells what its iterations did. Raises command.checks.UserError, one line
    that names the bad value.
    """

    elsewhere = f"{MORE} has more of them"  # options

    def __init__(
        self,
        model: str | Transformer = "demo",
        *,
        policy: str = "sarathi",
        chunk_size: int = 256,
        max_batch_size: int = 8,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        attention: str = "sdpa",
        seed: int = 0,
        time_operators: bool = False,
        cost: Callable[[Batch], float] | None = None,
        **others: object,
    ):
        for name in others:
            near = did_you_mean(name, signature(type(self)).parameters) or "."
            raise UserError(f"no option {name!r}{near} {self.elsewhere}".rstrip())
        self.policy = policy
        self.chunk_size = chunk_size
        self.max_batch_size = max_batch_size
        self.max_length = max_length
        self.cache_tokens = cache_tokens
        self.seed = seed
        self.time_operators = time_operators
        self.cost = cost
        self.cache: KVCache | None = None
        self.lock = RLock()
        self._scheduler()  # complains before the weights are loaded
        self._load(model, dtype, device, attention)
        self._make_cache()
        self.trace = Trace()
        self._loop: Loop | None = None  # of the requests that are running, or ran last, or are next
        self._next_id = 0

    # ---- its parts. nano_sarathi.py has others

    def _load(self, model: str | Transformer, dtype: str, device: str, attention: str) -> None:
        self.attention = attention  # its name
        self.attend = lookup(PLAIN, attention, "attention")  # an `Attention`: see attention.py
        self.tokenizer: Tokenizer | None = None
        self.stop_ids: frozenset[int] = frozenset()
        if isinstance(model, Transformer):
            self.model = model
        else:
            directory = find(model)
            torch_dtype = lookup(DTYPES, dtype, "dtype")
            self.model = load_model(directory, torch_dtype, torch.device(device), self.max_length)
            self.tokenizer = load_tokenizer(directory)
            self.stop_ids = load_stop_ids(directory, self.tokenizer)
        self.config = self.model.config
        self.dtype = self.model.dtype
        self.device = self.model.device
        self.max_length = self.max_length or self.config.max_length

    def _make_cache(self) -> None:
        slots = self.max_batch_size
        length = self.max_length
        self.cache = KVCache(self.config, slots, length, self.dtype, self.device)

    def _scheduler(self) -> Scheduler:
        return make_scheduler(self.policy, self.max_batch_size, self.chunk_size, self.cache_tokens)

    def make_executor(self) -> ModelExecutor:
        return ModelExecutor(self.model, self.cache, self.attend, self.time_operators, self.cost)

    # ---- calls

    @in_turn
    def generate(
        self, prompts: Prompts, sampling_params: Params = None, arrival_times: Times = None
    ) -> list[RequestOutput]:
        """Complete the prompts: strings or lists of token ids. The outputs come in their order.

        sampling_params: one for all, or one for each. arrival_times: when each prompt reaches the
        scheduler, in seconds after the call, in real time; None: all at once.
        """
        requests = self._requests(prompts, sampling_params, arrival_times)
        for _ in self._run(requests):
            pass
        return [self._output(request) for request in requests]

    def _output(self, request: Request) -> RequestOutput:
        life = self.trace.lives[request.request_id]
        reason = request.finish_reason
        text = self._text(request.output, reason)
        output = request.output[:-1] if reason == "error" else request.output
        return RequestOutput(list(request.prompt), output, text, reason, life.ttft, life.latency)

    @in_turn
    def stream(
        self, prompts: Prompts, sampling_params: Params = None, arrival_times: Times = None
    ) -> Stream:
        """Like `generate`, but yields each token when its iteration ends.

        Tokens of several prompts come interleaved. Two streams run together: the second joins the
        requests of the first. Closing a stream cancels its requests. Bad prompts are refused at
        once, but nothing runs until you ask for the first token.
        """
        return Stream(self, self._stream(self._requests(prompts, sampling_params, arrival_times)))

    def _stream(self, requests: list[Request]) -> Iterator[StreamedToken]:
        seen = [0] * len(requests)  # tokens of each so far
        pieces = [Pieces(self._text) for _ in requests]

        def fresh() -> Iterator[StreamedToken]:
            for index, request in enumerate(requests):
                while seen[index] < len(request.output):
                    token = request.output[seen[index]]
                    seen[index] += 1
                    last = seen[index] == len(request.output)
                    reason = request.finish_reason if last else None
                    text = "" if reason in NO_TEXT else pieces[index].add(token)
                    if reason is not None:
                        text += pieces[index].end()
                    yield StreamedToken(index, token, text, reason)

        for _ in self._run(requests):
            yield from fresh()
        yield from fresh()  # tokens that came while another call ran the loop

    def turn(self) -> AbstractContextManager:
        """One thread at a time: the others wait."""
        return self.lock

    # ---- the loop

    def _run(self, requests: list[Request]) -> Iterator[None]:
        """Step until these requests have ended. Those of other calls move on as well."""
        loop = self._join(requests)
        try:
            yield  # the requests have joined the loop, and none has run: nano_sarathi.py needs it
            while any(request.finish_reason is None for request in requests):
                if loop is not self._loop:
                    raise UserError("this stream has ended: another call failed while both ran")
                try:
                    self._step(loop)
                except BaseException:
                    self._loop = None  # its state may be broken: the next call makes a new loop
                    raise
                yield
        finally:  # the caller has closed us early, or something failed: cancel what has not ended
            for request in requests:
                # a loop that failed is given up as a whole
                if request.finish_reason is None and loop is self._loop:
                    loop.cancel(request)

    def _step(self, loop: Loop) -> None:
        loop.step()

    def _join(self, requests: list[Request]) -> Loop:
        """Add these requests to the loop that runs, or else to a new one."""
        loop = self._current_loop()
        self.trace = loop.trace
        self._check(requests, loop.scheduler)  # again: a stream may begin late
        now = loop.executor.now()
        for request in requests:
            request.request_id = self._next_id
            request.arrival += now
            self._next_id += 1
            loop.add(request)
        return loop

    def _current_loop(self) -> Loop:
        """The loop that runs, or one that has not run yet. If there is neither, make a new one."""
        options = (
            self.policy,
            self.chunk_size,
            self.max_batch_size,
            self.cache_tokens,
            self.time_operators,
        )
        if self._loop is not None and self._options != options:
            self.check_idle("policy, chunk_size and other options")
            self._loop = None
        loop = self._loop
        finished = loop is not None and loop.trace.iterations and not loop.busy
        if loop is None or finished:
            self.cache.reset()
            self._loop = Loop(self._scheduler(), self.make_executor())
            self._next_id = 0
            self._options = options
        return self._loop

    def check_idle(self, what: str) -> None:
        """Raise a UserError while a stream waits to be read. what: may not change meanwhile."""
        if self._loop is not None and self._loop.busy:
            how = "read their stream to its end, or close() it"
            raise UserError(f"{what} may not change while requests run: {how}")

    # ---- prompts and text

    def _requests(self, prompts: Prompts, params: Params, times: Times) -> list[Request]:
        """Requests for the prompts, or a UserError before anything runs."""
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(prompts)
        times = times or [0.0] * len(prompts)
        requests = [
            self._request(index, *each)
            for index, each in enumerate(zip(prompts, params, times, strict=True))
        ]
        self._check(requests, self._current_loop().scheduler)
        return requests

    def _request(
        self, index: int, prompt: str | Sequence[int], params: SamplingParams, arrival: float
    ) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        sampler = None  # greedy
        if params.temperature > 0:
            sampler = Sampler(params, self.seed + index if params.seed is None else params.seed)
        ends = frozenset() if params.ignore_eos else self.stop_ids
        return Request(
            index,
            ids,
            params.max_tokens,
            ends.union(params.stop_ids),
            arrival,
            sampler=sampler,
            tags=dict(params.tags),
        )

    def _check(self, requests: list[Request], scheduler: Scheduler) -> None:
        """Raise a UserError for a request that does not fit a slot, or the cache."""
        for request in requests:
            if request.most_cached > self.max_length:
                raise UserError(
                    f"prompt {request.request_id}: {len(request.prompt)} prompt tokens + max_tokens"
                    f" {request.max_tokens} - 1 exceed the {self.max_length} tokens that max_length"
                    " allows"
                )
            scheduler.check(request)

    def _text(self, tokens: Sequence[int], finish_reason: str | None = None) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens[:-1] if finish_reason in NO_TEXT else tokens)
