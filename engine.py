"""`LLM`: a real model behind the loop. The names follow vLLM.

    llm = LLM("demo", policy="sarathi")
    llm.generate(["def open("], SamplingParams(max_tokens=24))      all at once
    for token in llm.stream(["def open("]): ...                     as they come

`LLM(fast=False)` runs the files of the book and nothing else: step through that in a debugger.
Threads may share an LLM: they take turns.
"""

import command.first  # before torch  # noqa: F401

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from threading import RLock

from attention import PLAIN
from batch import Batch, Request
from command.checks import MOST_SEED, UserError, check_flag, check_whole
from executor import ModelExecutor
from loop import Loop
from more.beam.executor import enable_beams
from more.beam.outputs import BeamSearchOutput, beam_requests, output_of
from more.beam.request import BeamSearchParams
from more.fast.backends import check_fast, choose_backend, must_measure, speed_up
from more.fast.graphs import GraphExecutor, graphs_for
from more.loading.device import check_memory, choose_device, choose_dtype, default_length
from more.loading.load import choose_length, find_model, late_tokenizer, load_model
from more.loading.prompts import make_requests
from more.loading.requests import check_requests
from more.loading.tokenizer import load_stop_ids, load_tokenizer
from more.paged.blocks import choose_blocks, real_memory
from more.paged.cache import make_cache, manage
from sampling import SamplingParams
from scheduler import Scheduler, make_scheduler
from simulate import simulate  # for users alone: the LLM never prices
from timeline import Trace

__all__ = [
    "LLM", "BeamSearchParams", "RequestOutput", "SamplingParams", "StreamedToken", "simulate",
]  # fmt: skip

Prompts = str | Sequence  # one, or many: strings or lists of token ids
Params = SamplingParams | BeamSearchParams | Sequence | None  # for all, or one for each
Times = Sequence[float] | None  # s, one for each


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
    """Tokens as they come. Each takes a turn of its own, and so does its end."""

    def __init__(self, llm: "LLM", tokens: Generator[StreamedToken, None, None]):
        self.llm, self.tokens = llm, tokens

    def __next__(self) -> StreamedToken:
        with self.llm.turn():
            return next(self.tokens)

    def close(self) -> None:
        """Cancel what still runs of it."""
        with self.llm.lock:
            self.tokens.close()

    __del__ = close


class LLM:
    """A model, its cache and a scheduling policy.

    model: "demo" (trained, included), a Hugging Face directory, a hub id ("Qwen/Qwen2.5-0.5B"),
        or a name of `configs.MODELS` (random weights, prompts of token ids only).
    policy, chunk_size (C, tokens), cache_tokens (a limit for all requests together, or None): see
        scheduler.py. Change them only while no request runs.
    max_batch_size (B): requests that run at once. You may lower it later.
    max_length: tokens of one request, prompt + output - 1 (of a beam search: the prompt). The cache
        is allocated at once, for B requests of that length. None: see more/loading/requests.py.
    cache: "slots", or "paged": blocks of `block_size` tokens (16), for `cache_tokens` in all. With
        prefix_caching, requests that begin alike share them (more/paged/).
    device: "auto" is cuda, else cpu. dtype: "auto" is bfloat16; without it, float16 or float32.
    attention: "math", "sdpa", "native", "rows" or "xformers". "auto": on x86 with AVX2, native
        (without a compiler, sdpa); elsewhere, what is measured to be fastest. `llm.attention` tells
        which.
    check_weights: look for NaN and infinity in a checkpoint.
    cuda_graphs: replay iterations of a shape that comes again (more/fast/graphs.py): "on" or "off".
        "auto": on CUDA, if launching kernels takes longer than reading the weights.
    cost: a function: batch -> seconds, for a policy that asks (`Scheduler.cost`).
    fast: False runs without more/fast/. All modules are plain, and their hooks are called.

    After a call, `trace` tells what its iterations did. Raises command.checks.UserError, one line
    that names the bad value.
    """

    def __init__(
        self, model: str = "demo", *, policy: str = "sarathi", chunk_size: int = 256,
        max_batch_size: int = 8, max_length: int | None = None, cache_tokens: int | None = None,
        cache: str = "slots", block_size: int | None = None, prefix_caching: bool = False,
        dtype: str = "auto", device: str = "auto", attention: str = "auto", seed: int = 0,
        time_operators: bool = False, check_weights: bool = False, cuda_graphs: str = "auto",
        cost: Callable[[Batch], float] | None = None, fast: bool = True,
    ):  # fmt: skip
        self.policy, self.chunk_size, self.max_batch_size = policy, chunk_size, max_batch_size
        self.cache_tokens, self.time_operators, self.seed = cache_tokens, time_operators, seed
        self.cost, self.cache, self.graphs = cost, None, None
        self.lock, self.lent_to = RLock(), None
        self.blocks = choose_blocks(cache, block_size, prefix_caching, attention)
        self._scheduler()  # complains before the weights are loaded
        check_whole("seed", seed, 0, MOST_SEED)
        check_flag("time_operators", time_operators)
        check_flag("check_weights", check_weights)
        check_flag("fast", fast)
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        check_fast(fast, attention, cuda_graphs, self.device)
        self.config, self.directory = find_model(model)
        self.max_length = self._choose_length(max_length)
        self.attention = choose_backend(attention, self.device, self.dtype, self.config, fast)
        self._load(check_weights)
        self._make_cache()
        self.attend, self.surroundings = PLAIN.get(self.attention), nullcontext
        if fast:
            measure = attention == "auto" and must_measure(self.device)
            made = speed_up(self.model, self.cache, self.attention, measure)
            self.attention, self.attend, self.surroundings = made
            self._make_graphs(cuda_graphs)
        self.trace, self._next_id = Trace(), 0
        self._loop: Loop | None = None  # of the requests that are running or ran last

    # ---- its parts; a stage of a pipeline has some of the layers, and no graphs

    def _own_layers(self, n_layer: int) -> range:
        return range(n_layer)

    def _choose_length(self, max_length: int | None) -> int:
        if max_length is None and not (self.blocks and self.cache_tokens):
            max_length = default_length(self.config, self.max_batch_size, self.dtype, self.device)
        return choose_length(self.config, max_length)

    def _load(self, check_weights: bool) -> None:
        own, here = self._own_layers(self.config.n_layer), self.directory
        self.part = replace(self.config, n_layer=len(own))  # the layers that are here
        slots, length = self.max_batch_size, self.max_length
        self.model = load_model(
            self.config, here, self.dtype, self.device, own=own, slots=slots, length=length,
            seed=self.seed, check_weights=check_weights,
            blocks=real_memory(self.blocks, slots, length, self.cache_tokens),
        )  # fmt: skip
        self.tokenizer = load_tokenizer(here) if here else None
        known = here, self.tokenizer, self.config.vocab_size
        self.stop_ids = load_stop_ids(*known) if here else frozenset()

    def _make_cache(self) -> None:
        size = self.part, self.max_batch_size, self.max_length, self.dtype, self.device
        self.cache = make_cache(*size, self.blocks, self.cache_tokens)

    def _make_graphs(self, when: str) -> None:
        self.graphs = graphs_for(self.model, self.cache, when, self.attention)

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
        life, reason = self.trace.lives[request.request_id], request.finish_reason
        output, text = request.output, self._text(request.output, reason)
        output = output[:-1] if reason == "error" else output
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
        seen, shown = [0] * len(requests), [""] * len(requests)  # tokens and text of each so far

        def fresh() -> Iterator[StreamedToken]:
            for index, request in enumerate(requests):
                while seen[index] < len(request.output):
                    seen[index] += 1
                    tokens = request.output[: seen[index]]
                    reason = request.finish_reason if len(tokens) == len(request.output) else None
                    text = self._text(tokens, reason)
                    if text.endswith("\ufffd") and reason is None:
                        text = shown[index]  # half a character: wait for the rest of its bytes
                    piece, shown[index] = text[len(shown[index]) :], text
                    yield StreamedToken(index, tokens[-1], piece, reason)

        for _ in self._run(requests):
            yield from fresh()
        yield from fresh()  # tokens that came while another call ran the loop

    @in_turn
    def beam_search(
        self, prompts: Prompts, params: Params = None, cache: str = "segment"
    ) -> list[BeamSearchOutput]:
        """The best sequences of each prompt, in order (more/beam/). Beams cannot be streamed.

        A search takes one slot, and `beam_width` rows of the token budget. cache: "segment" keeps a
        prompt once for all beams; "standard" copies it for each. Raises UserError as `generate`.
        """
        own = {"cache": cache, "slots": self.cache}
        requests = self._requests(prompts, params, None, BeamSearchParams, **own)
        ends = [len(request.prompt) + request.max_tokens for request in requests]
        self.model.reach(max(ends, default=0))  # a slot does not limit the response
        for _ in self._run(requests):
            enable_beams(self._loop, self.attention)
        return [output_of(request, self.trace, self._text) for request in requests]

    @in_turn
    def resize_cache(self, max_batch_size: int, max_length: int | None = None) -> None:
        """A new cache, for other numbers of requests and tokens. Nothing may be running."""
        self.check_idle("the cache")
        check_whole("max_batch_size", max_batch_size)
        length = choose_length(self.config, self.max_length if max_length is None else max_length)
        held = self.part.parameters * self.dtype.itemsize + self.cache.bytes
        size = self.part, max_batch_size, length, self.dtype, self.device
        check_memory(*size, held, real_memory(self.blocks, *size[1:3], self.cache_tokens))
        graphs = "again" if self.graphs else "off"
        self._loop = self.cache = self.graphs = None  # free the old cache first
        self.max_batch_size, self.max_length = max_batch_size, length
        self.model.make_rotary_tables(length)
        self._make_cache()
        self._make_graphs(graphs)

    # ---- threads

    @contextmanager
    def turn(self, who: object = None) -> Iterator[None]:
        """One thread at a time; the others wait. UserError if the LLM is lent to somebody else."""
        with self.lock:
            if self.lent_to not in (None, who):
                raise UserError("this LLM is lent to a server: ask the server, or end it first")
            yield

    @contextmanager
    def lend(self, who: object) -> Iterator[None]:
        """Meanwhile `who` steps the model, and all calls are refused."""
        with self.turn(who):
            self.check_idle("who runs the model")
            self.lent_to = who
        try:
            yield
        finally:
            self.lent_to = None

    # ---- the loop

    def _run(self, requests: list[Request]) -> Iterator[None]:
        """Step until these requests have ended. Those of other calls move on as well."""
        loop = self._join(requests)
        try:
            yield
            while any(request.finish_reason is None for request in requests):
                if loop is not self._loop:
                    raise UserError("this stream has ended: another call failed while both ran")
                try:
                    with self.surroundings():
                        loop.step()
                except BaseException:
                    self._loop = None  # its state may be broken: the next call makes a new loop
                    raise
                yield
        finally:
            for request in requests:
                if request.finish_reason is None and loop is self._loop:
                    loop.cancel(request)

    def _join(self, requests: list[Request]) -> Loop:
        """Add these requests to the loop that runs, or else to a new one."""
        if self.max_batch_size > self.cache.slots:
            raise UserError(
                f"max_batch_size is {self.max_batch_size}, and the cache has {self.cache.slots}"
                " slots: call resize_cache"
            )
        scheduling = self.policy, self.chunk_size, self.max_batch_size, self.cache_tokens
        options = *scheduling, self.time_operators
        if self._loop is None or not self._loop.busy:
            self.cache.reset()
            self._loop, self._next_id = Loop(self._scheduler(), self.make_executor()), 0
            self._options = options
            self.trace = self._loop.trace
        elif self._options != options:
            self.check_idle("policy, chunk_size and other options")
        self._check(requests)  # again: the cache may have changed since
        now = self._loop.executor.now() if self._loop.busy else 0.0
        for request in requests:
            request.request_id, request.arrival = self._next_id, now + request.arrival
            self._next_id += 1
            self._loop.add(request)
        return self._loop

    def check_idle(self, what: str) -> None:
        """Raise a UserError while a stream waits to be read. what: may not change meanwhile."""
        if self._loop is not None and self._loop.busy:
            how = "read their stream to its end, or close() it"
            raise UserError(f"{what} may not change while requests run: {how}")

    def _scheduler(self) -> Scheduler:
        scheduling = self.policy, self.max_batch_size, self.chunk_size, self.cache_tokens
        return manage(make_scheduler(*scheduling), self.cache)

    def make_executor(self) -> ModelExecutor:
        parts = (self.model, self.cache, self.attend, self.time_operators, self.cost)
        return GraphExecutor(*parts, graphs=self.graphs) if self.graphs else ModelExecutor(*parts)

    # ---- prompts and text

    def _requests(
        self, prompts: Prompts, params: Params, times: Times, kind: type = SamplingParams, **beams
    ) -> list[Request]:
        """Requests for the prompts, or a UserError before anything runs."""
        own = {"stop_ids": self.stop_ids, "vocab_size": self.config.vocab_size, "seed": self.seed}
        requests = make_requests(prompts, params, times, encode=self._encode, kind=kind, **own)
        if beams:
            requests = beam_requests(requests, params, config=self.config, **beams)
        self._check(requests)
        return requests

    def _check(self, requests: list[Request]) -> None:
        check_requests(requests, self.max_length, "max_length", "prompt")
        scheduler = self._scheduler()
        for request in requests:
            scheduler.check(request)

    def _encode(self, index: int, text: str) -> list[int]:
        self.tokenizer = self.tokenizer or late_tokenizer(self.config, self.directory, index)
        return self.tokenizer.encode(text)

    def _text(self, tokens: Sequence[int], finish_reason: str | None) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens[:-1] if finish_reason in ("stop", "error") else tokens)
