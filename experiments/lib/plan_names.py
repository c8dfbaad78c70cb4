"""What the user of plan.py names: a GPU, requests, an SLO. Raises UserError where it is none."""

import math
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

from batch import Request
from command.checks import LONGEST_WORD, UserError, check_number, did_you_mean, lookup
from command.flags import ABOVE_ZERO, Flag
from configs import GPU, GPUS, LINKS, Link
from experiments.lib.papers import ARXIV, CHAT, read_whole
from more.loading.priced import folder_of
from more.loading.requests import short_enough
from more.serving.anchor import read_load
from more.serving.capacity import STRICT, Bound, Deployment, Slo
from more.serving.comparison import Demand
from more.serving.planner import BUDGETS
from more.serving.traffic import Count, Fixed, busy_times, make_requests, poisson

DATASETS = {data.name: data for data in (CHAT, ARXIV)}
JOINS = {name: link for name, link in LINKS.items() if isinstance(link, Link)}  # GPUs of one node
PAIR = re.compile(r"([1-9][0-9]{0,6}):([1-9][0-9]{0,6})")


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
    peak = 1e12 * teraflops
    bandwidth = 1e9 * gigabytes

    def far(gpu: GPU) -> float:
        return abs(math.log(gpu.peak / peak)) + abs(math.log(gpu.bandwidth / bandwidth))

    near = min((gpu for gpu in GPUS.values() if not gpu.measured), key=far)
    sizes = {"memory": 1e9 * memory, "peak": peak, "bandwidth": bandwidth}
    return replace(near, name="gpu-spec", source="--gpu-spec", card=0.0, **sizes), near.name


def link_of(options: Namespace, gpu: GPU) -> Link:
    """The GPU's own; or one of JOINS; or one of this bus bandwidth (nccl-tests prints it, in GB/s).

    The last has the latency of the GPU's own.
    """
    own = JOINS[gpu.link]
    word = options.link
    try:
        rate = float(word or "none")
    except ValueError:
        return lookup(JOINS, word, "--link") if word else own
    check_number("--link", rate, 0.01, 1e4)
    return Link("yours", 1e9 * rate, own.latency, "as you say", measured=True)


def requests_of(options: Namespace) -> tuple[str, list[Request], bool]:
    """The traffic's name, its requests, and whether they are of a file.

    A file goes before a word of the same name. With an anchor, the default is its requests.
    """
    count = options.requests
    if options.anchor and not options.requests_file:
        arrivals = poisson(count, 1.0, options.seed)
        lengths = read_load(options.anchor).lengths
        turns = enumerate(zip(arrivals, cycle(lengths), strict=False))
        made = [Request(i, range(p), n, arrival=arrival) for i, (arrival, (p, n)) in turns]
        return options.anchor.name, made, False
    path = options.requests_file or Path(CHAT.name)
    if path.exists():
        return path.name, read_whole(path, partial(counter_of, options.model)), True
    word = str(path)
    if word in DATASETS:
        return word, DATASETS[word].requests(count, seed=options.seed), False
    if pair := PAIR.fullmatch(word):
        prompt, output = (Fixed(int(size)) for size in pair.groups())
        return word, make_requests(poisson(count, 1.0, options.seed), prompt, output), False
    if not path.suffix:
        raise UserError(
            f"--requests-file {word!r} is no file: give a CSV, JSON or JSONL file,"
            f" {', '.join(DATASETS)}, or P:N tokens, such as 1000:200{did_you_mean(word, DATASETS)}"
        )
    return path.name, read_whole(path), True


def counter_of(model: str) -> Count | None:
    """Counts the tokens of a text, if this model is on the disk, with its tokenizer."""
    folder = folder_of(model)
    if folder is None:
        return None
    from more.loading.tokenizer import load_tokenizer  # here: a plan needs none of its packages

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text))


def that_fit(requests: Sequence[Request], replica: Deployment, budget: int) -> list[Request]:
    """Without those that are too long for the model or the cache. Says how many these are.

    budget: the smallest that is tried. It leaves the most cache.
    """
    model = replica.cost_model.model
    most = min(model.longest, replica.holds(budget))
    whose = "--cache-tokens" if most == replica.cache else f"{model.name} here"
    return short_enough(requests, most, whose)


def check_together(options: Namespace) -> None:
    """Raises UserError for flags that exclude each other."""
    if options.memory_utilization and options.cache_tokens:
        raise UserError("--memory-utilization and --cache-tokens exclude each other: leave one out")


def budgets_tried(options: Namespace) -> list[int]:
    return sorted(set(options.chunk_size or BUDGETS[:: 3 if options.quick else 1]))


def demands_of(options: Namespace, requests: Sequence[Request], from_file: bool) -> list[Demand]:
    """The rate of the user's own trace, if it has times; and that of --rate, if it is given."""
    found = []
    times = busy_times(requests) if from_file else None
    gaps = "even gaps: the file has no times" if from_file else "Poisson arrivals"
    if times:
        gaps = "the gaps of your trace, all stretched or shrunk alike"
        found.append(Demand("your trace", *times, gaps))
    if options.rate:
        found.append(Demand("you expect", options.rate, None, gaps))
    return found


FIRST = 2.0  # s: later first tokens are no service, where nobody says more (as MAX_DELAY)
# what is expected of latencies
BOUND = re.compile(r"(tbt|ttft|tpot|e2e):p(50|90|95|99):([^:]+)")


def bound_of(text: str) -> tuple[str, int, float]:
    """The name, the percent and the milliseconds of a --slo."""
    found = BOUND.fullmatch(text)
    milliseconds = ABOVE_ZERO.read(found[3] if found else "")
    if milliseconds is None:
        raise ArgumentTypeError(
            f"{text[:LONGEST_WORD]!r} is not NAME:pP:MS, such as tpot:p95:30. It takes"
            " tbt, tpot, ttft or e2e; p50, p90, p95 or p99; and a number above 0"
        )
    return found[1], int(found[2]), milliseconds


def slo_of(options: Namespace, decode_iteration: float, prompt: float) -> Slo:
    """What --slo and --tbt-slo say, and a bound on what they leave open.

    Without one on the TBT or the TPOT: STRICT. Without one on the TTFT or the E2E: FIRST, or STRICT
    times the seconds of a long prompt alone, where that is more.
    """
    given = list(options.slo or ())
    given += [("tbt", 99, options.tbt_slo)] if options.tbt_slo else []
    named = {name for name, *_ in given}
    if not {"tbt", "tpot"} & named:
        given.insert(0, ("tbt", 99, 1e3 * STRICT * decode_iteration))
    if not {"ttft", "e2e"} & named:
        given.append(("ttft", 90, 1e3 * max(FIRST, STRICT * prompt)))
    return Slo(tuple(Bound(name, percent, limit / 1e3) for name, percent, limit in given))


SLO_FLAGS = {
    "slo": Flag(
        "bound, in ms, of ttft, tpot (a request's mean time per output token), e2e, or tbt"
        " (single times between tokens), at p50, p90, p95 or p99: tpot:p95:30",
        shown="--tbt-slo",
        repeated=True,
        type=bound_of,
    ),
    "tbt_slo": Flag(
        "short for --slo tbt:p99:MS",
        shown="5 decode iterations, unless --slo bounds the tbt or the tpot",
    ),
}
