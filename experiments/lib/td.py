"""TD-Pipe's experiments: its nodes, models, baselines and workload (arXiv 2506.10470, Sec 4.1).

    TP+SB     tensor parallelism, prefills and decodes in separate batches     vllm_v0:N
    TP+HB     tensor parallelism, hybrid batches of chunks and decodes         sarathi_serve
    PP+SB     a pipeline, separate batches                                     vllm_v0:N
    PP+HB     a pipeline, hybrid batches                                       sarathi_serve
    PP+ahead  the same, as engines do it today (more/pipeline/one_pool.py)     sarathi_serve
    TD-Pipe   a pipeline, phases                                               td_pipe

Every system has the same GPUs, memory and requests, all there at the start. vLLM 0.5.3, which the
paper compares with, ran one engine per stage, each with its own share of requests and of memory: so
do PP+SB and PP+HB. It capped the tokens of a batch of prefills at the model's longest sequence: N
is `longest` of the node. The paper's requests are 5,000 of ShareGPT. Ours have the lengths of
Azure's public conversation trace of 2023 (azure_conv_2023_sample.csv: 2,000 requests with prompts
of at most 1024 tokens, evenly spaced; Microsoft, CC-BY 4.0, github.com/Azure/AzurePublicDataset).

What reads lengths needs numpy. A browser has none, and runs the rest: so the import stands in the
function.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from batch import Request
from command.checks import UserError
from configs import GPUS, MODELS
from configs.hosts import Host
from costmodel import CostModel, make_batch, tokens_that_fit
from experiments.lib.colours import COLOURS
from experiments.lib.common import ROOT
from more.pipeline import PipelineTrace, simulate_pipeline
from more.pipeline.phases import Rules
from more.simulate import make_cost_model, simulate

Lengths = Sequence[tuple[int, int]]  # prompt and output tokens of each request

SAMPLE = ROOT / "experiments" / "azure_conv_2023_sample.csv"
# tokens of a prompt (TD-Pipe, Sec 4.1), and with its output
LONGEST = 1024
LONGEST_IN_ALL = 2048
# vLLM 0.5.3's max_num_seqs, and its token budget with chunks
BATCH_SIZE = 256
BUDGET = 512
COUNT = 2000  # requests of a run
# The other reading of a node's measured all-reduce (docs/pipelines.md).
OTHER_READING = {"pcie-l20-node": "pcie-l20-node-algorithm", "pcie-a100-node": "pcie-a100-node-bus"}
# The colour of each system and node in every picture.
LOOKS = {
    "TP+SB": COLOURS["sky"],
    "TP+HB": COLOURS["blue"],
    "PP+SB": COLOURS["orange"],
    "PP+HB": COLOURS["vermilion"],
    "PP+ahead": COLOURS["purple"],
    "TD-Pipe": COLOURS["green"],
    "SB": COLOURS["sky"],  # of one GPU, which is TP, too
    "HB": COLOURS["blue"],
    "ceiling": COLOURS["black"],
    "L20 + 13B": COLOURS["purple"],
    "L20 + 32B": COLOURS["orange"],
    "A100 + 32B": COLOURS["black"],
    "A100 + 70B": COLOURS["sky"],
}
# Their policies; separate batches are capped with the node's `longest`.
BASELINES = {
    "TP+SB": "vllm_v0",
    "TP+HB": "sarathi_serve",
    "PP+SB": "vllm_v0",
    "PP+HB": "sarathi_serve",
}
AHEAD = "PP+ahead"  # not in the paper
RIVALS = BASELINES | {AHEAD: "sarathi_serve"}
OURS = "TD-Pipe"
SYSTEMS = (*RIVALS, OURS)
# Ids of TD-Pipe's largest throughput over theirs (Fig 11), in paper_numbers.csv.
PUBLISHED = {
    "TP+SB": "td_vs_tp_sb",
    "TP+HB": "td_vs_tp_hb",
    "PP+SB": "td_vs_pp_sb",
    "PP+HB": "td_vs_pp_hb",
}


@dataclass(frozen=True)
class Node:
    """A model on GPUs of one machine. link: joins them; None: the GPU's own.

    longest: tokens of the model's longest sequence, as published with its weights. (Sarathi-Serve
    stretched llama2-70b's, and so has `MODELS`.) memory: times the keys and values that really fit.
    """

    name: str
    model: str
    gpu: str
    software: str  # whose constants the cost model takes
    link: str | None = None  # of an all-reduce
    longest: int = 0
    gpus: int = 4
    memory: float = 1.0

    @property
    def cost_model(self) -> CostModel:
        """Of one GPU."""
        return make_cost_model(self.model, self.gpu, 1, self.link, self.software)

    @property
    def cache_tokens(self) -> int:
        """Of all GPUs together; 0 where the model does not fit them."""
        return int(self.memory * tokens_that_fit(MODELS[self.model], GPUS[self.gpu], self.gpus))

    @property
    def hardware(self) -> str:
        return f"{self.gpus} x {self.gpu}"

    def on(self, gpus: int) -> "Node":
        return replace(self, gpus=gpus)


L20 = ("l20", "vllm-0.5.3", "pcie-l20-node")
A100 = ("a100-80gb-pcie", "vidur-2024", "pcie-a100-node")
NODES = {
    node.name: node
    for node in (
        Node("L20 + 13B", "llama2-13b", *L20, 4096),
        Node("L20 + 32B", "qwen2.5-32b", *L20, 32768),
        Node("A100 + 32B", "qwen2.5-32b", *A100, 32768),
        Node("A100 + 70B", "llama2-70b", *A100, 4096),
    )
}


@dataclass(frozen=True)
class Run:
    """What came of a system. trace: None with tensor parallelism. Times in seconds."""

    seconds: float
    output_tokens: int
    recomputed: int  # preemptions of all requests
    trace: PipelineTrace | None

    @property
    def throughput(self) -> float:
        """Output tokens/s."""
        return self.output_tokens / self.seconds

    @property
    def phases(self) -> int:
        """Of TD-Pipe, of both kinds together."""
        return sum(1 for _ in groupby(self.trace.history, key=lambda row: row[2]))


def azure(count: int = COUNT, seed: int = 0, path: Path | None = None) -> Lengths:
    """Lengths of the sample, in order; past its end, drawn from it again. path: another file."""
    lengths = usable(path or SAMPLE)
    more = random.Random(seed).choices(lengths, k=max(0, count - len(lengths)))
    return (lengths + more)[:count]


@cache
def usable(path: Path) -> Lengths:
    """Of a file, without what the paper leaves out, too. Raises UserError if nothing remains."""
    from experiments.lib.papers import read_whole

    every = [(len(r.prompt), r.max_tokens) for r in read_whole(path)]
    kept = [pair for pair in every if pair[0] <= LONGEST and sum(pair) <= LONGEST_IN_ALL]
    bounds = f"at most {LONGEST} prompt tokens, and at most {LONGEST_IN_ALL} with the output"
    if not kept:
        raise UserError(f"{path}: no request has {bounds}")
    if len(kept) < len(every):
        print(f"{path}: {len(kept)} of {len(every)} requests are taken: those of {bounds}")
    return kept


def stretched(lengths: Lengths, mean: int = 0) -> Lengths:
    """All outputs times one factor, to this mean; prompts stay. mean 0: outputs stay, too."""
    factor = mean * len(lengths) / sum(output for _, output in lengths) if mean else 1
    return [(prompt, max(1, round(factor * output))) for prompt, output in lengths]


def make(lengths: Lengths) -> list[Request]:
    return [Request(i, range(prompt), output) for i, (prompt, output) in enumerate(lengths)]


def policy_of(system: str, node: Node) -> str:
    """Its own, with vLLM's cap on a batch of prefills where it has such batches."""
    policy = RIVALS.get(system, "td_pipe")
    return f"{policy}:{node.longest}" if policy == "vllm_v0" else policy


def run(
    node: Node,
    system: str,
    lengths: Lengths,
    budget: int = BUDGET,
    host: str | Host = "none",
    **options: object,
) -> Run:
    """One of RIVALS, or TD-Pipe.

    In a pipeline, each GPU of the node is a stage, and as many micro-batches are in flight.
    options: of `simulate_pipeline`: rules of td_pipe, deal, memory, keep.
    """
    requests = make(lengths)
    common = {"policy": policy_of(system, node), "chunk_size": budget, "host": host}
    common |= {"max_batch_size": BATCH_SIZE, "link": node.link, "software": node.software}
    if system.startswith("TP"):  # all GPUs of the node share each layer
        common |= {"tp": node.gpus, "cache_tokens": node.cache_tokens} | options
        trace = None
        seconds = simulate(requests, node.model, node.gpu, **common).seconds
    else:
        own = {}
        if system in BASELINES:
            own = {"deal": "turns", "memory": "split"}
        elif system == AHEAD:
            own = {"deal": "ahead"}
        common |= {"memory": "pool", "stages": node.gpus, "hop": "pcie4"} | own | options
        shares = node.gpus if common["memory"] == "split" else 1
        memory = node.cache_tokens // shares
        trace = simulate_pipeline(requests, node.model, node.gpu, cache_tokens=memory, **common)
        seconds = trace.seconds
    tokens = sum(len(r.output) for r in requests)
    return Run(seconds, tokens, sum(r.preemptions for r in requests), trace)


def packed(prompts: Sequence[int]) -> Iterator[list[int]]:
    """Prompt tokens of each prefill micro-batch, first come first served (see `Rules.pack`)."""
    batch: list[int] = []
    for prompt in prompts:
        if batch and len(batch) * max(batch) >= Rules.pack:
            yield batch
            batch = []
        batch.append(prompt)
    yield batch


def ceiling(node: Node, lengths: Lengths) -> float:
    """Output tokens/s that no schedule of phases exceeds on this node.

    All S stages work all the time. Prefills cost what TD-Pipe's micro-batches of whole prompts do.
    Decodes take all of the memory at every step: with c, the mean tokens that a request holds while
    it decodes, S micro-batches of b requests hold S * b * c tokens. On average b is at most memory
    / (S * c), and at most B. Single batches may be larger: the cheapest mix of two sizes counts.
    """
    cost = node.cost_model
    stages = node.gpus
    prefill = sum(
        cost.seconds(make_batch([(0, prompt, prompt) for prompt in batch]))
        for batch in packed([prompt for prompt, _ in lengths])
    )
    decodes = sum(output - 1 for _, output in lengths)
    held = sum((output - 1) * (prompt + output / 2) for prompt, output in lengths)
    context = held / decodes if decodes else 1.0
    most = min(BATCH_SIZE, node.cache_tokens / (stages * context))
    times = {}  # of n decodes
    for n in range(1, BATCH_SIZE + 1):
        batch = make_batch(decodes=n, context=2)
        attention = cost.decode_attention(n, n * context)
        times[n] = cost.seconds(batch) - cost.attention(batch) + attention
    smaller = range(1, int(most) + 1)
    larger = range(int(most) + 1, BATCH_SIZE + 1)
    each = [times[n] / n for n in smaller]  # seconds of a decode
    for n in smaller:
        for m in larger:
            mixed = times[n] + (times[m] - times[n]) * (most - n) / (m - n)
            each.append(mixed / most)
    decode = decodes * min(each)
    return stages * sum(output for _, output in lengths) / (prefill + decode)
