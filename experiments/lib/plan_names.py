"""What the user of plan.py names: a GPU, requests. Raises UserError where it is none."""

import math
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batch import Request
from command.checks import UserError, did_you_mean, lookup
from configs import GPU, GPUS
from experiments.lib.papers import ARXIV, CHAT, read_whole
from loading.requests import short_enough
from serving.anchor import lengths_of
from serving.calibration import LENGTH, CalibratedModel
from serving.comparison import Demand
from serving.planner import BUDGETS, SMALL_BUDGETS, Replica
from serving.traffic import Fixed, busy_times, make_requests, poisson

HERE = "here"  # --gpu: this machine

DATASETS = {data.name: data for data in (CHAT, ARXIV)}
NOT_LOAD = ("tbt_slo", "ttft_slo", "slo", "attainment", "dollars_per_gpu_hour", "rate")
PAIR = re.compile(r"([0-9]{1,7}):([0-9]{1,7})")


def gpu_of(options: Namespace) -> tuple[GPU, str]:
    """The GPU, and the name of the one whose constants it takes.

    One of --gpu-spec is like the GPU of the table that is nearest to it by FLOPS and bandwidth.
    """
    if options.gpu_spec is None:
        gpu = lookup(GPUS, options.gpu or "a100-80gb", "GPU")
        return gpu, gpu.name
    if options.gpu is not None:
        raise UserError("--gpu and --gpu-spec exclude each other: give one of them")
    memory, teraflops, gigabytes = options.gpu_spec
    peak, bandwidth = 1e12 * teraflops, 1e9 * gigabytes

    def far(gpu: GPU) -> float:
        return abs(math.log(gpu.peak / peak)) + abs(math.log(gpu.bandwidth / bandwidth))

    near = min((gpu for gpu in GPUS.values() if not gpu.measured), key=far)
    sizes = {"memory": 1e9 * memory, "peak": peak, "bandwidth": bandwidth}
    return replace(near, name="gpu-spec", source="--gpu-spec", card=0.0, **sizes), near.name


def requests_of(options: Namespace) -> tuple[str, list[Request], bool]:
    """The traffic's name, its requests, and whether they are of a file.

    A file goes before a word of the same name. With an anchor, the default is its requests.
    """
    if options.anchor and not options.requests_file:
        known, arrivals = lengths_of(options.anchor), poisson(options.requests, 1.0, options.seed)
        lengths = [known[i % len(known)] for i in range(options.requests)]
        return (
            options.anchor.name,
            [
                Request(i, range(prompt), output, arrival=arrivals[i])
                for i, (prompt, output) in enumerate(lengths)
            ],
            False,
        )
    path = options.requests_file or Path(CHAT.name)
    word, count = str(path), options.requests
    if not path.exists() and word in DATASETS:
        return word, DATASETS[word].requests(count, seed=options.seed), False
    if not path.exists() and (pair := PAIR.fullmatch(word)):
        prompt, output = (Fixed(int(size)) for size in pair.groups())
        return word, make_requests(poisson(count, 1.0, options.seed), prompt, output), False
    if not path.exists() and not path.suffix:
        raise UserError(
            f"--requests-file {word!r} is no file: give a CSV, JSON or JSONL file,"
            f" {', '.join(DATASETS)}, or P:N tokens, such as 1000:200{did_you_mean(word, DATASETS)}"
        )
    return path.name, read_whole(path), True


def that_fit(requests: Sequence[Request], replica: Replica, budget: int) -> list[Request]:
    """Without those that are too long for the model or the cache. Says how many these are.

    budget: the smallest that is tried. It leaves the most cache.
    """
    model = replica.cost.model
    most = model.longest
    if isinstance(replica.cost, CalibratedModel):
        most = min(most, LENGTH)
    most = min(most, replica.holds(budget) or most)
    whose = "--cache-tokens" if most == replica.cache_tokens else f"{model.name} here"
    return short_enough(requests, most, whose)


def check_together(options: Namespace) -> None:
    """Raises UserError for flags that mean nothing beside others, or need others."""
    load = options.only == "load"
    if load and not (options.chunk_size and (options.concurrency or options.offline)):
        raise UserError("--only load needs --chunk-size, and --concurrency or --offline")
    if options.anchor_chunk_size and not options.anchor:
        raise UserError("--anchor-chunk-size needs --anchor")
    if options.concurrency and options.pp > 1:
        raise UserError(f"--concurrency and --pp {options.pp}: a closed loop needs --pp 1")
    pairs = [("policy", f"--only {options.only}")] if options.only else []
    pairs += [(name, "--only load") for name in NOT_LOAD if load]
    pairs += [("memory_utilization", "--cache-tokens")] if options.cache_tokens else []
    for name, other in pairs:
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} and {other} exclude each other: leave one out")
    own = [(options.out / f"plan{end}").resolve() for end in (".csv", ".png")]
    for flag, path in (("--anchor", options.anchor), ("--requests-file", options.requests_file)):
        if path and path.resolve() in [*own, *([options.json.resolve()] if options.json else [])]:
            raise UserError(
                f"{flag} {path}: the plan would write there; give --json or --out another name"
            )
    if options.json and options.json.resolve() in own:
        raise UserError(f"--json {options.json}: the plan writes its own file there; name another")


def budgets_tried(options: Namespace) -> list[int]:
    sizes = SMALL_BUDGETS if options.gpu == HERE else BUDGETS
    return sorted(set(options.chunk_size or sizes[:: 3 if options.quick else 1]))


def demands_of(options: Namespace, requests: Sequence[Request], from_file: bool) -> list[Demand]:
    """The rate of the user's own trace, if it has times; and that of --rate, if it is given."""
    found, times = [], busy_times(requests) if from_file else None
    gaps = "even gaps: the file has no times" if from_file else "Poisson arrivals"
    if times:
        gaps = "the gaps of your trace, all stretched or shrunk alike"
        found.append(Demand("your trace", *times, gaps))
    if options.rate:
        found.append(Demand("you expect", options.rate, None, gaps))
    return found
