"""What `distributed.py --apart` checks, prints and writes of two halves."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from apart.real import ApartLLM
from command.checks import UserError
from engine import LLM, RequestOutput
from loop import Loop
from simulate import run_all

OWN = ("decode_policy", "decode_chunk_size", "one_engine")  # flags


def check(args: Namespace) -> None:
    """Find flags that do not fit together."""
    for name in ("micro_batches", "perfetto") if args.apart else OWN:
        if getattr(args, name):
            does = "has no" if args.apart else "is needed for"
            raise UserError(f"--apart {does} --{name.replace('_', '-')}")


def summary(llm: ApartLLM, outputs: Sequence[RequestOutput]) -> dict:
    """A run as JSON: moments in s after it began, on one clock; and each iteration and fetch."""
    fleet, size = llm.fleet, llm.kv_values * llm.dtype.itemsize
    names, lives = (llm.policy, llm.decode_policy), fleet.requests.lives.values()
    return {
        "seconds": max(life.tokens[-1] for life in lives),
        "halves": [
            {"policy": name, "iterations": list(map(asdict, engine.iterations))}
            for name, engine in zip(names, fleet.engines, strict=True)
        ],
        "fetches": [asdict(each) | {"bytes": each.tokens * size} for each in fleet.fetches],
        "requests": list(map(asdict, lives)),
        "tokens": [output.token_ids for output in outputs],
    }


def report(llm: ApartLLM, outputs: Sequence[RequestOutput]) -> None:
    """Print a run's numbers."""
    run, engines = summary(llm, outputs), llm.fleet.engines
    for name, half, each in zip(("prefill", "decode"), run["halves"], engines, strict=True):
        busy = 100 * sum(step.seconds for step in each.iterations) / run["seconds"]
        what = f"{half['policy']}, {len(each.iterations)} iterations, {each.num_prefill_tokens}"
        print(f"{name:10}{what} prefill tokens, {each.num_decodes} decodes, {busy:.0f} % busy")
    print(f"run       {len(outputs)} requests in {run['seconds']:.2f} s")
    if fetches := run["fetches"]:
        size = sum(each["bytes"] for each in fetches) / 1e6
        wait = 1e3 * median(each["start"] - each["asked"] for each in fetches)
        way = 1e3 * median(each["end"] - each["start"] for each in fetches)
        print(f"fetches   {len(fetches)}, {size:.2f} MB of keys and values")
        print(f"a fetch   waits {wait:.2f} ms, and takes {way:.2f} ms (medians)")


def compare(llm: ApartLLM, prompts: Sequence, params: object, outputs: Sequence) -> None:
    """Run the same prompts on one engine, in this process. A UserError if a token differs."""
    llm.cache.reset()
    requests = llm._requests(prompts, params, None)
    with llm.surroundings():
        run_all(Loop(LLM._scheduler(llm), LLM.make_executor(llm)), requests)
    for request, output in zip(requests, outputs, strict=True):
        same = request.output[: len(output.token_ids)] == output.token_ids
        if not same or request.finish_reason != output.finish_reason:
            raise UserError(f"prompt {request.request_id}: one engine gives other tokens")
    print("alone     one engine gives the same tokens")
