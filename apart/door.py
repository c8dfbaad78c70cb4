"""What `distributed.py --apart` checks, prints and writes of two halves."""

import statistics
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from apart.real import ApartLLM
from command.checks import UserError
from engine import LLM, RequestOutput
from loop import Loop
from scheduler import make_scheduler

HALVES = ("prefill half", "decode half")
OWN = ("decode_policy", "decode_chunk_size", "one_engine")  # flags


def check(args: Namespace, policies: Iterable[str]) -> None:
    """Find mistakes before any process starts. policies: of the prefill half."""
    foreign = ("micro_batches", "perfetto") if args.apart else OWN
    for name in foreign:
        if getattr(args, name):
            does = "has no" if args.apart else "is needed for"
            raise UserError(f"--apart {does} --{name.replace('_', '-')}")
    if args.apart and args.stages != 2:
        raise UserError(f"--apart has two halves, and --stages is {args.stages}")
    for policy in (*policies, args.decode_policy or args.policy) if args.apart else ():
        make_scheduler(policy, args.max_batch_size, args.chunk_size)


def summary(llm: ApartLLM, outputs: Sequence[RequestOutput]) -> dict:
    """A run as JSON: moments in s after it began, on one clock; and each iteration and fetch."""
    fleet = llm.fleet
    return {
        "seconds": seconds_of(llm),
        "halves": [
            {"policy": policy, "iterations": [asdict(each) for each in engine.iterations]}
            for policy, engine in zip((llm.policy, llm.decode_policy), fleet.engines, strict=True)
        ],
        "fetches": [asdict(each) | {"bytes": bytes_of(llm, each.tokens)} for each in fleet.fetches],
        "requests": [asdict(life) for life in fleet.requests.lives.values()],
        "tokens": [output.token_ids for output in outputs],
    }


def seconds_of(llm: ApartLLM) -> float:
    ends = [life.tokens[-1] for life in llm.fleet.requests.lives.values()]
    return max(ends, default=0.0)


def bytes_of(llm: ApartLLM, tokens: int) -> int:
    """Of keys and values."""
    return tokens * llm.kv_values * llm.dtype.itemsize


def report(llm: ApartLLM, outputs: Sequence[RequestOutput]) -> None:
    """Print a run's numbers."""
    fleet, seconds = llm.fleet, seconds_of(llm)
    policies = llm.policy, llm.decode_policy
    for name, policy, engine in zip(HALVES, policies, fleet.engines, strict=True):
        busy = sum(each.seconds for each in engine.iterations) / seconds
        print(
            f"{name:14}{policy}, {len(engine.iterations)} iterations,"
            f" {engine.num_prefill_tokens} prefill tokens, {engine.num_decodes} decodes,"
            f" {100 * busy:.0f} % busy"
        )
    dtype = str(llm.dtype).removeprefix("torch.")
    where = f"{llm.config.name} on {llm.device.type}, {dtype}"
    print(f"model         {where}, attention by {llm.attention}")
    print(f"run           {len(outputs)} requests in {seconds:.2f} s")
    if fetches := fleet.fetches:
        size = bytes_of(llm, sum(each.tokens for each in fetches)) / 1e6
        wait, way = (
            1e3 * statistics.median(times)
            for times in zip(*((f.start - f.asked, f.end - f.start) for f in fetches), strict=True)
        )
        print(
            f"fetches       {len(fetches)}, {size:.2f} MB of keys and values; median wait"
            f" {wait:.2f} ms, median way {way:.2f} ms"
        )


def compare(
    llm: ApartLLM, prompts: Sequence, params: object, outputs: Sequence[RequestOutput]
) -> None:
    """Run the same prompts on one engine, in this process. A UserError if a token differs."""
    llm.cache.reset()
    loop = Loop(LLM._scheduler(llm), LLM.make_executor(llm))
    requests = llm._requests(prompts, params, None)
    for request in requests:
        loop.add(request)
    with llm.surroundings():
        loop.run()
    for request, output in zip(requests, outputs, strict=True):
        if request.output != output.token_ids:
            raise UserError(f"prompt {request.request_id}: one engine gives other tokens")
    print("one engine    gives the same tokens")
