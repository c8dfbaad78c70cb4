"""TD-Pipe's experiments: its nodes, models, baselines and workload (arXiv 2506.10470, Sec 4.1).

    TP+SB   tensor parallelism, prefills and decodes in separate batches      vllm_v0
    TP+HB   tensor parallelism, hybrid batches of chunks and decodes          sarathi_serve
    PP+SB   a pipeline, separate batches                                      vllm_v0
    PP+HB   a pipeline, hybrid batches                                        sarathi_serve
    TD-Pipe a pipeline, phases                                                td_pipe

Every system has the same GPUs, the same memory and the same requests, all there at the start. vLLM
0.5.3, which the paper compares with, ran one engine per stage, each with its own share of requests
and of memory: so do PP+SB and PP+HB (`deal="turns"`, `memory="split"`).

The paper's requests are 5,000 of ShareGPT with prompts under 1024 tokens. They are not at hand.
Ours have the lengths of Azure's public conversation trace of 2023 (azure_conv_2023_sample.csv:
2,000 requests with prompts of at most 1024 tokens, evenly spaced; Microsoft, CC-BY 4.0,
github.com/Azure/AzurePublicDataset), or, as `chat`, log-normal lengths with the percentiles that
Sarathi-Serve publishes of ShareGPT (its Table 2).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from batch import Request
from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, tokens_that_fit
from experiments.lib.common import ROOT
from experiments.lib.look import COLOURS
from experiments.lib.papers import CHAT
from loop import Loop
from pipeline import (
    Hop,
    MicroBatches,
    PipelineTrace,
    StageCosts,
    even_layers,
    make_micro_batches,
    run_pipeline,
    seconds_of_rows,
)
from pipeline.phases import Rules
from scheduler import make_scheduler
from serving.traffic import read_trace
from simulate import CostExecutor, make_cost_model, run_all

Lengths = Sequence[tuple[int, int]]  # prompt and output tokens of each request

SAMPLE = ROOT / "experiments" / "azure_conv_2023_sample.csv"
LONGEST = 1024  # prompt tokens (TD-Pipe, Sec 4.1)
BATCH_SIZE, BUDGET = 256, 512  # vLLM 0.5.3's max_num_seqs, and its token budget with chunks
COUNT = 2000  # requests of a run
# How each system looks in every picture.
LOOKS = {
    "TP+SB": COLOURS["sky"],
    "TP+HB": COLOURS["blue"],
    "PP+SB": COLOURS["orange"],
    "PP+HB": COLOURS["vermilion"],
    "TD-Pipe": COLOURS["green"],
}
PHASES = {"prefill": COLOURS["blue"], "decode": COLOURS["orange"]}  # the paper's blue and yellow
BASELINES = {
    "TP+SB": "vllm_v0",
    "TP+HB": "sarathi_serve",
    "PP+SB": "vllm_v0",
    "PP+HB": "sarathi_serve",
}


@dataclass(frozen=True)
class Node:
    """A model on GPUs of one machine, joined by PCIe."""

    name: str
    model: str
    gpu: str
    software: str  # whose constants the cost model takes
    link: str  # of an all-reduce
    gpus: int = 4

    def cost_model(self, tp: int = 1) -> CostModel:
        return make_cost_model(self.model, self.gpu, tp, self.link, self.software)

    @property
    def cache_tokens(self) -> int:
        """Of all GPUs together; 0 where the model does not fit them."""
        return tokens_that_fit(MODELS[self.model], GPUS[self.gpu], self.gpus)

    @property
    def hardware(self) -> str:
        return f"{self.gpus} x {self.gpu}"

    def on(self, gpus: int) -> "Node":
        return replace(self, gpus=gpus)


L20, A100 = (
    ("l20", "td_pipe", "pcie-l20-node"),
    ("a100-80gb-pcie", "sarathi_serve", "pcie-a100-node"),
)
NODES = {
    node.name: node
    for node in (
        Node("L20 + 13B", "llama2-13b", *L20),
        Node("L20 + 32B", "qwen2.5-32b", *L20),
        Node("A100 + 32B", "qwen2.5-32b", *A100),
        Node("A100 + 70B", "llama2-70b", *A100),
    )
}


@dataclass(frozen=True)
class Run:
    """What came of a system. trace: None with tensor parallelism. Times in seconds."""

    seconds: float
    output_tokens: int
    recomputed: int  # preemptions of all requests
    trace: PipelineTrace | None = None
    filling: MicroBatches | None = None
    requests: list[Request] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Output tokens/s."""
        return self.output_tokens / self.seconds


def azure(count: int = COUNT, seed: int = 0) -> Lengths:
    """Lengths of the sample, in order; past its end, drawn from it again."""
    lengths = [(len(r.prompt), r.max_tokens) for r in read_trace(SAMPLE)]
    more = random.Random(seed).choices(lengths, k=max(0, count - len(lengths)))
    return (lengths + more)[:count]


def chat(count: int = COUNT, seed: int = 0) -> Lengths:
    drawn = [(len(r.prompt), r.max_tokens) for r in CHAT.requests(3 * count, seed=seed)]
    return [pair for pair in drawn if pair[0] <= LONGEST][:count]


def make(lengths: Lengths) -> list[Request]:
    return [Request(i, range(prompt), output) for i, (prompt, output) in enumerate(lengths)]


def run_tp(
    node: Node, policy: str, lengths: Lengths, budget: int = BUDGET, batch_size: int = BATCH_SIZE
) -> Run:
    """All GPUs of the node share each layer."""
    requests = make(lengths)
    scheduler = make_scheduler(policy, batch_size, budget, node.cache_tokens)
    trace = run_all(Loop(scheduler, CostExecutor(node.cost_model(node.gpus))), requests)
    return Run(trace.seconds, *totals(requests), requests=requests)


def run_pp(
    node: Node,
    policy: str,
    lengths: Lengths,
    *,
    rules: Rules | None = None,
    deal: str = "queue",
    memory: str = "pool",
    budget: int = BUDGET,
    batch_size: int = BATCH_SIZE,
    overhead: float = 0.0,
    keep: bool = False,
) -> Run:
    """Each GPU of the node is a stage, and as many micro-batches are in flight.

    memory: "pool", or "split" evenly among the micro-batches. rules: of td_pipe.
    overhead: seconds that each iteration takes longer on stage 0 (the host, between two steps).
    """
    stages, cost_model, requests = node.gpus, node.cost_model(), make(lengths)
    cache_tokens = node.cache_tokens // (stages if memory == "split" else 1)
    filling = make_micro_batches(
        policy, stages, stages, batch_size, budget, cache_tokens,
        deal=deal, memory=memory, seconds_of=seconds_of_rows(cost_model), rules=rules,
    )  # fmt: skip
    for request in requests:
        filling.add(request)
    of_batch = StageCosts(cost_model, even_layers(cost_model.model.n_layer, stages))

    def costs(batch):
        first, *others = of_batch(batch)
        return [first + overhead, *others]

    trace = PipelineTrace(stages, filling.count, keep)
    hop = Hop.over(LINKS["pcie4"], cost_model)
    run_pipeline(filling, costs if overhead else of_batch, trace, hop)
    return Run(trace.seconds, *totals(requests), trace, filling, requests)


def run(node: Node, system: str, lengths: Lengths, **options: object) -> Run:
    """One of BASELINES, or TD-Pipe."""
    if system == "TD-Pipe":
        return run_pp(node, "td_pipe", lengths, **options)
    if system.startswith("TP"):
        return run_tp(node, BASELINES[system], lengths, **options)
    own = {"deal": "turns", "memory": "split"}
    return run_pp(node, BASELINES[system], lengths, **own | options)


def totals(requests: Sequence[Request]) -> tuple[int, int]:
    """Output tokens and preemptions of all."""
    return sum(len(r.output) for r in requests), sum(r.preemptions for r in requests)
