"""Ways to fill the micro-batches of a pipeline, by name: every policy of scheduler.py, and TD-Pipe.

A policy of scheduler.py decides for one micro-batch at a time. TD-Pipe decides for all of them
together. So commands that run one stage refuse its name.
"""

from collections.abc import Callable
from dataclasses import replace

from batch import Batch
from command.checks import UserError, check_whole, lookup, shown
from more.pipeline.micro_batches import DEALS, MEMORIES, MicroBatches
from more.pipeline.one_pool import OnePool
from more.pipeline.phases import Rules
from more.pipeline.predictors import named
from more.pipeline.td_pipe import TDPipe
from more.policies import FOR_PIPELINES
from scheduler import ALIASES, MOST_CACHED, POLICIES, make_scheduler, name_of

MOST_MICRO_BATCHES = 4096  # far more than stages; each has a scheduler


def unmeasured(rows: int) -> float:
    """A made-up `seconds_of`, for micro-batches that are made only to check options."""
    return float(rows)


def is_for_pipelines(policy: str) -> bool:
    return policy.partition(":")[0] in FOR_PIPELINES


def make_micro_batches(
    policy: str,
    count: int,
    stages: int,
    max_batch_size: int,
    chunk_size: int,
    cache_tokens: int | None = None,
    *,
    memory: str = "split",
    seconds_of: Callable[[int], float] | None = None,
    rules: Rules | None = None,
    cost: Callable[[Batch], float] | None = None,
    deal: str = "queue",
) -> MicroBatches:
    """`count` micro-batches of up to `max_batch_size` requests each, under one policy.

    cache_tokens: of one micro-batch; if memory is "pool", of all together.
    deal: see `MicroBatches`.
    seconds_of, rules: for td_pipe only (see `TDPipe`). td_pipe always has one pool of memory: with
    "split", the pool is `count` times cache_tokens. "td_pipe:PREDICTOR" names its predictor.
    cost: seconds of a batch through all stages, for policies that ask (`Scheduler.cost`).
    """
    check_whole("micro_batches", count, most=MOST_MICRO_BATCHES)
    name, colon, option = name_of(policy).partition(":")
    lookup(dict.fromkeys([*POLICIES, *FOR_PIPELINES, *ALIASES]), name, "policy")
    lookup(dict.fromkeys(MEMORIES), memory, "memory")
    if rules is not None and not is_for_pipelines(name):
        raise UserError(f"rules are given, but policy {name!r} takes none: only td_pipe does")
    lookup(dict.fromkeys(DEALS), deal, "deal")
    if not is_for_pipelines(name) and deal in ("any", "ahead"):
        tokens = cache_tokens
        if tokens and memory == "split":
            tokens *= count
        scheduler = make_scheduler(policy, max_batch_size * count, chunk_size, tokens)
        scheduler.cost = cost or scheduler.cost
        return OnePool(scheduler, stages, count, ahead=deal == "ahead")
    if not is_for_pipelines(name):
        scheduler = make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
        scheduler.cost = cost or scheduler.cost
        return MicroBatches(scheduler, count, stages, deal, memory)
    if deal != "queue":
        raise UserError(f"deal is {shown(deal)}; policy {name} has one queue: leave it out")
    if seconds_of is None:
        raise UserError(f"policy {name} needs seconds_of: a function, rows -> seconds")
    rules = rules or Rules()
    if colon:
        rules = replace(rules, predict=named(option))
    if memory == "split" and cache_tokens is not None:
        check_whole("cache_tokens", cache_tokens, most=MOST_CACHED)
        cache_tokens *= count
    return TDPipe(seconds_of, stages, max_batch_size, cache_tokens, count, rules)


def policy_names() -> str:
    """What `make_scheduler` takes, in words: the policies, their other names and their options."""
    others = {name: alias for alias, name in ALIASES.items()}
    words = {name: others.get(name, policy.example) for name, policy in POLICIES.items()}
    return ", ".join(f"{name} (or {word})" if word else name for name, word in words.items())
