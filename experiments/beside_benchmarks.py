"""The planner beside public benchmarks of servers: vLLM, SGLang, TensorRT-LLM.

benchmarks.csv has what others measured and published: its conditions, its number, its address. Each
line is simulated as the planner would: today's vLLM kernels, the engine's defaults (B, token
budget, policy, memory), the load. No constant is fitted to these numbers. Those of
benchmarks_fresh.csv were predicted once, when all constants stood: plan.py prints their errors. Of
the others, a third of the sources, chosen by a hash of their address, was kept apart until all else
stood; those of SEEN never were.

card and host    the memory that engines find on the card, and the CPU's time (configs/hosts.py),
                 where the version of vLLM tells it
anchored         scaled to that server: with the lightest of its loads, with the heaviest (one
                 factor on all iterations), or with both (a factor and a gap). Of servers with
                 three loads or more. Those in the middle are compared

Lengths that a source gives as a mean of real texts (ShareGPT) are drawn with the spread that
Sarathi-Serve publishes of them, and stretched to that mean. Not compared is a throughput that is
the load. One that a page states in two units stands in the file once.
"""

import enter  # noqa: F401

import hashlib
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache

import matplotlib.pyplot as plt

from batch import Request
from command.checks import UserError
from configs import GPUS, ModelConfig
from experiments.lib import look
from experiments.lib.common import ROOT, quantile, read_table
from experiments.lib.engines import ANY, Sweep
from experiments.lib.papers import CHAT
from experiments.lib.plan_report import ANCHORED, BOTH, FRESH, WAY, WHAT, kind_of
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Study
from more.loading.priced import priced_model
from more.serving.anchor import (
    CHECKED,
    find_factor,
    find_line,
    mean_iteration,
    measure_of,
    scaled,
    shortest,
)
from more.serving.capacity import Deployment, cache_of_engine
from more.serving.engines import sglang_defaults, vllm_defaults
from more.serving.traffic import Fixed, at_rate, make_requests, poisson
from timeline import Trace

FILES = "benchmarks.csv", "benchmarks_fresh.csv"
# requests of a simulation, and of each client of a closed loop, at most: they are steady by then
MOST = 4096
ROUNDS = 6
KEPT = 3  # one source in so many is kept apart
SEEN = "benchmark_vllm_060", "gpu-benchmark", "a100-vllm-benchmark-blog", "llmfit"  # in their names
NEVER = (1000,)
# Engine -> its hosts, and the first version without each. The version alone chooses, and no error.
ENDS = {
    "vllm": {"vllm-2024": (0, 6), "vllm-2025": (0, 12), "vllm-async": NEVER},
    "sglang": {"sglang-0.3": (0, 4), "none": NEVER},
    "tensorrt-llm": {"none": NEVER},
}
CHUNKED = 0, 8  # the first whose default is chunked prefill
GROUPED = "kind", "quantity", "engine", "gpus"
SHOWN = {"sources": BOTH, "way": WAY}  # of the picture


@dataclass(frozen=True)
class Benchmark:
    """A line of benchmarks.csv: a server that somebody measured, and one number of it.

    load_kind: single, closed (load: clients), rate (load: requests/s) or burst (all at once).
    """

    id: str
    model: str  # with "-fp8" at its end: of fp8 weights
    gpu: str
    tp: int
    engine: str
    version: str  # "": unknown, taken for today's
    requests: int  # 0: unknown
    prompt_tokens: float
    output_tokens: float
    dataset: str  # fixed: all alike; a name of real texts; eos:600: outputs end by 600 tokens
    load_kind: str
    load: float
    memory: float  # share that the engine was given; 0: its default
    quantity: str
    unit: str
    value: float
    source: str
    doubt: str

    @property
    def shape(self) -> ModelConfig:
        """With its formats. NVIDIA's fp8 checkpoints for TensorRT-LLM have an fp8 cache, too. That
        the servers of these pages run such checkpoints is our reading.
        """
        name = self.model.removesuffix("-fp8")
        if name == self.model:
            return priced_model(name)
        return priced_model(name, "fp8", "fp8" if self.engine == "tensorrt-llm" else "bf16")

    @property
    def hardware(self) -> str:
        return f"{self.tp} x {self.gpu}" if self.tp > 1 else self.gpu

    @property
    def kind(self) -> str:
        single = self.load_kind == "single" or (self.load_kind, self.load) == ("closed", 1)
        return kind_of(self.tp, self.prompt_tokens, single)

    @property
    def what(self) -> str:
        return next(name for name, quantities in WHAT.items() if self.quantity in quantities)

    @property
    def part(self) -> str:
        """Which numbers it stands with: fresh ones, or those of a source kept apart, or others."""
        if self.id.startswith("f"):
            return FRESH
        return "kept apart" if self.kept else "looked at"

    @property
    def kept(self) -> bool:
        """By its source: the lines of one page stand together."""
        if any(name in self.source for name in SEEN):
            return False
        return hashlib.sha256(self.source.encode()).digest()[0] % KEPT == 0

    @property
    def place(self) -> tuple:
        """A server of somebody's: lines of one have one anchor."""
        return self.source, self.model, self.gpu, self.tp, self.engine, self.version

    @property
    def run(self) -> "Benchmark":
        """The server and its load, without the number."""
        return replace(self, id="", quantity="", unit="", value=0, source="", doubt="")

    @property
    def is_the_load(self) -> bool:
        """A throughput of at least 90 % of what arrives says nothing of the server."""
        sizes = {"output": self.output_tokens, "requests": 1}
        arrives = self.load * sizes.get(self.quantity, self.prompt_tokens + self.output_tokens)
        return self.load_kind == "rate" and self.what == "throughput" and self.value > 0.9 * arrives

    @property
    def host(self) -> str:
        if not self.version:
            return "none"
        return next(name for name, end in ENDS[self.engine].items() if self.release < end)

    @property
    def release(self) -> tuple[int, ...]:
        """The first two numbers of the version; an unknown one is later than all."""
        parts = self.version.split(".")[:2] if self.version else (999,)
        return tuple(map(int, parts))


def number(text: str, kind: type) -> object:
    return text if kind is str else kind(float(text or 0))


@cache
def benchmarks(*names: str) -> tuple[Benchmark, ...]:
    """The lines of these files of experiments/; of FILES, where none is named."""
    return tuple(
        Benchmark(**{f.name: number(line[f.name], f.type) for f in fields(Benchmark)})
        for name in names or FILES
        for line in read_table(ROOT / "experiments" / name)
    )


def traffic(each: Benchmark) -> list[Request]:
    """Its requests, at most MOST of them, arriving as its load says."""
    most = MOST if each.load_kind in ("burst", "rate") else ROUNDS * int(each.load)
    count = min(each.requests or most, most, MOST)
    prompt, output = (max(1, round(size)) for size in (each.prompt_tokens, each.output_tokens))
    if each.dataset == "fixed":
        requests = make_requests(poisson(count, 1.0), Fixed(prompt), Fixed(output))
    else:
        drawn = CHAT.requests(count)
        most = int(each.dataset.partition(":")[2] or 0)
        prompts = stretched([len(r.prompt) for r in drawn], prompt)
        prompts = [prompt] * count if most else prompts
        outputs = stretched([r.max_tokens for r in drawn], output, most)
        requests = [
            Request(r.request_id, range(size), end, arrival=r.arrival)
            for r, size, end in zip(drawn, prompts, outputs, strict=True)
        ]
    return at_rate(requests, each.load if each.load_kind == "rate" else 1e6)


def stretched(lengths: Sequence[int], mean: float, most: int = 0) -> list[int]:
    """Multiplied by one factor, to this mean. most: none becomes longer; 0: no bound."""
    factor = mean / statistics.mean(lengths)
    found = []
    for _ in range(50 if most else 1):  # what the bound takes from long ones, all others get
        found = [max(1, round(factor * length)) for length in lengths]
        found = [min(length, most) for length in found] if most else found
        factor *= mean / statistics.mean(found)
    return found


def engine_defaults(each: Benchmark) -> tuple[str, int, int]:
    """Policy, token budget and B of an engine, as it is started without flags."""
    gpu = GPUS[each.gpu]
    if each.engine == "tensorrt-llm":
        return "sarathi_serve", 8192, 2048  # inflight batching: prompts beside decodes
    if each.engine == "sglang":  # batches of prompts go first, and alone; memory bounds B
        return "prefill_first", *sglang_defaults(gpu)
    if each.release < CHUNKED:  # whole prompts first; 8192: the length of a model of that time
        return "vllm_v0:8192", 8192, 256
    return "sarathi_serve", *vllm_defaults(gpu)


def replica_of(each: Benchmark) -> Deployment:
    """TensorRT-LLM takes a share of what is free after the model is loaded, SGLang one for weights
    and cache. TensorRT-LLM starts no more requests than fit to their last token.
    """
    _, budget, size = engine_defaults(each)
    server = Deployment(each.shape, each.tp, each.gpu, link=None, host=each.host, software="vllm")
    cost = server.cost_model
    longest = round(each.prompt_tokens + each.output_tokens)
    if each.engine == "tensorrt-llm":
        tokens = cache_of_engine(cost, 1, budget, size, each.memory or 0.9, of_free=True)
    elif each.engine == "sglang":
        tokens = cache_of_engine(cost, 1, 0, 0, 0.88)
    else:  # what does not fit at the default must have been given more
        shares = [each.memory] if each.memory else [0.9, 0.95, 0.98]
        sizes = [cache_of_engine(cost, 1, budget, size, share) for share in shares]
        tokens = next((tokens for tokens in sizes if tokens >= longest), sizes[-1])
    if each.engine == "tensorrt-llm":
        size = max(1, min(size, tokens // longest))
    return replace(server, max_batch_size=size, cache=max(tokens, longest))


@lru_cache(4)
def run(server: Benchmark, factor: float = 1.0, gap: float = 0.0) -> Trace:
    """The run of a server and its load: a line without its number. Lines share it."""
    replica = scaled(replica_of(server), factor, gap)
    policy, budget, _ = engine_defaults(server)
    clients = {"single": 1, "closed": int(server.load)}.get(server.load_kind)
    return replica.serve(traffic(server), policy, budget, clients)


def predicted(each: Benchmark, factor: float = 1.0, gap: float = 0.0) -> float:
    """The number that was published, of a simulated run."""
    return measure_of(each.quantity, run(each.run, factor, gap))


def hopeful(each: Benchmark, ours: float) -> float:
    """Ours over the published number; of times, inverted. So above 1 is always too hopeful."""
    return ours / each.value if each.what == "throughput" else each.value / ours


def tells(each: Benchmark) -> bool:
    """Whether the number says how fast the server's iterations are."""
    if each.is_the_load:
        return False
    if each.load_kind == "rate":
        return each.what == "time per token" and each.quantity != "P99 ITL"
    return each.what == "throughput"


@cache
def ends_of(place: tuple) -> tuple[Benchmark, ...]:
    """A number of a server's lightest load and one of its heaviest, by our own iterations.

    (): it has fewer than three loads with a number that tells. Of a load with several, the first
    stands for it. No error is looked at.
    """
    loads: dict[Benchmark, Benchmark] = {}
    for each in benchmarks():
        if each.place == place and tells(each):
            loads.setdefault(each.run, each)
    if len(loads) < CHECKED:
        return ()
    found = sorted(loads.values(), key=lambda each: iteration_of(each, 1.0, 0.0))
    return found[0], found[-1]


def factor_of(each: Benchmark, gap: float = 0.0) -> float:
    is_time = each.load_kind == "rate"
    return find_factor(lambda factor: predicted(each, factor, gap), each.value, is_time)


def iteration_of(each: Benchmark, factor: float, gap: float) -> float:
    return mean_iteration(run(each.run, factor, gap), each.load_kind == "rate")


@cache
def anchors_of(light: Benchmark, heavy: Benchmark) -> dict[str, tuple[float, float]]:
    """Way, of ANCHORED -> factor and gap. Where two loads give no line: the factor of the heavy
    one.
    """
    alone = (factor_of(light), 0.0), (factor_of(heavy), 0.0)
    least = shortest(replica_of(light))
    line = find_line(light, heavy, least, factor_of, iteration_of)
    both = alone[1] if isinstance(line, str) else line
    return dict(zip(ANCHORED, ((1.0, 0.0), *alone, both), strict=True))


def beside(each: Benchmark, number: str) -> Row:
    ratios = {WAY: hopeful(each, predicted(each))}
    part = each.part
    asked = {"engine": each.engine, "quantity": each.what, "published": each.quantity}
    asked |= {"gpus": "several GPUs" if each.tp > 1 else "one GPU"}
    ends = ends_of(each.place)
    if ends and each.run not in (ends[0].run, ends[1].run):
        for way, (factor, gap) in anchors_of(*ends).items():
            ratios[way] = hopeful(each, predicted(each, factor, gap))
    return {"number": number, "sources": part, "kind": each.kind, **asked, **ratios}


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile of the error's size, and the signed median, in %."""
    sizes = [abs(math.log(ratio)) for ratio in ratios]
    ends = {"median error": statistics.median(sizes), "90th percentile": quantile(sizes, 0.9)}
    signed = math.log(statistics.median(ratios))
    return {name: 100 * math.expm1(size) for name, size in (ends | {"signed": signed}).items()}


def seen(numbers: Rows) -> Rows:
    """Without the fresh ones."""
    return numbers.part(row for row in numbers if row["sources"] != FRESH)


def summarize(rows: Rows) -> None:
    """Errors by kind, by quantity and by engine; by both ways; of parts, and of both old ones."""
    every = rows.where("number")
    for part, some in (every.by("sources") | {BOTH: seen(every)}).items():
        groups = {"all": some}
        for key in GROUPED:
            groups |= some.by(key)
        for gpus, own in some.by("gpus").items():
            groups |= {f"{gpus}/{what}": each for what, each in own.by("quantity").items()}
        for group, own in groups.items():
            for way in (WAY, *ANCHORED):
                if ratios := own.column(way):
                    case = {"sources": part, "group": group, "way": way, "compared": len(ratios)}
                    rows.add(**vars(ANY), **case, **spread(ratios))


def report(rows: Rows) -> None:
    columns = ("number", "kind", "hardware", "engine", "published", WAY)
    for part, own in rows.where("number").by("sources").items():
        print_rows(own, columns, f"Ours over theirs: {part}")
    columns = ("group", "compared", "median error", "90th percentile", "signed")
    summary = rows.where("median error")
    for part, own in summary.where(way=WAY).by("sources").items():
        print_rows(own, columns, f"Errors, {part}; signed: above 0 is too hopeful")
    for part in BOTH, FRESH:
        own = summary.where(way=ANCHORED, sources=part)
        print_rows(own, ("way", *columns), f"Anchored, loads in the middle: {part}")


def draw(rows: Rows) -> plt.Figure:
    """A line for each group: the median error, and within which error nine of ten numbers are."""
    groups = rows.where("median error", **SHOWN)
    every = seen(rows.where("number"))
    begin = {next(iter(every.by(key))) for key in GROUPED}  # of a kind of groups
    figure, [[axes]] = look.panels(1, 1, 12, 9)
    names = []
    for place, row in enumerate(groups):
        if row["group"] in begin or "/" in row["group"] and "/" not in groups[place - 1]["group"]:
            axes.axhline(place - 0.5, color=look.GREY, linewidth=1)
        names.append("{group}: {compared:.0f}".format(**row).replace("/", ", "))
    places = range(len(groups))
    middle = groups.column("median error")
    end = groups.column("90th percentile")
    blue = look.COLOURS["blue"]
    axes.plot(middle, places, "o", color=blue, markersize=10, label="median error")
    told = "to the 90th percentile: nine of ten numbers are within it"
    sky = look.COLOURS["sky"]
    axes.hlines(places, middle, end, color=sky, linewidth=5, zorder=1, label=told)
    axes.set_yticks(places, names)
    axes.set(xlim=(0, None), ylim=(len(groups) - 0.5, -0.5), xlabel="error (%)")
    axes.grid(visible=False, axis="y")
    gpus = dict.fromkeys(name.split()[-1] for name in every.by("hardware"))
    where = f"{textwrap.fill(', '.join(every.by('model')), 90)}\non {', '.join(gpus)}"
    figure.legend(loc="outside lower center", ncols=2, title=where, title_fontsize=12)
    figure.suptitle(f"{STUDY.title}\nby groups, each with its count of published numbers")
    return figure


def is_priced(each: Benchmark) -> bool:
    """False where no public kernel prices it: fp8 on an MI300X."""
    try:
        replica_of(each)
    except UserError:
        return False
    return True


def sweeps(quick: bool) -> list[Sweep]:
    chosen = [each for each in benchmarks() if not each.is_the_load and is_priced(each)]
    few = chosen[:: 18 if quick else 1]
    return [Sweep(beside, [each], [{"number": each.id}]) for each in few]


STUDY = Study(
    "beside_benchmarks",
    __doc__,
    sweeps,
    units=dict.fromkeys((WAY, *ANCHORED), "x")
    | dict.fromkeys(("median error", "90th percentile", "signed"), "%")
    | {"compared": "numbers"},
    title="Predicted beside servers that others measured",
    draw=draw,
    derive=summarize,
    shown=None,
    report=report,
    slow=True,
)

if __name__ == "__main__":
    STUDY.main()
