"""What your model serves on your GPU, under your SLO and your traffic: predicted, in seconds.

    python plan.py --model llama3.1-8b --gpu a100-80gb --requests-file trace.csv --tbt-slo 50
    python plan.py --model DIR --gpu h100 --tp 2 --slo tpot:p95:30 --slo ttft:p90:1000
    python plan.py --gpu-spec 24,165,1008 --requests-file 1000:200
        a GPU of no table (GB, TFLOPS, GB/s); all requests with 1000 prompt and 200 output tokens
    python plan.py --gpu h100 --model llama3.1-8b --requests-file chat --anchor bench.json --rate 20
        scaled to your own server: `vllm bench serve --save-result`, SGLang's or guidellm's file

The answer: a token budget, its capacity, what that is worth, the command lines of engines. --tables
adds what it is compared with. Each part is printed once known.
more/serving/planner.py says how it searches; docs/planner.md what the answer is worth.
"""

import command.enter  # noqa: F401

import gc
import re
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batch import Request
from command.checks import UserError, did_you_mean
from command.cli import run_main
from command.flags import Flag
from configs import GPUS, ModelConfig, gpu_named
from costmodel import SOFTWARE, constants, make_batch
from experiments.lib.common import run_jobs
from experiments.lib.flags import POLICIES as POLICY_FLAGS
from experiments.lib.flags import ScriptParser, gpu_flag, make_directory, model_flag
from experiments.lib.plan_names import (
    SLO_FLAGS,
    budgets_tried,
    check_together,
    demands_of,
    gpu_of,
    link_of,
    requests_of,
    slo_of,
    that_fit,
)
from experiments.lib.plan_report import (
    NAME,
    PARTS,
    describe,
    print_anchor,
    print_engines,
    print_first,
    save,
)
from more.loading.priced import priced_model
from more.serving.anchor import anchor_of, anchored, scaled
from more.serving.capacity import Deployment
from more.serving.comparison import (
    SLOWER,
    TABLES,
    Demand,
    Question,
    fits,
    policies_of,
    search,
)
from more.serving.planner import MOST, Traffic
from more.serving.search import percentile

REQUESTS = 2048  # that are drawn, where no file has them
TP = (1, 2, 4, 8)
PP = (2, 4)
# of a GPU's memory: vLLM's default for years; today's is 0.92 (more/serving/engines.py)
UTILIZATION = 0.9
WEIGHTS = ("bf16", "fp8")
CACHE = "cache-"  # before a format of WEIGHTS, in a word of --beside: of keys and values
LAYOUT = re.compile("tp([1-9][0-9]{0,2})(?:-pp([1-9][0-9]{0,2}))?")
ASYNC = "vllm-async"  # the host of today's vLLM
FLAGS = {
    "model": model_flag("mistral-7b"),
    "weights": Flag("", shown="as in config.json, or bf16", choices=WEIGHTS),
    "cache_dtype": Flag("", shown="as in config.json, or bf16", choices=WEIGHTS),
    "gpu": gpu_flag("a100-80gb"),
    "gpu_spec": Flag(),
    "tp": Flag("", 1),
    "pp": Flag("", 1),
    "link": Flag(
        "what joins the GPUs: a name of configs/gpus.py; or the bus bandwidth of an"
        " all-reduce, as nccl-tests prints it, in GB/s",
        shown="the GPU's own",
    ),
    "software": Flag("", shown="vllm", choices=SOFTWARE),
    "memory_utilization": Flag("", shown=str(UTILIZATION)),
    "cache_tokens": Flag(
        "tokens of cache of the replica, instead: of an engine's own log, such as"
        ' "GPU KV cache size: N tokens"'
    ),
    "requests_file": Flag(
        "traffic: a CSV, JSON or JSONL file of arrivals, prompts and outputs; or"
        " chat, arxiv, or P:N tokens of every request",
        shown="chat",
    ),
    "requests": Flag("requests that are drawn, where the traffic is no file", REQUESTS, 256),
    "seed": Flag(default=0),
    **SLO_FLAGS,
    "rate": Flag("requests per second that you expect: how many replicas hold them?"),
    "max_batch_size": Flag("requests that run at once, at most C", shown="256"),
    "chunk_size": Flag("token budgets that are tried", shown="several, by the SLO", several=True),
    "anchor": Flag(
        "your own server: the file of vllm bench serve --save-result, of SGLang's"
        " bench_serving, or of guidellm. All times are scaled to it"
    ),
    **POLICY_FLAGS,
    "policy": Flag(
        "a policy to compare; all: every one",
        shown="all but SARATHI's heirs; those of --policy-file, if it is given",
        repeated=True,
    ),
    "tables": Flag(
        "also: other samples of the traffic, latencies against the load, layouts of GPUs, policies",
        (),
        shown="none; policies with --policy or --policy-file",
        choices=(*TABLES, "all"),
        several=True,
    ),
    "beside": Flag(
        "another replica side by side, at the same SLO: a GPU, a layout, a format of the weights or"
        " of the cache, or several of them: h100, tp2, tp2-pp2, fp8, cache-fp8, h100:tp2:fp8",
        repeated=True,
    ),
    "prefix_caching": Flag(
        "also: your requests with prefix caching and without, where the file says what prompts"
        " share (hash_ids, or a session_id of each chat)"
    ),
    "out": Flag("also the tables as a picture and a CSV: plan.png and plan.csv", shown="none"),
    "force": Flag(),
    "quick": Flag(),
}


def replica_of(options: Namespace, model: ModelConfig, tp: int, pp: int) -> Deployment:
    """`tp` GPUs in each of `pp` stages. Raises UserError if the model does not fit, or divide."""
    gpu, owner = gpu_of(options)
    software = options.software or "vllm"
    host, deal = (ASYNC, "ahead") if software == "vllm" else ("none", "queue")
    size = options.max_batch_size or 256
    link = link_of(options, gpu)
    share = options.memory_utilization or UTILIZATION
    replica = Deployment(
        model,
        tp,
        gpu,
        pp,
        link,
        link,
        size,
        size,
        host,
        deal,
        software,
        efficiency=constants(owner, software)[0] if options.gpu_spec else None,
        utilization=share,
    )
    if options.cache_tokens and (tp, pp) == (options.tp, options.pp):
        return replace(replica, cache=options.cache_tokens, utilization=None)
    if not replica.holds(least := budgets_tried(options)[0]):
        if replica.holds(1):
            raise UserError(f"--chunk-size {least}: its activations do not fit; give fewer tokens")
        raise UserError(
            f"{model.name}: {model.weight_bytes() / 2**30:.1f} GiB of weights, and activations, do"
            f" not fit {100 * share:g} % of {tp * pp} x"
            f" {(gpu.card or gpu.memory) / 2**30:.1f} GiB: give more GPUs with --tp or"
            " --pp, or a larger --memory-utilization"
        )
    return replica


def replicas_of(
    options: Namespace, model: ModelConfig, traffic: Traffic
) -> tuple[dict[tuple[int, int], Deployment], dict[tuple[int, int], str]]:
    """The layouts that are compared, and why others are not."""
    here = (options.tp, options.pp)
    found = {}
    refused = {}
    for place in dict.fromkeys([here, *((tp, 1) for tp in TP), *((options.tp, pp) for pp in PP)]):
        try:
            replica = replica_of(options, model, *place)
        except UserError as error:
            if place == here:
                raise
            refused[place] = "does not fit" if "do not fit" in str(error) else "does not divide"
            continue
        if place != here and not fits(replica.holds(budgets_tried(options)[0]), traffic):
            refused[place] = "too small"
        else:
            found[place] = replica
    return dict(sorted(found.items(), key=lambda item: item[0][::-1])), refused


def part_of(word: str, part: str) -> tuple[str, object]:
    """What a part of a --beside names, and its value. Raises UserError."""
    if layout := LAYOUT.fullmatch(part):
        return "layout", (int(layout[1]), int(layout[2] or 1))
    if part in WEIGHTS:
        return "weights", part
    form = part.removeprefix(CACHE)
    if form in WEIGHTS:
        return "cache", form
    name = gpu_named(part) if part else ""
    if name in GPUS:
        return "GPU", name
    near = did_you_mean(part, [*GPUS, *(CACHE + form for form in WEIGHTS)])
    raise UserError(
        f"--beside {word}: {part!r} is no GPU, no layout (tp2, tp2-pp2) and no format (fp8,"
        f" bf16, cache-fp8, cache-bf16){near}"
    )


def beside_of(
    options: Namespace, word: str, replicas: Mapping[tuple[int, int], Deployment], traffic: Traffic
) -> Deployment:
    """The replica of a --beside. What the word leaves out is as in the question."""
    found: dict[str, object] = {}
    for part in word.lower().split(":"):
        kind, value = part_of(word, part)
        if kind in found:
            raise UserError(f"--beside {word}: it names its {kind} twice")
        found[kind] = value
    place = found.get("layout", (options.tp, options.pp))
    gpu, weights, cache = (found.get(name, "") for name in ("GPU", "weights", "cache"))
    if options.anchor and (gpu or weights or cache):
        raise UserError(f"--beside {word}: an anchor says nothing of it; give a layout, as tp2")
    if not (gpu or weights or cache) and place in replicas:
        return replicas[place]
    own = vars(options) | {"cache_tokens": None, "tp": place[0], "pp": place[1]}
    own |= {"gpu": gpu, "gpu_spec": None, "link": None} if gpu else {}
    own["weights"] = weights or options.weights
    own["cache_dtype"] = cache or options.cache_dtype
    model = priced_model(options.model, own["weights"], own["cache_dtype"])
    replica = replica_of(Namespace(**own), model, *place)
    if not fits(least := replica.holds(budgets_tried(options)[0]), traffic):
        raise UserError(f"--beside {word}: the longest request does not fit its {least} tokens")
    return replica


def shared_of(
    options: Namespace, requests: Sequence[Request], demands: Sequence[Demand]
) -> Sequence[Request]:
    """With --prefix-caching, the requests. Raises UserError where they share nothing."""
    if not options.prefix_caching:
        return ()
    if options.pp > 1:
        raise UserError("--prefix-caching: it is simulated on one stage; leave --pp out")
    if all(isinstance(each.prompt, range) for each in requests):
        raise UserError(
            "--prefix-caching: these requests do not say what their prompts share; give a"
            " --requests-file with hash_ids, or with a session_id of each chat"
        )
    if not demands:
        raise UserError("--prefix-caching: the file has no times; give --rate")
    return requests[:MOST]


def read_options(arguments: Sequence[str] | None = None) -> Namespace:
    return ScriptParser(__doc__, FLAGS).parse_args(arguments)


def prepare(options: Namespace) -> tuple[Question, dict[tuple[int, int], str]]:
    """The question, and why some layouts are left out. All mistakes of the user's are said here."""
    model = priced_model(options.model, options.weights, options.cache_dtype)
    name, requests, from_file = requests_of(options)
    place = options.tp, options.pp
    check_together(options)
    if options.pp > model.n_layer:
        raise UserError(f"--pp is {options.pp}, and {model.name} has {model.n_layer} layers")
    replica = replica_of(options, model, *place)
    fitting = that_fit(requests, replica, (sizes := budgets_tried(options))[0])
    traffic = Traffic.of(name, fitting)
    demands = demands_of(options, fitting, from_file)
    replicas, refused = replicas_of(options, model, traffic)
    anchor = None
    if options.anchor:
        anchor = anchor_of(options.anchor, replica)
        replicas = {at: anchored(anchor, replica, each) for at, each in replicas.items()}
        replica = replicas[place]
    cost = replica.cost_model
    long = round(percentile(traffic.prompts, 90))
    prompt = make_batch([(0, long, long)])
    slo = slo_of(options, cost.seconds(replica.decodes), cost.seconds(prompt))
    beside = [beside_of(options, word, replicas, traffic) for word in options.beside or ()]
    slower = scaled(replica, SLOWER * replica.cost_model.host.factor)
    named = bool(options.chunk_size)
    shared = shared_of(options, fitting, demands)
    asked = Question(replicas, slower, traffic, slo, sizes, demands, anchor, named, shared, beside)
    return asked, refused


def main() -> None:
    options = read_options()
    begin = time.monotonic()
    gc.disable()  # a run leaves many small objects and no cycles
    if options.out:
        make_directory(options.out, NAME, force=options.force)
    question, refused = prepare(options)
    place = options.tp, options.pp
    replica = question.replicas[place]
    if question.anchor:
        print_anchor(question.anchor, replica)
    describe(options, replica, question.traffic, question.slo)
    tables = [*(TABLES if "all" in options.tables else options.tables)]
    if options.policy and "policies" not in tables:
        tables.append("policies")
    policies = policies_of(options.policy)
    for part, plan in search(question, place, tables, policies, refused, run_jobs):
        PARTS[part](plan)
        if part == "answer":
            print_engines(options, plan)
            if not question.anchor:
                print_first(options, replica, question.traffic)
            more = "" if tables else f" More: --tables {' '.join(TABLES)}, or all."
            print(f"\nin {time.monotonic() - begin:.0f} s.{more}")
            print("Prefill and decode on GPUs of their own: docs/apart.md compares.")
        sys.stdout.flush()
    if options.out:
        save(plan, options.out / f"{NAME}.csv")
    if tables:
        print(f"\nin {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    run_main(main)
