"""The planner beside public benchmarks of servers: vLLM, SGLang, TensorRT-LLM.

    python experiments/beside_benchmarks.py           all of benchmarks.csv: a minute
    python experiments/beside_benchmarks.py --kept    also the third that was kept apart

benchmarks.csv has what others measured and published: its conditions, its number, its address. Each
line is simulated as the planner would: today's vLLM kernels on the GPU, its memory, the engine's
defaults (B, token budget, policy). No constant is fitted to these numbers. A third of the sources,
chosen by a hash of their address before the first comparison, is kept apart: --kept shows it.

kernels     the GPU's work alone.
with host   and the CPU's time (configs/hosts.py): of vLLM before version 0.6, "vllm-2024"; up to
            0.10, "vllm-v1"; later, "vllm-async". Of other engines nothing is published: "none".

Lengths that a source gives as a mean of real texts (ShareGPT) are drawn with the spread that
Sarathi-Serve publishes of them, and stretched to that mean.
"""

import enter  # noqa: F401

import csv
import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

from batch import Request
from command.flags import Flag
from configs import GPUS, MODELS
from configs.hosts import HOSTS
from costmodel import CostModel
from experiments.lib.common import ROOT
from experiments.lib.engines import Sweep
from experiments.lib.papers import CHAT
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from experiments.lib.validation import quantile
from serving.planner import Replica, cache_of_engine
from serving.traffic import Fixed, make_requests, poisson
from timeline import Trace

FILE = ROOT / "experiments" / "benchmarks.csv"
# requests of a simulation, and of each client of a closed loop, at most: they are steady by then
MOST, ROUNDS = 512, 6
KEPT = 3  # one source in so many is kept apart
KINDS = ("single stream", "long prompts", "tensor parallel", "short prompts, many at once")
LONG = 1500  # prompt tokens
# the version of vLLM until which each host holds: V1 is the default from 0.8 on, async scheduling
# from 0.12 on
ENDS = {"vllm-2024": (0, 8), "vllm-v1": (0, 12)}


@dataclass(frozen=True)
class Benchmark:
    """A line of benchmarks.csv: a server that somebody measured, and one number of it.

    load_kind: single, closed (load: clients), rate (load: requests/s) or burst (all at once).
    """

    id: str
    model: str
    gpu: str
    tp: int
    engine: str
    version: str
    requests: int
    prompt_tokens: float
    output_tokens: float
    dataset: str  # fixed: all alike; else a name of real texts
    load_kind: str
    load: float
    quantity: str
    unit: str
    value: float
    source: str
    doubt: str

    @property
    def hardware(self) -> str:
        return f"{self.tp} x {self.gpu}" if self.tp > 1 else self.gpu

    @property
    def kind(self) -> str:
        if self.load_kind == "single" or (self.load_kind, self.load) == ("closed", 1):
            return KINDS[0]
        if self.tp > 1:
            return KINDS[2]
        return KINDS[1] if self.prompt_tokens >= LONG else KINDS[3]

    @property
    def kept(self) -> bool:
        """By its source: the lines of one page stand together."""
        return hashlib.sha256(self.source.encode()).digest()[0] % KEPT == 0

    @property
    def host(self) -> str:
        if self.engine != "vllm" or not self.version:
            return "none"
        release = version(self.version)
        return next((name for name, end in ENDS.items() if release < end), "vllm-async")


def version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2])


def number(text: str, kind: type) -> object:
    return kind(float(text)) if kind is not str and text else text if kind is str else kind(0)


@cache
def benchmarks() -> tuple[Benchmark, ...]:
    with open(FILE, newline="", encoding="utf-8") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        return tuple(
            Benchmark(**{f.name: number(line[f.name], f.type) for f in fields(Benchmark)})
            for line in lines
        )


# --------------------------------------------------------------------------------------- simulation


def traffic(each: Benchmark) -> list[Request]:
    """Its requests, at most MOST of them, arriving as its load says."""
    most = MOST if each.load_kind in ("burst", "rate") else ROUNDS * int(each.load)
    count = min(each.requests or most, most, MOST)
    arrivals = poisson(count, each.load if each.load_kind == "rate" else 1e6, seed=0)
    prompt, output = (max(1, round(size)) for size in (each.prompt_tokens, each.output_tokens))
    if each.dataset == "fixed":
        return make_requests(arrivals, Fixed(prompt), Fixed(output))
    drawn = CHAT.requests(count)
    means = (
        statistics.mean(sizes)
        for sizes in ([len(r.prompt) for r in drawn], [r.max_tokens for r in drawn])
    )
    prompts, outputs = (size / mean for size, mean in zip((prompt, output), means, strict=True))
    return [
        Request(
            i,
            range(max(1, round(prompts * len(r.prompt)))),
            max(1, round(outputs * r.max_tokens)),
            arrival=arrivals[i],
        )
        for i, r in enumerate(drawn)
    ]


def engine_defaults(each: Benchmark) -> tuple[str, int, int]:
    """Policy, token budget and B of an engine, as it is started without flags."""
    if each.engine == "vllm" and each.version and version(each.version) < (0, 8):
        return "vllm_v0", 1, 256
    # vLLM gives cards of 70 GiB and more, but A100s, the larger numbers; SGLang and TensorRT-LLM
    # fill the memory
    large = each.engine != "vllm" or (GPUS[each.gpu].memory >= 70e9 and "a100" not in each.gpu)
    return ("sarathi_serve", 8192, 1024) if large else ("sarathi_serve", 2048, 256)


@cache
def run(name: str, host: str) -> Trace:
    """A measurement's run. Lines of one server and load share it."""
    each = next(line for line in benchmarks() if line.id == name)
    model, gpu = MODELS[each.model], GPUS[each.gpu]
    cost = CostModel(model, gpu, tp=each.tp, software="vllm", host=HOSTS[host])
    policy, budget, size = engine_defaults(each)
    # what did not fit at the default must have been given more
    fits = (cache_of_engine(cost, 1, max(budget, 2048), size, share) for share in (0.9, 0.95))
    replica = Replica(cost, size, next(filter(None, fits)))
    clients = {"single": 1, "closed": int(each.load)}.get(each.load_kind)
    return replica.serve(traffic(each), policy, budget, clients)


def lasting(trace: Trace) -> list[float]:
    """Mean seconds between the tokens of each request with several."""
    return [
        (life.tokens[-1] - life.tokens[0]) / (len(life.tokens) - 1)
        for life in trace.lives.values()
        if len(life.tokens) > 1
    ]


def measure_of(each: Benchmark, trace: Trace) -> float:
    """The quantity that was published, of a simulated run."""
    prompts = sum(life.prompt_tokens for life in trace.lives.values())
    outputs = sum(len(life.tokens) for life in trace.lives.values())
    ways = {
        "output": lambda: outputs / trace.seconds,
        "all tokens": lambda: (prompts + outputs) / trace.seconds,
        "requests": lambda: len(trace.finished) / trace.seconds,
        "mean TPOT": lambda: 1e3 * statistics.mean(lasting(trace)),
        "median TPOT": lambda: 1e3 * statistics.median(lasting(trace)),
        "mean TTFT": lambda: 1e3 * statistics.mean(trace.ttfts),
        "median TTFT": lambda: 1e3 * statistics.median(trace.ttfts),
        "P99 TTFT": lambda: 1e3 * quantile(trace.ttfts, 0.99),
        "mean ITL": lambda: 1e3 * statistics.mean(trace.tbts),
        "mean latency": lambda: (
            1e3 * statistics.mean(life.latency for life in trace.lives.values())
        ),
        "P99 ITL": lambda: 1e3 * quantile(trace.tbts, 0.99),
    }
    return ways[each.quantity]()


# ------------------------------------------------------------------------------------------- study


def beside(each: Benchmark, number: str) -> Row:
    """Ours over the published number, by the kernels alone and with the host. Of times, inverted.

    So above 1 is always too hopeful.
    """
    ours = {way: measure_of(each, run(number, host)) for way, host in ways(each).items()}
    slower = each.unit in ("ms", "s")
    ratios = {way: each.value / one if slower else one / each.value for way, one in ours.items()}
    part = "kept apart" if each.kept else "looked at"
    what = {"kind": each.kind, "engine": each.engine, "what": each.quantity, "sources": part}
    return {"kind": each.kind, "number": number, **what, **ratios}


def ways(each: Benchmark) -> dict[str, str]:
    return {"kernels": "none", "with host": each.host}


WAYS = ("kernels", "with host")


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile of the error's size, and the signed median, in %."""
    sizes = [abs(math.log(ratio)) for ratio in ratios]
    ends = {"median error": statistics.median(sizes), "90th percentile": quantile(sizes, 0.9)}
    signed = math.log(statistics.median(ratios))
    return {name: 100 * math.expm1(size) for name, size in (ends | {"signed": signed}).items()}


def summarize(rows: Rows) -> None:
    """Errors of all, and by kind: with and without the host."""
    every = rows.where(WAYS[0])
    where = {"model": "all models", "hardware": "all GPUs"}
    for part, some in every.by("sources").items():
        kinds = {"all": some} | {kind: some.where(kind=kind) for kind in KINDS}
        for kind, own in kinds.items():
            for way in WAYS if own else ():
                case = {"kind": kind, "way": way, "sources": part, "compared": len(own)}
                rows.add(**where, **case, **spread(own.column(way)))


def report(rows: Rows) -> None:
    for part, own in rows.where("number").by("sources").items():
        print_rows(own, ("number", "kind", "hardware", "what", *WAYS), f"Ours over theirs: {part}")
    columns = ("sources", "kind", "way", "compared", "median error", "90th percentile", "signed")
    print_rows(rows.where("median error"), columns, "How far off: above 0, we are too hopeful")


def sweeps(quick: bool, kept: bool = False) -> list[Sweep]:
    chosen = [each for each in benchmarks() if kept or not each.kept]
    return [Sweep(beside, [each], [{"number": each.id}]) for each in chosen[:: 8 if quick else 1]]


STUDY = Study(
    "beside_benchmarks",
    __doc__,
    sweeps,
    units=dict.fromkeys(WAYS, "x")
    | dict.fromkeys(("median error", "90th percentile", "signed"), "%")
    | {"compared": "numbers"},
    title="Predicted over published, servers of others",
    panels=[
        Panel(
            "number",
            WAYS,
            kind="bars",
            facet="kind",
            rule=1,
        ),
    ],
    derive=summarize,
    report=report,
    flags={"kept": Flag("also the sources that were kept apart")},
)

if __name__ == "__main__":
    STUDY.main()
