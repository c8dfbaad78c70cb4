"""The real engine on this machine: single batches, and whole workloads beside their baseline.

A machine drifts (frequency, neighbours). So what is compared runs in alternation, and medians are
taken, with the range beside them.

Whatever needs torch is imported inside the functions: the scripts import this module at their top,
and what they predict must run where torch is not installed.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batch import Batch, Request
from command.checks import UserError
from command.flags import Flag
from costmodel import make_batch
from experiments.lib.common import print_table, progress
from experiments.lib.steady import Workload, balance, first_period, split
from loop import Result
from more.serving.calibration import cost_here, this_machine
from timeline import Trace

if TYPE_CHECKING:  # see above
    import torch

    from engine import LLM, RequestOutput
    from executor import ModelExecutor

LARGE = 2e9  # bytes of weights: models for CPUs have less
FOR_CPUS = "laptop"  # the default of --model
INSTEAD = "Give --model llama3.2-3b, or a larger one that fits"


def load_llm(options: argparse.Namespace, batch_size: int, length: int) -> "LLM":
    """The model to measure, with room for B requests of L tokens and a last output token.

    Policies of a user's own learn what a batch costs, where this machine was calibrated.
    """
    from engine import LLM

    sizes = {"max_batch_size": batch_size, "max_length": length + 1}
    device = device_for(options.model, options.dtype, options.device)
    where = {"device": device, "cuda_graphs": options.cuda_graphs}
    llm = LLM(options.model, dtype=options.dtype, **where, **sizes)
    llm.cost = cost_here(llm.config.name, str(llm.device), str(llm.dtype))
    if llm.device.type == "cuda" and llm.config.name == FOR_CPUS:
        print(f"{FOR_CPUS} is small: on a GPU, it measures how fast kernels start. {INSTEAD}")
    return llm


def device_for(model: str, dtype: str, device: str) -> "torch.device":
    """Where a model is measured, as `more.loading.device.choose_device` says.

    If that is a CPU, and the model is large, one line says so before the weights are made.
    """
    from more.loading.device import choose_device, choose_dtype
    from more.loading.load import find_model

    chosen, config = choose_device(device), find_model(model)[0]
    size = config.parameters * choose_dtype(dtype, chosen).itemsize
    if chosen.type == "cpu" and size > LARGE:
        print(
            f"{config.name} has {size / 1e9:.1f} GB of weights, and the device is a CPU: this may"
            " take hours",
            file=sys.stderr,
            flush=True,
        )
    return chosen


def most_that_fit(
    options: argparse.Namespace, model: str, sizes: Iterable[int], length: int
) -> int:
    """The largest of `sizes`: so many requests of `length` tokens fit a GPU beside the model.

    0: none does, or the device is no GPU. From then on, `options.device` is a torch.device.
    """
    from more.loading.device import check_memory, choose_device, choose_dtype
    from more.loading.load import find_model

    options.device = device = choose_device(options.device)
    config, dtype = find_model(model)[0], choose_dtype(options.dtype, device)
    for size in sorted(sizes, reverse=True) if device.type == "cuda" else ():
        with suppress(UserError):
            check_memory(config, size, length, dtype, device)
            return size
    return 0


def hardware_of(llm: "LLM") -> str:
    """Where an LLM runs, as the `hardware` column names it: machine and dtype."""
    return f"{this_machine(str(llm.device))}, {str(llm.dtype).removeprefix('torch.')}"


# ----------------------------------------------------------------------------------- single batches


def place(executor: "ModelExecutor", batch: Batch) -> None:
    """The cache holds what the requests of a batch had before, and nothing else."""
    executor.cache.reset()
    executor.slot_of.clear()
    started = [chunk.request for chunk in batch.chunks if chunk.start > 0]
    for request in started + batch.decodes:
        executor.slot_of[request.request_id] = slot = executor.cache.allocate()
        executor.cache.extend(slot, request.context)


def batch_runner(llm: "LLM", operators: bool) -> Callable[[Batch], Result]:
    """Runs one batch on the real engine: its seconds, of each operator too if asked for.

    Nothing is sampled twice: each run starts from a cache that holds what the batch's requests had
    before.
    """
    # memory that was never written is all one page of zeros, and reads faster than a real cache
    llm.cache.k.fill_(0.01)
    llm.cache.v.fill_(0.01)
    kept, llm.time_operators = llm.time_operators, operators
    executor = llm.make_executor()  # the one of `llm.generate`: with CUDA graphs, where it has them
    llm.time_operators = kept

    def run(batch: Batch) -> Result:
        place(executor, batch)
        return executor.execute(batch)

    return run


def time_batches(llm: "LLM", batches: Sequence[Batch], repeats: int) -> list[float]:
    """The median seconds of each batch on the real engine.

    The batches run in alternation, so that a machine's drift hits all alike.
    """
    run = batch_runner(llm, operators=False)
    warm_ups = 2 if llm.graphs else 1  # the second records the graphs
    turns = [
        [run(batch).seconds for batch in batches]
        for _ in progress(range(warm_ups + repeats), "measuring")
    ]
    return [statistics.median(seconds) for seconds in zip(*turns[warm_ups:], strict=True)]


# ---------------------------------------------------------------------------------- whole workloads


def prepare(
    llm: "LLM", requests: Sequence[Request], policy: str, chunk_size: int, operators: bool
) -> tuple[list, list, list]:
    """Set the policy; make up prompts of these lengths, their parameters and arrivals."""
    from sampling import SamplingParams

    llm.policy, llm.chunk_size, llm.time_operators = policy, chunk_size, operators
    vocabulary = llm.config.vocab_size
    prompts = [[(31 * r.request_id + 7 * j) % vocabulary for j in r.prompt] for r in requests]
    params = [
        SamplingParams(
            max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, tags=request.tags
        )
        for request in requests
    ]
    return prompts, params, [request.arrival for request in requests]


def generate(
    llm: "LLM", requests: Sequence[Request], policy: str, chunk_size: int, operators: bool = False
) -> "list[RequestOutput]":
    """Run requests of these lengths and arrivals for real; `llm.trace` then tells what happened."""
    return llm.generate(*prepare(llm, requests, policy, chunk_size, operators))


def warm_up(llm: "LLM") -> None:
    """Run what is slow the first time: first kernels, first pages, largest blocks of memory.

    Every slot gets a prompt, as long as they usually are, and a decode.
    """
    prompt = range(min(512, llm.max_length - 2))
    generate(llm, [Request(i, prompt, 2) for i in range(llm.max_batch_size)], "baseline", 1)


def measured_trace(
    llm: "LLM", work: Workload, policy: str, chunk_size: int, operators: bool = False
) -> Trace:
    """A run of as many requests as `first_period` needs, which stops when that has ended."""
    first, last = first_period(work, policy)
    requests = work.requests(last + (work.batch_size if first else 0))
    for _ in llm.stream(*prepare(llm, requests, policy, chunk_size, operators)):
        if len(llm.trace.finished) >= last:
            break
    return llm.trace


# --------------------------------------------------------------------------------- which chunk size


@dataclass(frozen=True)
class ChunkProfile:
    """What a chunk size looks worth where P:D is balanced, from the seconds of three iterations."""

    chunk_size: int  # C
    prefill: float  # s: of a prefill-only batch of B whole prompts of P tokens
    decodes: float  # s: of a decode-only batch of B
    hybrid: float  # s: of C - (B-1) tokens from the middle of a prompt, and B - 1 decodes
    gain: float  # throughput over the baseline's


def profile_chunk_sizes(llm: "LLM", length: int, batch_size: int) -> list[ChunkProfile]:
    """All powers of two from 8 B to L/2, in seconds rather than minutes.

    At the balance, B requests take the baseline one prefill-only batch and D decode-only ones, and
    SARATHI B * P / (C - (B-1)) hybrid ones, in which all decodes ride. We assume that decodes
    attend to P + D/2 tokens, and that a prefill costs as much per token for any P near L.
    """
    sizes = [2**power for power in range(3, 14) if 8 * batch_size <= 2**power <= length // 2] or [
        max(length // 2, 2 * batch_size)
    ]
    splits = {size: split(length, balance(size, batch_size)) for size in sizes}
    batches = [make_batch([(0, length, length)] * batch_size)]
    for size, (prompt, decodes) in splits.items():
        chunk, context = min(size - (batch_size - 1), prompt), prompt + decodes // 2
        batches.append(make_batch(decodes=batch_size, context=context))
        batches.append(
            make_batch([((prompt - chunk) // 2, chunk, prompt)], batch_size - 1, context)
        )
    longest, *seconds = time_batches(llm, batches, repeats=3)
    profiles = []
    for (size, (prompt, decodes)), decode_only, hybrid in zip(
        splits.items(), seconds[::2], seconds[1::2], strict=True
    ):
        prefill, chunks = longest * prompt / length, batch_size * prompt / (size - (batch_size - 1))
        gain = (prefill + decodes * decode_only) / (chunks * hybrid)
        profiles.append(ChunkProfile(size, prefill, decode_only, hybrid, gain))
    return profiles


def choose_chunk_sizes(llm: "LLM", length: int, batch_size: int) -> list[int]:
    """The chunk sizes to measure, the best first; prints why."""
    profiles, table = profile_chunk_sizes(llm, length, batch_size), []
    for profile in profiles:
        seconds = (profile.prefill, profile.decodes, profile.hybrid)
        times = [f"{1e3 * value:.3g}" for value in seconds]
        table.append([profile.chunk_size, *times, f"{profile.gain:.3f}"])
    title = (
        "Profile of single iterations, ms, and the gain that they would make at P:D = C/(B-1) - 1,"
        f" L = {length}, B = {batch_size}"
    )
    header = ["C", "B prompts", "B decodes", "chunk and B-1 decodes", "gain"]
    print_table(header, table, title)
    chosen = best_and_neighbour(profiles)
    beside = "".join(f", and C = {size} beside it" for size in chosen[1:])
    print(f"\nmeasured below: C = {chosen[0]}, which looks best{beside}")
    return chosen


SHAPE = {  # flags of the two functions below
    "max_length": Flag("tokens of a request, prompt and decodes", 512, 128, measure=True),
    "max_batch_size": Flag("requests in a batch", 6, 4, measure=True),
    "chunk_size": Flag(
        "token budgets, each at P:D around the balance of the first",
        measure=True,
        shown="profiled",
        several=True,
    ),
}


def check_shape(
    max_length: int = 512,
    max_batch_size: int = 6,
    chunk_size: Sequence[int] | None = None,
    **_: object,
) -> None:
    """Raises UserError about these flags before anything runs."""
    for flag, value, why in (
        ("max-batch-size", max_batch_size, "a chunk needs decodes to carry"),
        ("max-length", max_length, "one prompt token and one decode"),
    ):
        if value < 2:
            raise UserError(f"--{flag} is {value}; it must be at least 2: {why}")
    smallest = min(chunk_size or [max_batch_size])
    if smallest < max_batch_size:
        raise UserError(
            f"--chunk-size: {smallest} is smaller than --max-batch-size {max_batch_size}: decodes"
            " would fill the chunk"
        )


def around_peak(
    llm: "LLM | None",
    quick: bool,
    max_length: int,
    max_batch_size: int,
    chunk_size: Sequence[int] | None,
    **_: object,
) -> tuple[int, int, list[float], Sequence[int]]:
    """L, B, places and chunk sizes: given ones, or what the LLM profiles, and one beside it.

    The places are P:D at half, once and twice where the first gains most; quick: at once alone.
    """
    sizes = chunk_size or choose_chunk_sizes(llm, max_length, max_batch_size)
    peak, parts = balance(sizes[0], max_batch_size), [1] if quick else [0.5, 1, 2]
    pairs = {split(max_length, part * peak) for part in parts}
    places = sorted(prompt / decodes for prompt, decodes in pairs)
    return max_length, max_batch_size, places, list(dict.fromkeys(sizes))


def best_and_neighbour(profiles: Sequence[ChunkProfile]) -> list[int]:
    """The two chunk sizes worth minutes of measuring.

    They are the one that looks best, and the better of the next smaller and the next larger.
    """
    best = max(range(len(profiles)), key=lambda i: profiles[i].gain)
    beside = [profile for i, profile in enumerate(profiles) if abs(i - best) == 1]
    return [
        profiles[best].chunk_size,
        *[max(beside, key=lambda profile: profile.gain).chunk_size for _ in beside[:1]],
    ]
