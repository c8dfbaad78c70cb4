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

import command.enter  # noqa: F401

import gc
import math
import os
import re
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from batch import Request
from command.checks import UserError, did_you_mean, lookup
from command.cli import ROOT, run_main
from command.flags import Flag
from configs import GPU, GPUS, LINKS, MODELS, ModelConfig
from costmodel import SOFTWARE, TILE, CostModel, constants, make_batch, tokens_that_fit
from experiments.lib.common import run_jobs
from experiments.lib.flags import POLICIES as POLICY_FLAGS
from experiments.lib.flags import WRITES, ScriptParser, make_directory
from experiments.lib.papers import ARXIV, CHAT
from experiments.lib.plan_report import (
    NAME,
    draw,
    hardware_of,
    print_answer,
    print_engines,
    print_tables,
    rounded,
    rows_of,
)
from experiments.lib.study import finish
from loading.config_json import load_config
from serving.calibration import BATCH_SIZE, LENGTH, RESULTS, CalibratedModel, Calibration
from serving.capacity import CONTEXT, DECODES, STRICT, percentile
from serving.comparison import (
    Demand,
    Job,
    Question,
    first_answer,
    latencies,
    policies_of,
    search,
)
from serving.planner import BUDGETS, SMALL_BUDGETS, Found, Replica, Slo, Traffic
from serving.traffic import Fixed, busy_times, make_requests, poisson, read_trace

HERE = "here"  # --gpu: this machine
REQUESTS = 2048  # that are drawn, where no file has them
FEW = 100  # requests of a trace; fewer give an interval that says little
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
    **WRITES,
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
    # os.path's: a user without a home has no such file, and is no error
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
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
    return ScriptParser(__doc__, FLAGS).parse_args(arguments)


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


def on_all_cores(
    answer: Callable[[Job], Found], jobs: Sequence[Job], what: str
) -> dict[Job, Found]:
    processes = min(os.cpu_count() or 1, len(jobs))
    return run_jobs(answer, jobs, processes, what, initializer=gc.disable)


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
    plan = search(question, place, policies_of(options.policy), refused, on_all_cores)
    print_answer(plan)
    loads = latencies(plan)
    print_tables(plan, loads)
    print_engines(options, plan)
    finish(options.out / f"{NAME}.csv", rows_of(plan), lambda rows: draw(plan, loads))
    print(f"in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    run_main(main)
