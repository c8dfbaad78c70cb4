"""What your model serves on your GPU, under your SLO and your traffic: predicted, in three minutes.

    python plan.py --model llama3.1-8b --gpu a100-80gb --requests-file trace.csv --tbt-slo 50
    python plan.py --model DIR --gpu h100 --tp 2 --requests-file chat --tbt-slo 30 --ttft-slo 1000
    python plan.py --gpu-spec 24,165,1008 --requests-file 1000:200
        a GPU of no table (GB, TFLOPS, GB/s); all requests with 1000 prompt and 200 output tokens
    python plan.py --gpu here --model laptop --requests-file 200:40 --tbt-slo 150
        this machine, as experiments/calibrate.py measured it

It prints and draws the token budget, the capacity with an interval, what other policies and other
numbers of GPUs give, the latency under load, and the command lines for vLLM and SGLang. --model
also takes the folder of a config.json, or a hub id that is on disk. serving/planner.py says how
it searches; docs/planner.md what the answer is worth.
"""

import enter  # noqa: F401

import gc
import math
import os
import re
import shlex
import textwrap
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from batch import Request
from checks import UserError, did_you_mean, lookup
from cli import ROOT, run_main
from configs import GPU, GPUS, LINKS, MODELS, ModelConfig
from costmodel import SOFTWARE, TILE, CostModel, constants, make_batch, tokens_that_fit
from experiments.lib.common import Record, print_table, run_jobs, three_digits
from experiments.lib.figure import finish
from experiments.lib.flags import POLICIES as POLICY_FLAGS
from experiments.lib.flags import Flag, make_directory, make_parser, parse
from experiments.lib.look import COLOURS, labelled_bars, panels
from experiments.lib.papers import ARXIV, CHAT, LOOKS, looks_of
from loading.config_json import load_config
from scheduler import POLICIES
from serving.calibration import BATCH_SIZE, LENGTH, RESULTS, CalibratedModel, Calibration
from serving.capacity import CONTEXT, DECODES, STRICT, percentile, steady_times, token_budget
from serving.planner import (
    BUDGETS,
    EXACT,
    SMALL_BUDGETS,
    WHOLE,
    Found,
    Replica,
    Slo,
    Traffic,
    beside,
    best_budget,
    budgets_of,
    engine_flags,
    find_capacity,
)
from serving.traffic import Fixed, at_rate, busy_times, make_requests, poisson, read_trace

NAME, HERE = "plan", "here"
OURS = "sarathi_serve"  # what vLLM and SGLang do with chunks
REQUESTS = 2048  # that are drawn, where no file has them
FEW = 100  # requests of a trace; fewer give an interval that says little
ROUGH = 1.05  # precision of what the answer is compared with
DRAWS = 8  # samples of the traffic, for the interval
LOADS = (0.5, 0.7, 0.9, 1.0)  # of the capacity, in the table of latencies
TP, PP = (1, 2, 4, 8), (2, 4)
DATASETS = {data.name: data for data in (CHAT, ARXIV)}
PAIR = re.compile(r"([0-9]{1,7}):([0-9]{1,7})")
FLAGS = {
    "model": Flag("model: a name of configs.MODELS, a folder with a config.json, or a hub id that"
                  " is on disk", "mistral-7b"),
    "gpu": Flag(f"GPU, one of {', '.join(GPUS)}, or here: this machine", shown="a100-80gb"),
    "gpu_spec": Flag(),
    "tp": Flag("", 1),
    "pp": Flag("", 1),
    "link": Flag("", shown="the GPU's own", choices=LINKS),
    "hop": Flag("", shown="as --link", choices=LINKS),
    "software": Flag("", shown="vllm", choices=SOFTWARE),
    "calibration": Flag("with --gpu here: the calibration", shown="results/calibration-MODEL.json"),
    "requests_file": Flag("traffic: a CSV file of arrivals, prompts and outputs; or chat, arxiv, or"
                          " P:N tokens of every request", shown="chat"),
    "requests": Flag("requests that are drawn, where the traffic is no file", REQUESTS, 256),
    "seed": Flag("seed of all that is drawn at random", 0),
    "tbt_slo": Flag("bound of the P99 time between tokens, in ms", shown="5 decode iterations"),
    "ttft_slo": Flag("bound of the P90 time to the first token, in ms"),
    "rate": Flag("requests per second that you expect: how many replicas hold them?"),
    "max_batch_size": Flag("requests that run at once", shown="256; here, 8"),
    **POLICY_FLAGS,
    "out": Flag("", ROOT / "build" / NAME),
}  # fmt: skip


# ------------------------------------------------------------------------------- what the user gave


def model_of(name: str) -> ModelConfig:
    """A model of the table, of a folder, or of the hub's files that are on this disk."""
    if name in MODELS:
        return MODELS[name]
    folder = Path(name).expanduser()
    if not folder.is_dir() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        folder = on_disk(name)
    if folder is not None and folder.is_dir():
        return load_config(folder, Path(name).name)
    raise UserError(
        f"--model {name!r} is no folder with a config.json, no hub id that is on this disk, and no"
        f" name of configs.MODELS: {', '.join(MODELS)}{did_you_mean(name, MODELS)}"
    )


def on_disk(hub_id: str) -> Path | None:
    """Where the hub's client keeps the newest files of a model; None: nowhere."""
    home = os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(home) / "hub"))
    found = cache.glob(f"models--{hub_id.replace('/', '--')}/snapshots/*/config.json")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


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
    return replace(near, name="gpu-spec", source="--gpu-spec", **sizes), near.name


def cost_of(options: Namespace, model: ModelConfig, tp: int) -> CostModel:
    gpu, owner = gpu_of(options)
    link, software = LINKS[options.link or gpu.link], options.software or "vllm"
    own = constants(owner, software)[0] if options.gpu_spec else None
    return CostModel(model, gpu, own, tp=tp, link=link, software=software)


def replica_of(options: Namespace, model: ModelConfig, tp: int, pp: int) -> Replica:
    """`tp` GPUs in each of `pp` stages. Raises UserError if the model does not fit, or divide."""
    cost = cost_of(options, model, tp)
    gpu = replace(cost.gpu, memory=pp * cost.gpu.memory)
    hop = LINKS[options.hop or options.link or cost.gpu.link]
    fit = tokens_that_fit(model, gpu, tp)
    if fit < 1:
        raise UserError(
            f"{model.name}: {2e-9 * model.parameters:.0f} GB of weights do not fit 90 % of"
            f" {tp * pp} x {cost.gpu.memory / 1e9:.0f} GB: give more GPUs with --tp or --pp"
        )
    return Replica(cost, options.max_batch_size or 256, fit, pp, hop)


def replica_here(options: Namespace, model: ModelConfig) -> Replica:
    """This machine, as its calibration describes it."""
    for name in ("gpu_spec", "software", "link", "hop"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} and --gpu {HERE} exclude each other: leave one out")
    if (options.tp, options.pp) != (1, 1):
        raise UserError(f"--tp is {options.tp} and --pp {options.pp}; --gpu {HERE} allows 1 and 1")
    path = options.calibration or RESULTS / f"calibration-{model.name}.json"
    if not path.is_file():
        raise UserError(f"no {path}: run experiments/calibrate.py --model {options.model} first")
    calibration = Calibration.read(path)
    calibration.check_machine()
    if calibration.model.name != model.name:
        raise UserError(f"{path} is of {calibration.model.name}, and --model is {model.name}")
    return Replica(CalibratedModel(calibration), options.max_batch_size or BATCH_SIZE, None)


def requests_of(options: Namespace) -> tuple[str, list[Request], bool]:
    """The traffic's name, its requests, and whether they are of a file.

    A file goes before a word of the same name.
    """
    path = options.requests_file or Path(CHAT.name)
    word, count = str(path), options.requests
    if not path.exists() and word in DATASETS:
        return word, DATASETS[word].requests(count, seed=options.seed), False
    if not path.exists() and (pair := PAIR.fullmatch(word)):
        prompt, output = (Fixed(int(size)) for size in pair.groups())
        return word, make_requests(poisson(count, 1.0, options.seed), prompt, output), False
    if not path.exists() and not path.suffix:
        raise UserError(
            f"--requests-file {word!r} is no file: give a CSV file, {', '.join(DATASETS)}, or P:N"
            f" tokens, such as 1000:200{did_you_mean(word, DATASETS)}"
        )
    return path.name, read_trace(path), True


def that_fit(requests: Sequence[Request], replica: Replica) -> list[Request]:
    """Without those that are too long for the model or the cache. Says how many these are."""
    model = replica.cost.model
    most = min(model.max_length, model.window or model.max_length)
    if isinstance(replica.cost, CalibratedModel):
        most = min(most, LENGTH)
    most = min(most, replica.cache_tokens or most)
    fitting = [each for each in requests if each.most_cached <= most]
    if len(fitting) < len(requests):
        print(
            f"left out: {len(requests) - len(fitting)} of {len(requests)} requests, which are"
            f" longer than {most} tokens"
        )
    if not fitting:
        raise UserError(f"no request is short enough: {model.name} here allows {most} tokens")
    return fitting


# --------------------------------------------------------------------------------------- the search


@dataclass(frozen=True)
class Job:
    """One search of another process. budget: the first that is tried, where all are tried."""

    what: str  # policy: a policy's capacity at a budget; draw: of a sample; layout: at its best
    policy: str
    budget: int
    tp: int
    pp: int
    seed: int | None = None


@dataclass(frozen=True)
class Demand:
    """A load, in requests per second: how many replicas hold it? busiest: minute, if known."""

    who: str  # of whom: the trace's, or the user's own number
    rate: float
    busiest: float | None
    gaps: str  # between arrivals, that the capacity was found with


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked, for all jobs alike."""

    replicas: Mapping[tuple[int, int], Replica]  # by (tp, pp)
    traffic: Traffic
    slo: Slo
    sizes: Sequence[int]  # token budgets
    step: int  # between token budgets, at least
    demands: Sequence[Demand] = ()

    def budgets(self, tp: int, pp: int) -> list[int]:
        """Those that are tried with so many GPUs."""
        return budgets_of(self.replicas[tp, pp], self.traffic, self.slo, self.sizes)

    def answer(self, job: Job, start: float = 0.0) -> Found:
        replica = self.replicas[job.tp, job.pp]
        shared = replica, self.traffic, self.slo, job.policy
        if job.what == "layout":
            budgets = self.budgets(job.tp, job.pp)
            return best_budget(*shared, budgets, ROUGH, min(job.budget, budgets[-1]))
        precision = ROUGH if job.what == "policy" else EXACT
        return find_capacity(*shared, job.budget, precision, job.seed, start)


@dataclass(eq=False)
class Plan:
    """All that was found."""

    question: Question
    replica: Replica
    curves: dict[str, dict[int, Found]]  # by policy and budget; 0: the policy reads no budget
    best: Found
    draws: list[float]  # capacities of other samples
    layouts: dict[tuple[int, int], Found]
    refused: dict[tuple[int, int], str]  # why a layout is none


def first_answer(question: Question, here: tuple[int, int]) -> Found:
    """One search, in this process: seconds."""
    replica, slo, budgets = question.replicas[here], question.slo, question.budgets(*here)
    longest = int(question.traffic.prompts.max())
    try:
        safe = token_budget(replica.cost, slo.tbt, DECODES, CONTEXT, max(longest, budgets[-1]))
    except (UserError, IndexError):  # not even a decode of that context meets the SLO
        safe = budgets[0]
    budget = max([size for size in budgets if size <= safe] or budgets[:1])
    return find_capacity(replica, question.traffic, slo, OURS, budget, ROUGH)


def policies_of(more: Sequence[str] | None) -> list[str]:
    """All of one engine; ours first."""
    return list(dict.fromkeys([OURS, *POLICIES, *(more or ())]))


def search(
    question: Question, here: tuple[int, int], policies: Sequence[str], refused: dict
) -> Plan:
    """Phase by phase, on all cores: the policies' budgets; layouts; draws of the chosen budget."""
    processes = os.cpu_count() or 1

    def run(jobs: Sequence[Job], what: str, start: float = 0.0) -> dict[Job, Found]:
        perform = partial(question.answer, start=start)
        return run_jobs(perform, jobs, min(processes, len(jobs)), what, initializer=gc.disable)

    budgets, curves = question.budgets(*here), {}
    own = {name: name.partition(":")[0] in WHOLE for name in policies}
    jobs = [
        Job("policy", name, budget, *here)
        for name in policies
        for budget in (budgets[:1] if own[name] else budgets)
    ]
    for job, found in run(jobs, "policies and budgets").items():
        curves.setdefault(job.policy, {})[0 if own[job.policy] else job.budget] = found
    rough = max(curves[OURS].values(), key=lambda each: each.rate)
    if not rough.rate:
        raise UserError(too_strict(question, here))
    near = [size for size, each in curves[OURS].items() if each.rate * ROUGH >= rough.rate]
    near += beside(budgets, rough.budget, question.step)
    jobs = [Job("exact", OURS, size, *here) for size in near]
    jobs += [Job("layout", OURS, rough.budget, *each) for each in question.replicas if each != here]
    found = run(jobs, "exact capacity, and other numbers of GPUs")
    exact = [found[job] for job in jobs if job.what == "exact"]
    curves[OURS] = dict(sorted((curves[OURS] | {each.budget: each for each in exact}).items()))
    best = max(exact, key=lambda each: (each.rate, -each.budget))
    draws = [Job("draw", OURS, best.budget, *here, seed) for seed in range(DRAWS)]
    others = [each.rate for each in run(draws, "other samples of the traffic", best.rate).values()]
    layouts = {(job.tp, job.pp): each for job, each in found.items() if job.what == "layout"}
    return Plan(question, question.replicas[here], curves, best, others, layouts | {here: best},
                refused)  # fmt: skip


def too_strict(question: Question, here: tuple[int, int]) -> str:
    """Why there is no capacity."""
    cost, slo = question.replicas[here].cost, question.slo
    usual = int(np.median(question.traffic.prompts))
    decode = 1e3 * cost.seconds(make_batch(decodes=1, context=usual))
    prefill = 1e3 * cost.seconds(make_batch([(0, usual, usual)]))
    first, whole = "", ""
    if slo.ttft < math.inf:
        first = f" and a P90 TTFT of {1e3 * slo.ttft:g} ms"
        whole = f", and a prompt of {usual} tokens {prefill:.3g} ms"
    more = "" if isinstance(cost, CalibratedModel) else ", or give more GPUs with --tp"
    return (
        f"no rate meets a P99 TBT of {1e3 * slo.tbt:.3g} ms{first}: a single decode alone takes"
        f" {decode:.3g} ms{whole}; allow more{more}"
    )


# ------------------------------------------------------------------------------------ what is shown


def rounded(rate: float) -> str:
    return three_digits(rate) if rate else "0"


def describe(options: Namespace, replica: Replica, traffic: Traffic, slo: Slo) -> None:
    """The question, and what the answer stands on."""
    cost, model = replica.cost, replica.cost.model
    mean = float((traffic.prompts + traffic.outputs).mean())
    print(f"\n{model.name} ({model.parameters / 1e9:.2f} B parameters) on {hardware_of(replica)}")
    print(
        f"traffic    {traffic.name}: {len(traffic.prompts)} requests\n"
        f"           tokens of a prompt {describe_lengths(traffic.prompts)}, of an output"
        f" {describe_lengths(traffic.outputs)}"
    )
    if (count := len(traffic.prompts)) < FEW:
        say = f"Few: an interval from {count} requests says little; give {FEW} or more."
        print(f"           {say}")
    first = "" if slo.ttft == math.inf else f", P90 TTFT at most {1e3 * slo.ttft:.4g} ms"
    print(f"SLO        P99 TBT at most {1e3 * slo.tbt:.4g} ms{first}")
    if replica.cache_tokens is None:
        print(f"memory     {replica.max_batch_size} requests of up to {LENGTH} tokens")
    else:
        most = replica.cache_tokens / mean
        print(
            f"memory     {replica.cache_tokens} tokens of cache: {most:.0f} requests of the mean"
            f" {mean:.0f} tokens; at most {replica.max_batch_size} run at once"
        )
    if isinstance(cost, CalibratedModel):
        print(f"constants  measured here on {cost.calibration.date}: calibrate.py")
        return
    _, owner = gpu_of(options)
    guess = constants(owner, options.software or "vllm")[1]
    print(textwrap.fill(f"constants  {cost.efficiency.source}", 88, subsequent_indent=11 * " "))
    if options.gpu_spec:
        print(f"           A guess: all but memory, FLOPS and bandwidth is that of the {owner}.")
    if guess:
        print(textwrap.indent(textwrap.fill(f"A guess: {guess}.", 77), 11 * " "))


def describe_lengths(sizes: Sequence[int]) -> str:
    return f"{percentile(sizes, 50):.0f} (P90 {percentile(sizes, 90):.0f}, longest {max(sizes)})"


def hardware_of(replica: Replica) -> str:
    count = replica.gpus
    return f"{count} x {replica.cost.gpu.name}" if count > 1 else replica.cost.gpu.name


def print_answer(plan: Plan) -> None:
    best, replica, traffic = plan.best, plan.replica, plan.question.traffic
    low, high = min(plan.draws), max(plan.draws)
    load = best.load
    print(f"\ntoken budget   C = {best.budget}")
    print(
        f"capacity       {rounded(best.rate)} requests/s a replica ({replica.layout}),"
        f" {rounded(best.rate / replica.gpus)} a GPU"
    )
    print(f"               {len(plan.draws)} other samples: {rounded(low)} to {rounded(high)}")
    tokens = best.rate * float(traffic.outputs.mean())
    print(f"               {tokens:.0f} output tokens/s")
    if load:
        print(
            f"there          P99 TBT {1e3 * load.p99_tbt:.1f} ms, P90 TTFT"
            f" {1e3 * load.p90_ttft:.0f} ms"
        )
    for demand in plan.question.demands:
        line = f"{demand.who:<14} {who_holds(plan, demand)}"
        print(textwrap.fill(line, 88, subsequent_indent=15 * " "))
    if plan.question.demands:
        line = f"assumed        {plan.question.demands[0].gaps}; replicas share requests evenly"
        print(textwrap.fill(line, 88, subsequent_indent=15 * " "))


def who_holds(plan: Plan, demand: Demand) -> str:
    """How many replicas a load takes, and how much of their capacity it is."""
    capacity, low, busiest = plan.best.rate, min(plan.draws), demand.busiest

    def load(rate: float) -> str:
        percent = 100 * rate / (count * capacity)
        return f"{percent:.0f} %" if percent >= 1 else "less than 1 %"

    count = math.ceil(demand.rate / capacity)
    kind = f"replica{'s' * (count > 1)} of {plan.replica.layout}"
    if isinstance(plan.replica.cost, CalibratedModel):
        kind = f"machine{'s' * (count > 1)} like this"
    elif (gpus := count * plan.replica.gpus) > 1:
        kind += f" ({gpus} GPUs)"
    said = f"{rounded(demand.rate)} requests/s"
    said += f" (busiest minute {rounded(busiest)}/s)" if busiest else ""
    said += f": {count} {kind} hold{'s' * (count == 1)} this"
    said += f" at {load(demand.rate)} load"
    if busiest and busiest <= count * capacity:
        said += f", the busiest minute at {load(busiest)}"
    elif busiest:
        said += f". The busiest minute takes {math.ceil(busiest / capacity)}"
    if low and (more := math.ceil(demand.rate / low)) > count:
        said += f". With the lowest capacity of the other samples: {more}"
    return said


def print_tables(plan: Plan, loads: Sequence[Sequence[float]]) -> None:
    chosen = plan.curves[OURS]
    rows = []
    for budget, found in chosen.items():
        load = found.load
        cells = [rounded(found.rate)]
        cells += [f"{1e3 * load.p99_tbt:.1f}", f"{1e3 * load.p90_ttft:.0f}"] if load else ["-"] * 2
        rows.append([budget, *cells, "chosen" if budget == plan.best.budget else ""])
    header = ["C", "requests/s", "P99 TBT, ms", "P90 TTFT, ms", ""]
    print_table(header, rows, f"capacity over the token budget, {OURS}, to 5 %")
    rows = []
    for name, curve in plan.curves.items():
        best = max(curve.values(), key=lambda each: each.rate)
        share = f"{100 * best.rate / max(each.rate for each in chosen.values()):.0f} %"
        rows.append([name, "-" if 0 in curve else best.budget, rounded(best.rate), share])
    header = ["policy", "C", "requests/s", f"of {OURS}"]
    print_table(header, rows, "policies, each at its best budget, to 5 %")
    rows = []
    for place, replica in plan.question.replicas.items():
        found = plan.layouts[place]
        cells = [rounded(found.rate), rounded(found.rate / replica.gpus)]
        cells.append(str(replica.cache_tokens or "-"))
        rows.append([replica.layout, replica.gpus, found.budget, *cells])
    rows += [[f"TP{tp}-PP{pp}" if pp > 1 else f"TP{tp}", tp * pp, "-", "-", "-", why]
             for (tp, pp), why in plan.refused.items()]  # fmt: skip
    header = ["layout", "GPUs", "C", "requests/s", "a GPU", "tokens of cache"]
    print_table(header, rows, "other numbers of GPUs, each at its best budget, to 5 %")
    header = ["load", "requests/s", "P50 TTFT", "P90 TTFT", "P50 TBT", "P99 TBT", "mean batch"]
    rows = [
        [f"{100 * share:.0f} %", rounded(rate), *[three_digits(1e3 * each) for each in seconds],
         f"{batch:.0f}"]
        for share, rate, *seconds, batch in loads
    ]  # fmt: skip
    print_table(header, rows, f"latency at C = {plan.best.budget}, in ms")


def latencies(plan: Plan) -> list[tuple[float, ...]]:
    """At shares of the capacity, on the requests of a long run, without its start and its end.

    Each is: share, rate, P50 and P90 TTFT, P50 and P99 TBT (s), and the mean batch.
    """
    found = []
    for share in LOADS:
        rate = share * plan.best.rate
        requests = at_rate(plan.question.traffic.sample(plan.best.requests), rate)
        trace = plan.replica.serve(requests, OURS, plan.best.budget)
        gaps, _, firsts = steady_times(trace)
        numbers = [percentile(firsts, 50), percentile(firsts, 90)]
        numbers += [percentile(gaps, 50), percentile(gaps, 99)]
        found.append((share, rate, *numbers, trace.mean_batch_size))
    return found


def print_engines(options: Namespace, plan: Plan) -> None:
    model, best = plan.replica.cost.model, plan.best
    name = options.model if options.model not in MODELS else f"YOUR-{model.name}"
    longest = int((plan.question.traffic.prompts + plan.question.traffic.outputs).max())
    quoted = shlex.quote(name)
    place = len(quoted) * "M"  # until the line is wrapped: the name may have blanks
    flags = engine_flags(
        place, best.budget, plan.replica.max_batch_size, plan.replica.cost.tp, plan.replica.stages,
        longest,
    )  # fmt: skip
    print("\nThe same in other engines:")
    for engine, line in flags.items():
        parts = textwrap.wrap(line, 88, break_on_hyphens=False, break_long_words=False)
        named = [part.replace(place, quoted) for part in parts]
        print(f"\n{engine}:\n  " + " \\\n    ".join(named))


def draw(plan: Plan, loads: Sequence[Sequence[float]]) -> plt.Figure:
    figure, [[cliff, gpus, latency]] = panels(1, 3, 8, 6.5)
    looks = looks_of(list(plan.curves))
    for name, curve in plan.curves.items():
        colour, marker = looks[name]
        if 0 in curve:
            style = {"color": colour, "linestyle": "--", "linewidth": 1.5}
            cliff.axhline(curve[0].rate, label=f"{name} (no budget)", **style)
        else:
            rates = [each.rate for each in curve.values()]
            cliff.plot(list(curve), rates, color=colour, marker=marker, label=name)
    best = plan.best
    cliff.plot([best.budget], [best.rate], "*", color="white", markeredgecolor="black",
               markersize=20, zorder=5, label=f"chosen: C = {best.budget}")  # fmt: skip
    cliff.set_xscale("log", base=2)
    budgets = list(plan.curves[OURS])
    cliff.set_xticks(budgets, list(map(str, budgets)), rotation=60)
    cliff.set(xlabel="token budget C", ylabel="requests per second", ylim=(0, 1.5 * best.rate),
              title="capacity over the token budget")  # fmt: skip
    cliff.legend(fontsize=10, ncols=2, loc="upper left")
    bars = {}
    for number, (place, replica) in enumerate(plan.question.replicas.items()):
        bars[number] = plan.layouts[place].rate / replica.gpus
    labelled_bars(gpus, bars, 0.7, color=LOOKS[OURS][0])
    names = [replica.layout for replica in plan.question.replicas.values()]
    gpus.set_xticks(range(len(names)), names)
    gpus.set(ylabel="requests per second and GPU", title="capacity per GPU, by layout")
    slo, rates = plan.question.slo, [rate for _, rate, *_ in loads]
    p90, p99 = ([1e3 * each[place] for each in loads] for place in (3, 5))
    latency.plot(rates, p99, "o-", color=COLOURS["blue"], label="P99 TBT")
    latency.plot(rates, p90, "s-", color=COLOURS["vermilion"], label="P90 TTFT")
    latency.axhline(1e3 * slo.tbt, color=COLOURS["blue"], linestyle=":", label="SLO of the TBT")
    if slo.ttft != math.inf:
        style = {"color": COLOURS["vermilion"], "linestyle": ":"}
        latency.axhline(1e3 * slo.ttft, label="SLO of the TTFT", **style)
    style = {"color": "black", "linestyle": "--", "linewidth": 1.2}
    latency.axvline(best.rate, label=f"capacity: {rounded(best.rate)}", **style)
    latency.set_yscale("log")
    latency.set(xlabel="requests per second", ylabel="ms", title="latency below the capacity")
    latency.legend()
    cost = plan.replica.cost
    figure.suptitle(
        f"{cost.model.name} on {hardware_of(plan.replica)}, {plan.question.traffic.name}: P99 TBT"
        f" at most {1e3 * slo.tbt:.4g} ms (predicted)",
        fontsize=18,
    )
    return figure


def points_of(plan: Plan) -> Record:
    """Rows of plan.csv."""
    record = Record(NAME, plan.replica.cost.model.name, hardware_of(plan.replica))
    record.add("SLO, P99 TBT", plan.question.slo.tbt, "s")
    record.add(f"capacity, {plan.replica.layout}", plan.best.rate, "requests/s", plan.best.budget,
               "C")  # fmt: skip
    for demand in plan.question.demands:
        record.add(f"{demand.who}, mean", demand.rate, "requests/s")
        if demand.busiest:
            record.add(f"{demand.who}, busiest minute", demand.busiest, "requests/s")
    for number, rate in enumerate(plan.draws):
        record.add("capacity, other samples", rate, "requests/s", number, "sample")
    for name, curve in plan.curves.items():
        for budget, found in curve.items():
            record.add(f"{name}, to 5 %", found.rate, "requests/s", budget, "C")
    for place, found in plan.layouts.items():
        layout = plan.question.replicas[place].layout
        record.add(f"layout {layout}", found.rate, "requests/s", found.budget, "C")
    for rate, load in sorted(plan.best.loads.items()):
        record.add("P99 TBT", load.p99_tbt, "s", rate, "requests/s")
        record.add("P90 TTFT", load.p90_ttft, "s", rate, "requests/s")
    return record


# --------------------------------------------------------------------------------------------- main


def replicas_of(
    options: Namespace, model: ModelConfig, longest: int
) -> tuple[dict[tuple[int, int], Replica], dict[tuple[int, int], str]]:
    """The layouts that are compared, and why others are not. `longest`: request, in tokens."""
    here, found, refused = (options.tp, options.pp), {}, {}
    for place in dict.fromkeys([here, *((tp, 1) for tp in TP), *((options.tp, pp) for pp in PP)]):
        try:
            replica = replica_of(options, model, *place)
        except UserError as error:
            if place == here:
                raise
            refused[place] = "does not fit" if "do not fit" in str(error) else "does not divide"
            continue
        if place != here and replica.cache_tokens < longest:
            refused[place] = "too small"
        else:
            found[place] = replica
    return dict(sorted(found.items(), key=lambda item: item[0][::-1])), refused


def read_options(arguments: Sequence[str] | None = None) -> Namespace:
    return parse(make_parser(__doc__, FLAGS), FLAGS, arguments)


def prepare(options: Namespace) -> tuple[Question, dict[tuple[int, int], str]]:
    """The question, and why some layouts are left out. All mistakes of the user's are said here."""
    model, (name, requests, from_file) = model_of(options.model), requests_of(options)
    place = options.tp, options.pp
    if options.gpu == HERE:
        replica = replica_here(options, model)
    elif options.calibration is not None:
        raise UserError(f"--calibration needs --gpu {HERE}")
    else:
        replica = replica_of(options, model, *place)
    fitting = that_fit(requests, replica)
    traffic, demands = Traffic.of(name, fitting), demands_of(options, fitting, from_file)
    longest = int((traffic.prompts + traffic.outputs).max()) - 1
    replicas, refused = {place: replica}, {}
    if options.gpu != HERE:
        replicas, refused = replicas_of(options, model, longest)
    tbt, ttft = STRICT * decode_iteration(replica), math.inf
    if options.tbt_slo:
        tbt = options.tbt_slo / 1e3
    if options.ttft_slo:
        ttft = options.ttft_slo / 1e3
    sizes, step = (SMALL_BUDGETS, SMALL_BUDGETS[0]) if options.gpu == HERE else (BUDGETS, TILE)
    sizes = sizes[:: 3 if options.quick else 1]
    return Question(replicas, traffic, Slo(tbt, ttft), sizes, step, demands), refused


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


def decode_iteration(replica: Replica) -> float:
    """Seconds of a batch of 32 decodes, or of as many as run at once."""
    decodes = min(DECODES, replica.max_batch_size)
    context = min(CONTEXT, replica.cost.model.max_length)
    return replica.cost.seconds(make_batch(decodes=decodes, context=context))


def main() -> None:
    options, begin = read_options(), time.monotonic()
    gc.disable()  # a run leaves many small objects and no cycles
    make_directory(options.out, NAME, None, options.force)
    question, refused = prepare(options)
    place = options.tp, options.pp
    replica = question.replicas[place]
    describe(options, replica, question.traffic, question.slo)
    first = first_answer(question, place)
    print(
        f"\nfirst answer   C = {first.budget}: about {rounded(first.rate)} requests/s"
        f" ({time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    plan = search(question, place, policies_of(options.policy), refused)
    print_answer(plan)
    loads = latencies(plan)
    print_tables(plan, loads)
    print_engines(options, plan)
    software = {} if options.gpu_spec else {replica.cost.gpu.name: options.software or "vllm"}
    finish(options, NAME, points_of(plan), lambda: draw(plan, loads), software)
    print(f"in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    run_main(main)
