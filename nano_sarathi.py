"""What you import: `LLM` with all that is in more/: models of the hub, fast kernels, blocks, beams.

    from nano_sarathi import LLM, SamplingParams
    llm = LLM("Qwen/Qwen2.5-0.5B", policy="sarathi_serve", cache="paged")

It is engine.LLM, with other parts plugged into the same loop.
"""

import command.first  # before torch  # noqa: F401

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batch import Batch, Request
from command.checks import MOST_SEED, UserError, check_flag, check_whole
from engine import LLM as BookLLM
from engine import Params, Prompts, RequestOutput, StreamedToken, Times, in_turn
from executor import ModelExecutor
from loop import Loop
from more.beam.executor import enable_beams
from more.beam.outputs import BeamSearchOutput, beam_requests, output_of
from more.beam.request import BeamSearchParams
from more.fast.backends import check_fast, choose_backend, must_measure, speed_up
from more.fast.graphs import GraphExecutor, graphs_for
from more.loading.device import check_memory, choose_device, choose_dtype, default_length
from more.loading.load import choose_length, find_model, late_tokenizer, load_model
from more.loading.prompts import careful
from more.loading.requests import check_requests
from more.loading.tokenizer import load_stop_ids, load_tokenizer
from more.paged.blocks import choose_blocks, real_memory
from more.paged.cache import make_cache, manage
from more.simulate import simulate  # for users alone: the LLM never prices
from sampling import SamplingParams
from scheduler import Scheduler

__all__ = [
    "LLM", "BeamSearchParams", "RequestOutput", "SamplingParams", "StreamedToken", "simulate",
]  # fmt: skip


class LLM(BookLLM):
    """A model, its cache and a scheduling policy. Options that are not here: see `engine.LLM`.

    model: also a hub id ("Qwen/Qwen2.5-0.5B"), or a name of `configs.MODELS` (random weights,
        prompts of token ids only).
    max_length: tokens of one request, prompt + output - 1 (of a beam search: the prompt). None: see
        more/loading/requests.py.
    cache: "slots", or "paged": blocks of `block_size` tokens (16), for `cache_tokens` in all. With
        prefix_caching, requests that begin alike share them (more/paged/).
    device: "auto" is cuda, else cpu. dtype: "auto" is bfloat16; without it, float16 or float32.
    attention: "math", "sdpa", "native", "rows" or "xformers". "auto": on x86 with AVX2, native
        (without a compiler, sdpa); elsewhere, what is measured to be fastest. `llm.attention` tells
        which.
    check_weights: look for NaN and infinity in a checkpoint.
    cuda_graphs: replay iterations of a shape that comes again (more/fast/graphs.py): "on" or "off".
        "auto": on CUDA, if launching kernels takes longer than reading the weights.
    """

    elsewhere = ""

    def __init__(
        self,
        model: str = "demo",
        *,
        policy: str = "sarathi",
        chunk_size: int = 256,
        max_batch_size: int = 8,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        cache: str = "slots",
        block_size: int | None = None,
        prefix_caching: bool = False,
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "auto",
        seed: int = 0,
        time_operators: bool = False,
        check_weights: bool = False,
        cuda_graphs: str = "auto",
        cost: Callable[[Batch], float] | None = None,
        **others: object,
    ):
        self.blocks = choose_blocks(cache, block_size, prefix_caching, attention)
        self.lent_to: object = None  # who steps the model in place of our loop
        self.check_weights = check_weights
        self.cuda_graphs = cuda_graphs
        super().__init__(
            model,
            policy=policy,
            chunk_size=chunk_size,
            max_batch_size=max_batch_size,
            max_length=max_length,
            cache_tokens=cache_tokens,
            dtype=dtype,
            device=device,
            attention=attention,
            seed=seed,
            time_operators=time_operators,
            cost=cost,
            **others,
        )
        self._plug_in(attention)

    # ---- its parts

    def _load(self, model: str, dtype: str, device: str, attention: str) -> None:
        check_whole("seed", self.seed, 0, MOST_SEED)
        for name in ("time_operators", "check_weights"):
            check_flag(name, getattr(self, name))
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        check_fast(attention, self.cuda_graphs, self.device)
        self.config, self.directory = find_model(model)
        self.max_length = self._choose_length(self.max_length)
        self.attention = choose_backend(attention, self.device, self.dtype, self.config)
        self.tokenizer = None
        self.stop_ids = frozenset()
        if self.directory:  # before the weights: who lacks a package or a file, waits for nothing
            self.tokenizer = load_tokenizer(self.directory)
            self.stop_ids = load_stop_ids(self.directory, self.tokenizer, self.config.vocab_size)
        self._load_weights()

    def _choose_length(self, max_length: int | None) -> int:
        if max_length is None and not (self.blocks and self.cache_tokens):
            max_length = default_length(self.config, self.max_batch_size, self.dtype, self.device)
        return choose_length(self.config, max_length)

    def _load_weights(self, own: range | None = None) -> None:
        """own: the layers of a pipeline's stage; None: all."""
        slots = self.max_batch_size
        length = self.max_length
        self.model = load_model(
            self.config,
            self.directory,
            self.dtype,
            self.device,
            own=own,
            slots=slots,
            length=length,
            seed=self.seed,
            check_weights=self.check_weights,
            blocks=real_memory(self.blocks, slots, length, self.cache_tokens),
        )
        self.part = getattr(self.model, "part", self.config)  # the layers that are here

    def _make_cache(self) -> None:
        size = self.part, self.max_batch_size, self.max_length, self.dtype, self.device
        self.cache = make_cache(*size, self.blocks, self.cache_tokens)

    def _plug_in(self, attention: str) -> None:
        """The back end of attention, and CUDA graphs. attention: what was asked for."""
        measure = attention == "auto" and must_measure(self.device)
        made = speed_up(self.model, self.cache, self.attention, measure)
        self.attention, self.attend, self.surroundings = made  # each iteration runs in the last
        self.graphs = None
        self._make_graphs(self.cuda_graphs)

    def _make_graphs(self, when: str) -> None:
        self.graphs = graphs_for(self.model, self.cache, when, self.attention)

    def _scheduler(self) -> Scheduler:
        return manage(super()._scheduler(), self.cache)

    def make_executor(self) -> ModelExecutor:
        if self.graphs is None:
            return super().make_executor()
        parts = self.model, self.cache, self.attend, self.time_operators, self.cost
        return GraphExecutor(*parts, graphs=self.graphs)

    # ---- calls

    @in_turn
    def beam_search(
        self, prompts: Prompts, params: Params = None, cache: str = "segment"
    ) -> list[BeamSearchOutput]:
        """The best sequences of each prompt, in order (more/beam/). Beams cannot be streamed.

        A search takes one slot, and `beam_width` rows of the token budget. cache: "segment" keeps a
        prompt once for all beams; "standard" copies it for each. Raises UserError as `generate`.
        """
        requests = self._searches(prompts, params, cache)
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
        self.max_batch_size = max_batch_size
        self.max_length = length
        self.model.make_rotary_tables(length)
        self._make_cache()
        self._make_graphs(graphs)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """As in the book. UserError while the LLM is lent."""
        with self.lock:
            if self.lent_to is not None:
                raise UserError("this LLM is lent to a server: ask the server, or end it first")
            yield

    # ---- the loop

    def _step(self, loop: Loop) -> None:
        with self.surroundings():
            loop.step()

    def _current_loop(self) -> Loop:
        if self.max_batch_size > self.cache.slots:
            raise UserError(
                f"max_batch_size is {self.max_batch_size}, and the cache has {self.cache.slots}"
                " slots: call resize_cache"
            )
        return super()._current_loop()

    # ---- prompts and text

    def _requests(self, prompts: Prompts, params: Params, times: Times) -> list[Request]:
        return super()._requests(*self._careful(prompts, params, times, SamplingParams))

    def _searches(self, prompts: Prompts, params: Params, cache: str) -> list[Request]:
        """As `_requests`, of beam searches."""
        prompts, params, times = self._careful(prompts, params, None, BeamSearchParams)
        each = zip(prompts, params, times, strict=True)
        plain = [self._request(index, *one) for index, one in enumerate(each)]
        requests = beam_requests(plain, params, cache, self.config, self.cache)
        self._check(requests, self._current_loop().scheduler)
        return requests

    def _careful(self, prompts: Prompts, params: Params, times: Times, kind: type) -> tuple:
        own = {"encode": self._encode, "vocab_size": self.config.vocab_size}
        return careful(prompts, params, times, kind=kind, **own)

    def _check(self, requests: list[Request], scheduler: Scheduler) -> None:
        check_requests(requests, self.max_length, "max_length", "prompt")
        for request in requests:
            scheduler.check(request)

    def _encode(self, index: int, text: str) -> list[int]:
        self.tokenizer = self.tokenizer or late_tokenizer(self.config, self.directory, index)
        return self.tokenizer.encode(text)
