"""Ways to fill the micro-batches of a pipeline, by name: every policy of scheduler.py, and TD-Pipe.

A policy of scheduler.py decides for one micro-batch at a time. Those of PIPELINE_POLICIES decide
for all of them together. So commands of one stage refuse their names.
"""

from collections.abc import Callable
from dataclasses import replace

from configs import UserError, check_whole, lookup
from pipeline.micro_batches import MEMORIES, MicroBatches
from pipeline.phases import Rules
from pipeline.predictors import named
from pipeline.td_pipe import TDPipe
from scheduler import POLICIES, make_scheduler

PIPELINE_POLICIES: dict[str, type[MicroBatches]] = {"td_pipe": TDPipe}


MOST_MICRO_BATCHES = 4096  # far more than stages; each has a scheduler


def unmeasured(rows: int) -> float:
    """Stands for `seconds_of` where micro-batches are made only to check options."""
    return float(rows)


def is_for_pipelines(policy: str) -> bool:
    return policy.partition(":")[0] in PIPELINE_POLICIES


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
    **options: object,
) -> MicroBatches:
    """`count` micro-batches of up to `max_batch_size` requests each, under one policy.

    cache_tokens: of one micro-batch; of all together, if memory is "pool".
    options: deal, refill_every (see `MicroBatches`).
    seconds_of, rules: of td_pipe (see `TDPipe`). Its memory is one pool in any case: "split" only
    says that it is `count` times cache_tokens. "td_pipe:PREDICTOR" names its predictor.
    """
    check_whole("micro_batches", count, most=MOST_MICRO_BATCHES)
    name, colon, option = str(policy).partition(":")
    lookup({**POLICIES, **PIPELINE_POLICIES, "baseline": None}, name, "policy")
    lookup(dict.fromkeys(MEMORIES), memory, "memory")
    if rules is not None and name not in PIPELINE_POLICIES:
        raise UserError(f"rules are given, and policy {policy!r} takes none: td_pipe does")
    if name not in PIPELINE_POLICIES:
        each = [
            make_scheduler(policy, max_batch_size, chunk_size, cache_tokens) for _ in range(count)
        ]
        return MicroBatches(each, stages, memory=memory, **options)
    for what, usual in (("deal", "queue"), ("refill_every", 1)):
        if options.get(what, usual) != usual:
            raise UserError(f"policy {name} has one queue: it takes no {what} {options[what]!r}")
    if seconds_of is None:
        raise UserError(f"policy {name} needs seconds_of: what an iteration of n rows takes")
    rules = rules or Rules()
    if colon:
        rules = replace(rules, predict=named(option))
    if memory == "split" and cache_tokens is not None:
        check_whole("cache_tokens", cache_tokens)
        cache_tokens *= count
    return PIPELINE_POLICIES[name](seconds_of, stages, max_batch_size, cache_tokens, count, rules)
