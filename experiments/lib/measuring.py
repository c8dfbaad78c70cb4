"""The real engine on this machine: single batches, and whole workloads beside their baseline.

A machine drifts (frequency, neighbours). So what is compared runs in alternation, and medians are
taken, with the range beside them.

Whatever needs torch is imported inside the functions: the scripts import this module at their top,
and what they predict must run where torch is not installed.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from batch import Batch, Request
from command.checks import UserError
from loop import Result
from more.serving.calibration import cost_here, this_machine
from more.serving.steady import Workload
from timeline import Trace

if TYPE_CHECKING:  # see above
    import torch

    from executor import ModelExecutor
    from nano_sarathi import LLM, RequestOutput

LARGE = 2e9  # bytes of weights: models for CPUs have less
FOR_CPUS = "llama-0.2b"  # the default of --model
INSTEAD = "Give --model llama3.2-3b, or a larger one that fits"


def load_llm(options: argparse.Namespace, batch_size: int, length: int) -> "LLM":
    """The model to measure, with room for B requests of L tokens and a last output token.

    Policies of a user's own learn what a batch costs, where this machine was calibrated.
    """
    from nano_sarathi import LLM

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

    chosen = choose_device(device)
    config = find_model(model)[0]
    size = config.parameters * choose_dtype(dtype, chosen).itemsize
    if chosen.type == "cpu" and size > LARGE:
        said = f"{config.name} has {size / 1e9:.1f} GB of weights, and the device is a CPU"
        print(f"{said}: this may take hours", file=sys.stderr, flush=True)
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
    config = find_model(model)[0]
    dtype = choose_dtype(options.dtype, device)
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
    kept = llm.time_operators
    llm.time_operators = operators
    executor = llm.make_executor()  # the one of `llm.generate`: with CUDA graphs, where it has them
    llm.time_operators = kept

    def run(batch: Batch) -> Result:
        place(executor, batch)
        return executor.execute(batch)

    return run


# ---------------------------------------------------------------------------------- whole workloads


def prepare(
    llm: "LLM", requests: Sequence[Request], policy: str, chunk_size: int, operators: bool
) -> tuple[list, list, list]:
    """Set the policy; make up prompts of these lengths, their parameters and arrivals."""
    from sampling import SamplingParams

    llm.policy = policy
    llm.chunk_size = chunk_size
    llm.time_operators = operators
    vocabulary = llm.config.vocab_size
    prompts = [[(31 * r.request_id + 7 * j) % vocabulary for j in r.prompt] for r in requests]
    fixed = {"temperature": 0.0, "ignore_eos": True}
    params = [SamplingParams(max_tokens=r.max_tokens, tags=r.tags, **fixed) for r in requests]
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


def first_period(work: Workload, policy: str) -> tuple[int, int]:
    """`first` and `last` of the shortest window that holds a whole period.

    It is for runs that cost real time. Where all requests end together, as the baseline's do, the
    first B are like any others. Else slots fall free one by one from the first completion on. The
    window is then that of the next B, and 2 B + 1 requests keep all slots busy until it ends.
    """
    together = policy == "baseline" or (policy == "orca" and not work.staggered)
    return (0, work.batch_size) if together else (1, work.batch_size + 1)


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
