"""The loop: scheduler -> executor -> scheduler. `LLM` runs it with a real model, `simulate` with
the cost model.

A student who understands `run` has understood the engine. It cannot tell the two executors apart:

    ModelExecutor   torch, the wall clock, real tokens
    CostExecutor    the cost model of a named GPU, a virtual clock, placeholder tokens
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Large pages for large tensors, where Linux gives them to those who ask: reading the weights, a CPU
# then looks up a 500th of the addresses. PyTorch reads this at its first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch.overrides import TorchFunctionMode

import checkpoint
import files
import native
from attention import BACKENDS, candidates, check_backend, choose_backend, fastest
from configs import GPUS, LINKS, MODELS, ModelConfig, UserError, lookup
from costmodel import EFFICIENCY, CostModel
from executor import CostExecutor, ModelExecutor
from graphs import GraphExecutor, Graphs
from kvcache import KVCache
from linear import pack_linears
from model import Transformer
from sampling import Sampler, SamplingParams
from scheduler import NOTHING_SCHEDULED, Batch, Request, Scheduler, make_scheduler
from timeline import Trace
from tokenizer import GPT2_VOCABULARY, gpt2_tokenizer, load_stop_ids, load_tokenizer

__all__ = ["LLM", "RequestOutput", "SamplingParams", "simulate"]


def run(
    scheduler: Scheduler,
    executor: ModelExecutor | CostExecutor,
    requests: Iterable[Request],
    trace: Trace,
) -> Iterator[tuple[Batch, list[int]]]:
    """The one loop of the engine. Yields (batch, tokens) after each iteration; fills `trace`."""
    arriving = deque(sorted(requests, key=lambda request: request.arrival))
    while arriving or scheduler.has_work:
        now = executor.now()
        while arriving and arriving[0].arrival <= now:
            scheduler.add(arriving.popleft())
        batch = scheduler.schedule(now)
        while scheduler.preempted:
            trace.preempted.append((scheduler.preempted[-1].request_id, now))
            executor.release(scheduler.preempted.pop())
        if batch is None:
            if not arriving:
                raise scheduler.broken(NOTHING_SCHEDULED)
            executor.wait_until(arriving[0].arrival)
            continue
        scheduler.check_batch(batch)
        result = executor.execute(batch)
        ended = scheduler.update(batch, result.tokens)
        trace.record(batch, now, result.seconds, result.operators, ended)
        for request in ended:
            executor.release(request)
        yield batch, result.tokens


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. Times in seconds from the request's arrival; text is "" where the
    model has no tokenizer.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # "stop" or "length"
    ttft: float  # time to first token
    latency: float  # time to last token


@dataclass(frozen=True)
class StreamedToken:
    """One token as it comes. index: of the prompt; text: what this token adds ("" inside a
    multi-token character).
    """

    index: int
    token_id: int
    text: str
    finish_reason: str | None


class LLM:
    """A model, its cache and a scheduling policy; names follow vLLM.

    model: "demo" (trained, in the box), a Hugging Face directory, a hub id ("Qwen/Qwen2.5-0.5B"),
    or a name of `configs.MODELS` (random weights, prompts of token ids only). check: look for NaN
    and infinity in a checkpoint's weights. policy, chunk_size (C, tokens; the token budget),
    max_batch_size (B, requests), cache_tokens (what the cache may hold of all requests together;
    None: all that fits its slots): see scheduler.py; they may be changed between two calls, but for
    B, which sizes the cache. max_length: longest prompt + output, in tokens; the cache is allocated
    at once for B of them. dtype: "auto" is bfloat16 where the hardware has it, else float32.
    device: "auto" is cuda where there is one, else cpu. attention: a back end of attention.py;
    "auto" is `native` on a CPU that has a compiler, on CUDA the fastest, measured on this cache,
    else sdpa; `attention` then names it. cuda_graphs: replay iterations of a shape that comes again
    (graphs.py). layers: of how many, which ones to have, as one stage of a pipeline
    (distributed.py). After a call, `trace` tells what its iterations did. Raises configs.UserError
    with one line that names a bad value.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        policy: str = "sarathi",
        chunk_size: int = 256,
        max_batch_size: int = 8,
        cache_tokens: int | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "auto",
        seed: int = 0,
        time_operators: bool = False,
        check: bool = False,
        cuda_graphs: bool = False,
        layers: Callable[[int], range] | None = None,
    ):
        # complains before the weights are loaded
        make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise UserError(f"seed is {seed!r}; it must be a whole number from 0 to 2**63 - 1")
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        check_backend(attention, self.device)
        if cuda_graphs and self.device.type != "cuda":
            raise UserError(f"cuda_graphs needs a CUDA device; this is {self.device}")
        self.policy, self.chunk_size, self.max_batch_size, self.cache_tokens = (
            policy,
            chunk_size,
            max_batch_size,
            cache_tokens,
        )
        self.seed = seed
        self.time_operators = time_operators
        self.directory = directory = files.find(model)  # None: random weights
        # not the directory's: in the hub's cache that is a hash
        name = Path(model).expanduser().resolve().name
        self.config = (
            MODELS[model] if directory is None else checkpoint.load_config(directory, name)
        )
        self.max_length = self.config.max_length if max_length is None else max_length
        if not 1 <= self.max_length <= self.config.max_length:
            raise UserError(
                f"max_length is {max_length}; {self.config.name} allows 1 to"
                f" {self.config.max_length} tokens"
            )
        if 0 < self.config.window < self.max_length:
            raise UserError(
                f"{self.config.name} has a sliding_window of {self.config.window} tokens, which is"
                f" not supported for longer sequences: max_length is {self.max_length}; give"
                f" {self.config.window} at most"
            )
        groups = self.config.n_head // self.config.n_kv_head
        self.attention = choose_backend(
            attention, self.device, self.dtype, self.config.head_dim, groups
        )
        own = range(self.config.n_layer) if layers is None else layers(self.config.n_layer)
        part = replace(self.config, n_layer=len(own))
        check_memory(part, max_batch_size, self.max_length, self.dtype, self.device)
        self.model = new_model(self.config, self.dtype, self.device, own)
        if directory is None:
            self.model.init_weights(seed)
            self.weights, self.tokenizer, self.stop_ids = f"random (seed {seed})", None, frozenset()
        else:
            checkpoint.load_weights(self.model, directory, check)
            self.weights, self.tokenizer = str(directory), load_tokenizer(directory)
            self.stop_ids = load_stop_ids(directory, self.tokenizer)
        pack_linears(self.model)
        self.cache = KVCache(part, max_batch_size, self.max_length, self.dtype, self.device)
        if self.attention == "native":
            native.install(self.model)
        if attention == "auto" and self.device.type == "cuda":
            with torch.inference_mode():
                self.attention = fastest(
                    candidates(), self.config.n_head, self.cache.k[0], self.cache.v[0]
                )
        self.attend = BACKENDS[self.attention]
        self.cuda_graphs, self.graphs = cuda_graphs, Graphs(self.cache)
        self.trace = Trace()
        if self.device.type == "cpu":
            # after the weights and the cache: those of a process's first LLM do go back to the
            # system with it
            keep_freed_memory()

    def generate(
        self,
        prompts: str | Sequence,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival_times: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts: strings or lists of token ids; one SamplingParams for all or one
        for each. Outputs in order.

        arrival_times: seconds from the call at which each prompt reaches the scheduler, in real
        time; None: all at once.
        """
        requests = self._requests(prompts, sampling_params, arrival_times)
        for _ in self._run(requests):
            pass
        return [
            RequestOutput(
                prompt_token_ids=list(request.prompt),
                token_ids=request.output,
                text=self._text(request),
                finish_reason=request.finish_reason,
                ttft=self.trace.lives[request.request_id].ttft,
                latency=self.trace.lives[request.request_id].latency,
            )
            for request in requests
        ]

    def stream(
        self,
        prompts: str | Sequence,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival_times: Sequence[float] | None = None,
    ) -> Iterator[StreamedToken]:
        """Like `generate`, but yields each token when its iteration ends; the prompts' tokens come
        interleaved.

        Complains at once about bad prompts, but runs nothing before the first token is asked for.
        """
        return self._stream(self._requests(prompts, sampling_params, arrival_times))

    def _stream(self, requests: list[Request]) -> Iterator[StreamedToken]:
        shown = [""] * len(requests)
        for batch, tokens in self._run(requests):
            for request, token in zip(batch.sampled, tokens, strict=True):
                index, text = request.request_id, self._text(request)
                if text.endswith("\ufffd") and request.finish_reason is None:
                    text = shown[index]  # half a character: wait for the rest of its bytes
                piece, shown[index] = text[len(shown[index]) :], text
                yield StreamedToken(index, token, piece, request.finish_reason)

    def _run(self, requests: list[Request]) -> Iterator[tuple[Batch, list[int]]]:
        scheduler = make_scheduler(
            self.policy, self.max_batch_size, self.chunk_size, self.cache_tokens
        )
        self.cache.reset()
        self.trace = trace = Trace()
        executor = self._executor()
        for iteration in run(scheduler, executor, requests, trace):
            yield iteration
            # its slots are somebody else's
            if self.trace is not trace and any(
                request.finish_reason is None for request in requests
            ):
                raise UserError(
                    "this stream is over: a later call to generate or stream has taken the cache"
                )

    def _executor(self) -> ModelExecutor:
        parts = (self.model, self.cache, self.attend, self.time_operators)
        if not self.cuda_graphs:
            return ModelExecutor(*parts)
        if self.graphs.cache is not self.cache:
            self.graphs = Graphs(self.cache)
        return GraphExecutor(*parts, self.graphs)

    def _requests(
        self,
        prompts: str | Sequence,
        params: SamplingParams | Sequence[SamplingParams] | None,
        arrival_times: Sequence[float] | None = None,
    ) -> list[Request]:
        """Requests for the prompts, or a UserError before anything runs."""
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts but {len(params)} sampling_params: give one, or one for"
                " each prompt"
            )
        try:
            arrivals = (
                [0.0] * len(prompts)
                if arrival_times is None
                else [float(moment) for moment in arrival_times]
            )
        except (TypeError, ValueError):
            raise UserError(
                "arrival_times must be a list of seconds, one for each prompt"
            ) from None
        if len(arrivals) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts but {len(arrivals)} arrival_times: give one for each"
                " prompt"
            )
        scheduler = make_scheduler(
            self.policy, self.max_batch_size, self.chunk_size, self.cache_tokens
        )
        requests = []
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            ids = self._token_ids(index, prompt)
            if not 0 <= arrivals[index] < float("inf"):
                raise UserError(
                    f"prompt {index}: arrival time {arrivals[index]} is not a number of seconds"
                    " from 0"
                )
            if len(ids) + param.max_tokens > self.max_length:
                raise UserError(
                    f"prompt {index}: {len(ids)} prompt tokens + max_tokens {param.max_tokens}"
                    f" exceed max_length {self.max_length}"
                )
            stop_ids = frozenset(param.stop_ids) | (
                frozenset() if param.ignore_eos else self.stop_ids
            )
            seed = self.seed + index if param.seed is None else param.seed
            sampler = Sampler(param, seed) if param.temperature > 0 else None
            requests.append(
                Request(index, ids, param.max_tokens, stop_ids, arrivals[index], sampler=sampler)
            )
            scheduler.check(requests[-1])
        return requests

    def _token_ids(self, index: int, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if (
                self.tokenizer is None
                and self.directory
                and (self.config.flavour, self.config.vocab_size) == ("gpt2", GPT2_VOCABULARY)
            ):
                self.tokenizer = gpt2_tokenizer()
            if self.tokenizer is None:
                raise UserError(
                    f"prompt {index} is text, but {self.config.name} ({self.weights} weights) has"
                    " no tokenizer.json: give token ids"
                )
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise UserError(f"prompt {index} is empty; it needs at least one token")
        for token in ids:
            if not 0 <= token < self.config.vocab_size:
                raise UserError(
                    f"prompt {index}: token id {token} is not in 0 .. {self.config.vocab_size - 1}"
                )
        return ids

    def _text(self, request: Request) -> str:
        if self.tokenizer is None:
            return ""
        spoken = request.output[:-1] if request.finish_reason == "stop" else request.output
        return self.tokenizer.decode(spoken)


class NoRandomNumbers(TorchFunctionMode):
    """Skips the random numbers that PyTorch's layers start with: for a large model, drawing them
    takes longer than to load it.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.nn.init.kaiming_uniform_, torch.nn.init.normal_):
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return function(*args, **(kwargs or {}))


def new_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, layers: range | None = None
) -> Transformer:
    """A model whose parameters are allocated once, in their final dtype and place. Its matrices
    hold what was in the memory before.

    layers: see `Transformer`.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), NoRandomNumbers():
            return Transformer(config, layers).eval()
    finally:
        torch.set_default_dtype(before)


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks for the next iteration, as PyTorch does by itself on
    CUDA.

    Else it hands each block back to the system, and the next iteration pays a page fault for every
    4 KiB of it, which can more than double a decode's time. Elsewhere than on Linux with glibc this
    does nothing.
    """
    trim_threshold, mmap_max = -1, -4  # names of mallopt's parameters, from malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def check_memory(
    config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A UserError if the weights and the cache alone are more than the device's memory, before
    anything is allocated.
    """
    memory = memory_of(device)
    if memory is None:
        return
    weights, cache = (
        config.parameters * dtype.itemsize,
        slots * length * config.kv_bytes_per_token(dtype.itemsize),
    )
    if weights + cache > memory:
        raise UserError(
            f"{config.name} needs {weights / 1e9:.1f} GB of weights and {cache / 1e9:.1f} GB of"
            f" cache ({slots} slots of {length} tokens), but {device} has {memory / 1e9:.1f} GB:"
            " choose a smaller model, max_batch_size or max_length"
        )


def memory_of(device: torch.device) -> int | None:
    """Bytes: what is free on a GPU, all that the machine has on a CPU; None on Windows, which does
    not say without another package.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def choose_device(name: str) -> torch.device:
    """cuda where there is one, else cpu; or the named one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"unknown device {name!r}: choose from auto, cpu, cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device {name!r} is not here: PyTorch sees no CUDA GPU; choose cpu or auto"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(
            f"unknown device {name!r}: choose from auto, cpu, cuda, cuda:0, ..."
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} is not here: PyTorch sees {torch.cuda.device_count()} CUDA GPUs, the"
            f" last is cuda:{torch.cuda.device_count() - 1}"
        )
    return device


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively, else float32 (float16 on an older GPU);
    or the named one.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UserError(f"unknown dtype {name!r}: choose from auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
    has_bf16 = any(
        getattr(torch.cpu, check, bool)()
        for check in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return torch.bfloat16 if has_bf16 else torch.float32


def simulate(
    requests: Iterable[Request],
    model: str = "llama-13b",
    gpu: str = "a6000",
    *,
    policy: str = "sarathi",
    chunk_size: int = 256,
    max_batch_size: int = 18,
    cache_tokens: int | None = None,
    tp: int = 1,
    link: str = "nvlink-a100",
    software: str = "sarathi",
) -> Trace:
    """What the same scheduler would do on a GPU that you do not have, or on `tp` of them: predicted
    times, placeholder tokens.

    link: of configs.LINKS, joins the `tp` GPUs. software: of costmodel.EFFICIENCY, whose
    measurements the cost model was fitted on. Raises UserError where a request is too long for the
    model or for `cache_tokens`. That GPU's memory is not looked up: without cache_tokens, B
    requests run at once even where it could not hold their keys and values
    (`kvcache.max_batch_size` says how many it can).
    """
    config, efficiency = lookup(MODELS, model, "model"), lookup(EFFICIENCY, software, "software")
    cost_model = CostModel(
        config, lookup(GPUS, gpu, "GPU"), efficiency, tp=tp, link=lookup(LINKS, link, "link")
    )
    requests, most, ids = list(requests), config.max_length, set()
    scheduler = make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
    for request in requests:
        if len(request.prompt) + request.max_tokens > most:
            tokens = f"{len(request.prompt)} prompt tokens + max_tokens {request.max_tokens}"
            raise UserError(
                f"request {request.request_id}: {tokens} exceed the {most} that {model} allows"
            )
        if request.request_id in ids:
            raise UserError(
                f"two requests have the id {request.request_id}: a trace could not tell them apart"
            )
        ids.add(request.request_id)
        scheduler.check(request)  # rather now than in the middle of the run
    trace = Trace()
    for _ in run(scheduler, CostExecutor(cost_model), requests, trace):
        pass
    return trace
