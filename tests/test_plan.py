"""plan.py: the printed capacity is one, its interval is honest, and mistakes are one line.

The conversation trace is the committed sample.
"""

import gc
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from shared import call

import plan
from batch import Request
from command.checks import UserError
from configs import GPUS, MODELS, gpu_named
from configs.constants import WAIT
from configs.hosts import HOSTS
from costmodel import make_batch, tokens_that_fit
from experiments.lib import plan_report
from experiments.lib.plan_names import counter_of, slo_of
from experiments.lib.plan_report import (
    ANCHORED,
    cache_words,
    error_of,
    errors_said,
    link_words,
    rounded,
    who_holds,
)
from experiments.lib.rows import read_rows
from more import fast_forward
from more.loading.priced import shape_of
from more.pipeline import simulate_pipeline
from more.policies import compared
from more.serving import capacity, comparison, planner
from more.serving.capacity import PER_REQUEST, PERCENTS, Bound, Deployment, Load, Slo
from more.serving.comparison import Demand, Plan, Question, fits, too_strict
from more.serving.planner import BUDGETS, EXACT, Found, Traffic
from more.serving.search import largest_rate
from more.serving.traffic import Fixed, at_rate, make_requests, poisson, read_trace
from more.simulate import simulate
from timeline import Trace

ROOT = Path(__file__).parent.parent
# The config.json of Llama-3-8B: what prices it.
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "vocab_size": 128256,
}  # fmt: skip
TRACE = ROOT / "experiments" / "azure_conv_2023_sample.csv"
OURS = "sarathi_serve"
SLO = Slo.of(0.05)

ONE_CORE = "experiments.lib.common.cores", lambda: 1


@pytest.fixture(scope="module", autouse=True)
def garbage_is_collected_again() -> Iterator[None]:
    """plan.py turns it off."""
    yield
    gc.enable()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("my models") / "Llama 3, mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA3), encoding="utf-8")
    return folder


@cache
def population() -> list[Request]:
    return read_trace(TRACE)


def replica(llama: Path, gpu: str = "a100-80gb", tp: int = 1, stages: int = 1) -> Deployment:
    memory = tokens_that_fit(plan.priced_model(str(llama)), GPUS[gpu], tp) * stages
    return Deployment(
        str(llama),
        tp,
        gpu,
        stages,
        None,
        "pcie4",
        max_batch_size=256,
        software="vllm",
        cache=memory,
    )


def load_at(of: Deployment, traffic: Traffic, budget: int, rate: float, share: float = 1.0) -> Load:
    """In a run as the plan has it, at a share of the capacity `rate`."""
    requests = at_rate(traffic.sample(planner.enough(rate, EXACT, traffic)), share * rate)
    return Load.steady(of.serve(requests, OURS, budget))


# ------------------------------------------------------------------------------------- the search


@pytest.mark.parametrize("start", [0.01, 1.0, 3.1, 900.0])
@pytest.mark.parametrize("precision", [1.025, 1.1, 1.5])
def test_every_start_finds_the_same_rate(start: float, precision: float) -> None:
    tried = []

    def served(rate: float) -> bool:
        tried.append(rate)
        return rate <= 3.7

    found = largest_rate(served, precision, start, 1.2)
    assert found <= 3.7 < found * precision
    assert found == largest_rate(lambda rate: rate <= 3.7, precision)
    assert len(set(tried)) == len(tried), "no rate twice"


def test_a_sample_is_of_the_traffic() -> None:
    traffic = Traffic.of("trace", population())
    whole = traffic.sample(len(population()))
    assert [len(each.prompt) for each in whole] == [len(each.prompt) for each in population()]
    assert traffic.gaps.mean() == pytest.approx(1)
    for seed in (None, 1):
        more = traffic.sample(5000, seed)
        again = traffic.sample(5000, seed)
        assert [each.max_tokens for each in more] == [each.max_tokens for each in again]
        assert [each.request_id for each in more] == list(range(5000))
        assert more[-1].arrival == pytest.approx(5000, rel=0.2)
    few = [len(each.prompt) for each in traffic.sample(256)]
    assert few != [len(each.prompt) for each in whole[:256]], "spread over the whole, not its start"
    assert traffic.sample(300, 1)[7].max_tokens != traffic.sample(300, 2)[7].max_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "tp", "slo"),
    [
        ("a100-80gb", 1, Slo.of(0.05, 0.5)),
        ("h100", 2, Slo.of(0.03)),
        ("h100", 1, Slo((Bound("tpot", 95, 0.015),))),
    ],
)
def test_the_capacity_meets_the_slo_and_more_does_not(
    llama: Path, gpu: str, tp: int, slo: Slo
) -> None:
    of = replica(llama, gpu, tp)
    traffic = Traffic.of("trace", population())
    found = planner.find_capacity(of, traffic, slo, OURS, 512, EXACT)
    assert found.load and found.load.meets(slo)
    assert load_at(of, traffic, 512, found.rate).meets(slo)
    assert not load_at(of, traffic, 512, found.rate, 1.1).meets(slo)


@pytest.mark.parametrize(
    "rates",
    [
        {128: 1.0, 256: 1.0, 512: 2.0, 1024: 0.5},  # a plateau is no peak
        {128: 1.0, 512: 2.0, 1024: 0.5, 2048: 0.52},  # nor is what grows beyond the cliff
    ],
)
def test_the_climb_ends_at_the_best(rates: dict[int, float]) -> None:
    def find(*asked: object, **_: float) -> Found:
        return Found(rates[asked[4]], asked[4])

    with mock.patch("more.serving.planner.find_capacity", find):
        for first in rates:
            assert planner.best_budget(*[None] * 4, list(rates), 1.05, first).budget == 512


@pytest.mark.parametrize("missed", ["tbt", "tpot"])
def test_why_no_rate_meets_the_bounds(llama: Path, missed: str) -> None:
    """The one is named that requests miss even if they are served one at a time."""
    limits = dict.fromkeys(("tbt", *PER_REQUEST), 200) | {missed: 1}
    slo = Slo(tuple(Bound(name, 95, each / 1e3) for name, each in limits.items()))
    of = replica(llama)
    traffic = Traffic.of("x", make_requests(poisson(8, 1.0), Fixed(900), Fixed(5)))
    said = too_strict(Question({(1, 1): of}, of, traffic, slo, (128, 2048)), (1, 1))
    reason = rf": the P95 {missed.upper()} of requests that are served one at a time is [\d.]+ ms;"
    assert re.search(reason, said) and said.count("one at a time") == 1


def test_one_kind_of_bound_for_all_flags() -> None:
    """A short flag is one of --slo's; the default holds where neither TBT nor TPOT is bounded."""

    def of(*flags: str) -> Slo:
        return slo_of(plan.read_options(flags), 0.01, 0.1)

    late = Bound("ttft", 90, 2.0)
    assert of("--slo", "tbt:p99:50") == of("--tbt-slo", "50") == Slo((*SLO.bounds, late))
    longer = slo_of(plan.read_options(["--tbt-slo", "50"]), 0.01, 0.7)
    assert longer.bounds[-1].seconds == pytest.approx(3.5), "of a prompt that takes long alone"
    assert of("--slo", "e2e:p50:9").bounds[-1].quantity == "e2e", "which has a TTFT in it"
    assert of("--slo", "ttft:p90:500") == (both := Slo.of(0.05, 0.5))
    assert str(both) == "P99 TBT at most 50 ms, P90 TTFT at most 500 ms" and both.gap == 0.05
    assert of("--slo", "tbt:p95:50").gap == float("inf"), "single long gaps are allowed"
    assert of("--slo", "tpot:p95:30") == Slo((Bound("tpot", 95, 0.03), late))


def test_a_load_knows_what_any_slo_needs(llama: Path) -> None:
    """Percentiles rise; a token alone has no TPOT; all bounds count, and the queue."""
    lengths = [(100 + 97 * i % 900, max(1, i % 40 - 25)) for i in range(60)]
    requests = [Request(i, range(p), n, arrival=0.05 * i) for i, (p, n) in enumerate(lengths)]
    load = Load.of(replica(llama).serve(requests, OURS, 256))
    for quantity in ("tbt", *PER_REQUEST):
        values = [load.value(quantity, percent) for percent in PERCENTS]
        assert 0 < values[0] and values == sorted(values), "a bound is strictest at P99"
    bounds = [Bound(name, 50, load.value(name, 50)) for name in PER_REQUEST]
    slo = Slo(tuple(bounds))
    assert load.meets(slo) and not replace(load, median_delay=2.1).meets(slo)
    for each in bounds:
        less = replace(each, seconds=0.99 * each.seconds)
        assert not load.meets(Slo(tuple(less if each is other else other for other in bounds)))


@cache
def whole_run(of: Deployment, rate: float) -> Trace:
    """Of 224 requests, without an end before the last."""
    requests = at_rate(Traffic.of("trace", population()).sample(224), rate)
    return of.serve(requests, OURS, 512)


@pytest.mark.parametrize(
    ("bound", "stages"),
    [("e2e:p99:1e6", 1), *product(("tbt:p99:30", "ttft:p90:300"), (1, 2))],
)
def test_a_run_that_is_left_would_have_missed(llama: Path, stages: int, bound: str) -> None:
    """A search leaves runs that surely miss the SLO: never one that could still be served."""
    of = replica(llama, stages=stages)
    traffic = Traffic.of("trace", population())
    left = []
    slo = slo_of(plan.read_options(["--slo", "tbt:p99:1e6", "--slo", bound]), 1.0, 0.1)
    for rate in (1.0, 8.0, 16.0, 1e6):
        whole = whole_run(of, rate)
        requests = at_rate(traffic.sample(224), rate)
        part = of.serve(requests, OURS, 512, over=capacity.overload_of(requests, slo, 256))
        left.append(len(part.finished) < 224)
        if left[-1]:
            assert not Load.steady(whole).meets(slo)
            assert len(part.iterations) < len(whole.iterations)
        else:
            assert Load.steady(part).tbts == Load.steady(whole).tbts
    assert left == sorted(left) and left[0] < left[-1]
    assert stages == 2 or left[-2] == (bound != "e2e:p99:1e6"), "for more than its queue"


@pytest.mark.parametrize("policy", compared())
@pytest.mark.parametrize("cache_tokens", [3000, 10**6])
def test_fast_forward_changes_no_bit(policy: str, cache_tokens: int) -> None:
    """Of any policy, where the cache is full, and in a closed loop."""
    of = Deployment("mistral-7b", gpu="h100", software="vllm", orca_batch_size=8, max_batch_size=8)
    of = replace(of, cache=cache_tokens)
    for clients in (None, 6):
        seen = []
        for known in (fast_forward.COUNTED, set()):
            requests = at_rate(Traffic.of("trace", population()).sample(48), 3.0)
            with mock.patch.object(fast_forward, "COUNTED", known):
                trace = of.serve(requests, policy, 256, clients)
            lives = [
                (*map(attrgetter(name), trace.lives.values()),)
                for name in ("tokens", "finished", "scheduled", "preemptions")
            ]
            seen.append((trace.iterations, lives, trace.finished, trace.preempted))
        assert seen[0] == seen[1]
        assert max(each.num_decodes for each in trace.iterations) <= (clients or 8)


# ------------------------------------------------------------------------------------- the command


def demands(*flags: object) -> list[Demand]:
    words = ["--model", "mistral-7b", "--tbt-slo", "50", *map(str, flags)]
    return plan.prepare(plan.read_options(words))[0].demands


def trace_of(path: Path, arrivals: list[float]) -> Path:
    lines = [f"{arrival},{100 + i},10" for i, arrival in enumerate(arrivals)]
    path.write_text("\n".join(["arrival,prompt_tokens,output_tokens", *lines, ""]))
    return path


def test_whose_rate_is_judged(tmp_path: Path) -> None:
    """The trace's own, if it has times; and that of --rate. Made-up traffic has none."""
    arrivals = [10.0 * i for i in range(31)] + [300.5, 301.0, 359.0]
    times = trace_of(tmp_path / "times.csv", arrivals)
    (own,) = demands("--requests-file", times)
    assert own.who == "your trace" and "gaps of your trace" in own.gaps
    assert own.rate == pytest.approx(33 / 359)
    assert own.busiest == pytest.approx(8 / 60), "from 250 s on"
    own, expected = demands("--requests-file", times, "--rate", 4)
    assert (expected.who, expected.rate, expected.busiest) == ("you expect", 4.0, None)
    assert expected.gaps == own.gaps
    (short,) = demands("--requests-file", trace_of(tmp_path / "short.csv", [0, 1, 3, 4]))
    assert short.rate == 0.75 and short.busiest is None, "no whole minute"
    once = trace_of(tmp_path / "once.csv", [0.0, 0.0, 0.0])
    assert demands("--requests-file", once) == demands("--requests-file", "100:10") == []
    (even,) = demands("--requests-file", once, "--rate", 2)
    (drawn_ones,) = demands("--requests-file", "100:10", "--requests", 32, "--rate", 2)
    assert even.gaps == "even gaps: the file has no times"
    assert drawn_ones.gaps == "Poisson arrivals"


@pytest.mark.parametrize(
    ("rate", "busiest", "tp", "said"),
    [
        (
            17.0,
            40.0,
            1,
            (
                "17.0 requests/s (busiest minute 40.0/s): 2 replicas of TP1 (2 GPUs) hold"
                " this at 53 % load. The busiest minute takes 3 replicas"
            ),
        ),
        (
            15.5,
            None,
            2,
            (
                "15.5 requests/s: 1 replica of TP2 (2 GPUs) holds this at 97 % load. With"
                " iterations 5 % slower: 2 replicas"
            ),
        ),
    ],
)
def test_how_many_replicas_hold_a_rate(
    rate: float, busiest: float | None, tp: int, said: str
) -> None:
    of = Deployment("mistral-7b", tp, "h100", max_batch_size=8)
    asked = Question({}, of, Traffic.of("trace", population()), SLO, (512,))
    found = Plan(asked, of, {}, Found(16.0, 512), 15.0, {})
    assert who_holds(found, Demand("your trace", rate, busiest, "")) == said


def test_a_config_of_ones_own_is_priced_everywhere(llama: Path) -> None:
    """As the same shape of the table is."""
    model = plan.priced_model(str(llama))
    assert (model.n_layer, model.n_kv_head, model.hidden) == (32, 8, 4096)
    assert model.parameters == pytest.approx(8.03e9, rel=0.001)
    assert MODELS["mixtral-8x7b"].parameters == pytest.approx(46.7e9, rel=0.001), "of all experts"
    assert MODELS["mixtral-8x7b"].chosen == 2
    assert MODELS["llama3.1-8b"].rope_scaling == (8, 1, 4, 8192)
    names = str(llama), "llama3.1-8b"
    for way in (simulate, partial(simulate_pipeline, stages=2)):
        own, other = (way([Request(0, range(99), 9)], name, "h100").seconds for name in names)
        assert own == other
    assert len({Deployment(name).cache_tokens for name in names}) == 1


def test_a_hub_id_that_is_on_disk(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="'meta/Llama-3': give a .* a hub id that is on this"):
        plan.priced_model("meta/Llama-3")
    upper = tmp_path / "models--meta--Llama-3"
    for layers in (32, 30, 31):
        folder = upper / "snapshots" / f"{layers}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA3 | {"num_hidden_layers": layers}))
    (upper / "refs").mkdir()
    (upper / "refs" / "main").write_text("31")
    found = plan.priced_model("meta/Llama-3")
    assert (found.name, found.n_layer) == ("Llama-3", 31) and counter_of(str(upper)) is None
    assert plan.priced_model(str(upper)).n_layer == 31
    (upper / "refs" / "main").write_text("nothing of it is here")
    with pytest.raises(UserError, match="a hub id that is on this disk"):
        plan.priced_model("meta/Llama-3")


NAMES = {
    "h100": "H100, h100-sxm, NVIDIA H100 80GB HBM3",
    "h100-pcie": "H100 PCIe",
    "a100-80gb": "A100, NVIDIA A100-SXM4-80GB",
    "a100-40gb-pcie": "A100-PCIE-40GB",
    "rtx4090": "RTX 4090, 4090",
    "a6000": "NVIDIA RTX A6000",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct, Llama 3.1 8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen2.5-7b": "Qwen2.5-7B-Instruct, QWEN2.5-7B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "llama3.1-70b": "Llama-3.3-70B, DeepSeek-R1-Distill-Llama-70B, Llama 3.3 70B Instruct",
    "phi-4": "microsoft/phi-4, Phi 4",
    # of other weights; another card, no card
    "": "Qwen/Qwen3-8B-AWQ, DeepSeek-R1, H100 NVL, 100a",
}
DIFFER = {  # by what from a row, and nothing else
    "Meta-Llama-3-8B-Instruct": ("llama3.1-8b", {"max_length": 8192, "rope_scaling": None}),
    "Llama-2-70b-hf": ("llama2-70b", {"max_length": 4096}),
    "Mistral-7B-Instruct-v0.3": ("mistral-7b", {"vocab_size": 32768}),
    "Qwen/Qwen2.5-7B": ("qwen2.5-7b", {"max_length": 131072}),
    "Qwen3-30B-A3B-Instruct-2507": ("qwen3-30b-a3b", {"max_length": 262144}),
    "Qwen/Qwen3-8B-FP8": ("qwen3-8b", {"weights": "fp8", "weight_block": 128}),
}


def test_names_as_people_type_them(capsys: pytest.CaptureFixture) -> None:
    """What only resembles one of ours is none."""
    for ours, typed in NAMES.items():
        for name in typed.split(", "):
            gpu = plan.read_options(["--gpu", name]).gpu
            model = shape_of(name)
            if model:
                assert model.name == ours, name
            else:
                assert (gpu if gpu in GPUS else "") == ours, name
    assert capsys.readouterr().out == "GPU A100: a100-80gb is taken; there is a100-40gb, too\n"
    assert {gpu_named(name) for name in GPUS} == {*GPUS}
    for typed, (ours, changes) in DIFFER.items():
        name = typed.rpartition("/")[2].lower()
        assert shape_of(typed) == replace(MODELS[ours], name=name, **changes)
    assert [shape_of(name).name for name in MODELS] == [*MODELS]


def test_a_gpu_of_ones_own() -> None:
    options = SimpleNamespace(gpu=None, gpu_spec=(40, 300, 1600))
    gpu, owner = plan.gpu_of(options)
    assert (gpu.memory, gpu.peak, gpu.bandwidth) == (40e9, 300e12, 1600e9)
    assert owner.startswith("a100") and gpu.name == "gpu-spec"
    assert GPUS["a100-80gb"].memory == 80e9, "GB, as its data sheet says"
    options = plan.read_options(["--gpu-spec", "80,312,2039", "--model", "mistral-7b"])
    same = plan.replica_of(options, MODELS["mistral-7b"], 1, 1)
    options = plan.read_options(["--gpu", "a100-80gb", "--model", "mistral-7b"])
    usual = plan.replica_of(options, MODELS["mistral-7b"], 1, 1)
    assert same.cost_model.linears(512) == usual.cost_model.linears(512)


def test_a_link_of_ones_own() -> None:
    """A bus bandwidth, as nccl-tests has it: of four GPUs, each sends 1.5 times the tensor."""
    costs = []
    for flags in ([], ["--link", "20"], ["--link", "pcie4"]):
        options = plan.read_options(["--gpu", "l40s", *flags])
        costs.append(plan.replica_of(options, MODELS["mistral-7b"], 4, 1).cost_model)
    node, own, named = (cost.all_reduces(8192) for cost in costs)
    size = 8192 * 4096 * 2
    steps = 2 * 32
    assert own == pytest.approx(steps * (WAIT + 15e-6 + 1.5 * size / 20e9)) and own < node / 4
    assert named == pytest.approx(steps * (WAIT + costs[2].link.all_reduce(size, 4, 0.7583)))
    said = [link_words(cost, "vllm") for cost in costs]
    assert "19.1, 3.70, 1.96 GB/s over 2, 4, 8 GPUs, measured on one node" in said[0]
    assert "yours: all-reduces at 20.0 GB/s, as you say" in said[1]
    assert "pcie4: all-reduces at 24.3 GB/s, a guess (PCIe 4.0 x16" in said[2]


def values_of(line: str) -> dict[str, float]:
    """The numbers of the flags of a command line."""
    words = line.split()
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {flag: float(value) for flag, value in pairs if flag[:2] == "--" and value[0].isdigit()}


def random_flags(draw: random.Random) -> list[str]:
    """Of a question that a user may ask, sensible or not."""
    flags = {
        "--model": list(MODELS),
        "--gpu": list(GPUS),
        "--tp": [1, 1, 2, 4, 8],
        "--pp": [1, 1, 2, 4],
        "--tbt-slo": [None, 1, 20, 50, 200],
        "--requests-file": ["chat", "arxiv", "100:20", "3000:50", "30:300", TRACE],
        "--memory-utilization": [None, 0.5, 0.9, 0.95],
        "--max-batch-size": [None, 8, 1000],
        "--rate": [None, 5],
        "--weights": [None, None, None, "fp8"],
        "--cache-dtype": [None, None, "fp8", "bf16"],
        "--slo": [None, None, "tpot:p95:50", "e2e:p99:20000"],
        "--cache-tokens": [None] * 5 + [20_000],
    }
    words = []
    for flag, choices in flags.items():
        if (value := draw.choice(choices)) is not None:
            words += [flag, str(value)]
    return words


def check_answer(words: list[str]) -> Plan | None:
    """Ask plan.py: what it found, which agrees with what it printed; None: it is refused."""
    found = []
    real = plan.print_engines
    rest = ["--tables", "samples", "--requests", 256]
    keep = mock.patch.object(plan, "print_engines", lambda *of: (found.append(of[1]), real(*of)))
    with mock.patch(*ONE_CORE), keep:
        done = call(plan, *words, *rest)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("error: ") and "Traceback" not in done.stderr, done.stderr
        return None
    [of] = found
    said = done.stdout.replace(" \\\n    ", " ")
    best = of.best
    cost = of.replica.cost_model
    assert f"\ntoken budget   C = {best.budget}\n" in said
    assert f"\ncapacity       {rounded(best.rate)} requests/s" in said
    assert best.rate == max(each.rate for each in of.curve.values())
    engines = said.partition("The same in other engines:")[2].split("\n\n")
    vllm, sglang = (values_of(each) for each in engines if each[:6] in ("vLLM:\n", "SGLang"))
    assert vllm["--max-num-batched-tokens"] == sglang["--chunked-prefill-size"] == best.budget
    assert vllm["--max-num-seqs"] == sglang["--max-running-requests"]
    assert 1 <= vllm["--max-num-seqs"] == of.replica.size(best.budget) <= best.budget
    assert vllm["--max-model-len"] == sglang["--context-length"] <= cost.model.max_length
    assert ("--enable-mixed-chunk" in said) == (of.replica.stages == 1)
    if of.replica.utilization:
        share = sglang["--mem-fraction-static"]
        stages = of.replica.stages
        card, weights, outside = capacity.bytes_of(cost, stages)
        tokens = (share * (card - outside) - weights) / cost.kv_bytes * stages
        slack = 1e-3 * card / cost.kv_bytes * stages
        assert share < 1 and 0 <= of.replica.holds(best.budget) - tokens <= slack
    return of


def test_random_questions() -> None:
    """With made-up capacities: all that is printed is accepted, and agrees."""
    draw = random.Random(1)
    seen = set()
    rates = {}
    seeds = set()

    def find(*asked: object, **_: float) -> Found:
        rate = rates.setdefault(asked[4], draw.choice([0.0, 1.0, 1.02, 4.0, 50.0]))
        seeds.update(asked[6:7])
        return Found(rate, asked[4], 64, {rate: LIGHT} if rate else {})

    with mock.patch.multiple(comparison, find_capacity=find):
        for _ in range(40):
            rates.clear()
            found = check_answer(random_flags(draw))
            if found:
                of = found.replica
                seen.add((of.stages > 1, of.size(found.best.budget) < of.max_batch_size))
    assert len(seen) == 4, "pipelines, and budgets below B"
    assert len(seeds) > 3, "the interval is of several samples"


def test_no_more_run_at_once_than_a_batch_has_tokens() -> None:
    of = Deployment("mistral-7b", gpu="h100", max_batch_size=256)
    most = {}
    for policy in (OURS, "vllm_v0"):
        requests = make_requests(poisson(256, 1e6), Fixed(16), Fixed(40))
        trace = of.serve(requests, policy, 128)
        most[policy] = max(each.num_decodes for each in trace.iterations)
    assert most[OURS] <= 128 < most["vllm_v0"], "which reads no budget"


def test_memory_is_the_cards() -> None:
    """vLLM's sum, which depends on the token budget; or the user's own number."""
    flags = ["--model", "mistral-7b", "--gpu", "h100", "--requests-file", "100:10"]
    question, _ = plan.prepare(plan.read_options(flags))
    of = question.replicas[1, 1]
    tokens = capacity.cache_of_engine(of.cost_model, 1, 512, 256, 0.9)
    assert of.holds(512) == tokens > of.holds(8192)
    assert of.cost_model.host is HOSTS["vllm-async"]
    more, _ = plan.prepare(plan.read_options([*flags, "--memory-utilization", "0.92"]))
    assert more.replicas[1, 1].holds(512) > of.holds(512)
    given = plan.read_options([*flags, "--cache-tokens", "5000"])
    own, _ = plan.prepare(given)
    assert {own.replicas[1, 1].holds(size) for size in BUDGETS} == {5000}
    assert own.replicas[2, 1].holds(512) == question.replicas[2, 1].holds(512), "another layout"
    older = plan.read_options([*flags, "--software", "xformers-2023"])
    older = plan.replica_of(older, MODELS["gpt2-124m"], 1, 1)
    assert older.cost_model.host is HOSTS["none"], "nothing is known"
    spec = plan.read_options(["--gpu-spec", "80,989,3350"])
    assert plan.gpu_of(spec)[0].card == 0, "the memory that is given counts"


@pytest.mark.parametrize("gpu, borrows", [("rtx4090", True), ("l40s", False)])
def test_an_answer_says_whose_kernels_it_borrows(
    gpu: str, borrows: bool, capsys: pytest.CaptureFixture
) -> None:
    words = f"--model llama3.1-8b --weights fp8 --gpu {gpu} --requests-file 100:10 --requests 32"
    question, _ = plan.prepare(options := plan.read_options(words.split()))
    plan.describe(options, question.replicas[1, 1], question.traffic, question.slo)
    said = " ".join(capsys.readouterr().out.split())
    guess = (
        f"A guess: no fp8 products of vllm were measured on the {gpu}, which borrows the l40s's."
    )
    assert (guess in said) == borrows


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--weights fp8", "keys and values in 16 bits: nothing says their format"),
        ("--weights fp8 --cache-dtype bf16", ""),
        ("--weights fp8 --cache-dtype fp8", "keys and values in fp8. A guess: no attention over"),
        ("--cache-dtype fp8", "keys and values in fp8"),
        ("", ""),
    ],
)
def test_an_answer_says_the_format_of_the_cache(flags: str, said: str) -> None:
    words = f"--model llama3.1-8b --gpu h100 --requests-file 100:10 --requests 32 {flags}"
    question, _ = plan.prepare(options := plan.read_options(words.split()))
    replica = question.replicas[1, 1]
    found = cache_words(options, replica.cost_model.model)
    assert found.startswith(said) and bool(found) == bool(said)
    wide = Deployment(replace(replica.model, cache="bf16"), gpu="h100", software="vllm")
    halved = "--cache-dtype fp8" in flags
    assert replica.cost_model.kv_bytes == wide.cost_model.kv_bytes / (2 if halved else 1)


def test_budgets_end_with_the_first_that_is_too_long() -> None:
    of = Deployment("mistral-7b", software="vllm", max_batch_size=8)
    traffic = Traffic.of("x", [Request(0, range(100), 10)])
    *_, last, over = planner.budgets_of(of, traffic, SLO, BUDGETS)
    longest = partial(capacity.worst_iteration, of.cost_model, decodes=0, longest=100)
    assert longest(last) <= SLO.gap < longest(over)
    asked = Question({(1, 1): of}, of, traffic, SLO, BUDGETS)
    assert asked.budgets(1, 1)[-1] == over
    assert tuple(replace(asked, named=True).budgets(1, 1)) == BUDGETS, "those that a user names"
    decodes = make_batch(decodes=8, context=4096)
    assert of.decode_iteration == of.cost_model.seconds(decodes), "as many as run at once"


def test_why_a_layout_is_left_out() -> None:
    for model, layout, why in (
        ("llama2-70b", (1, 1), "does not fit"),
        ("gpt2-124m", (8, 1), "does not divide"),
    ):
        words = ["--model", model, "--tp", "4", "--requests-file", "100:10"]
        _, refused = plan.prepare(plan.read_options(words))
        assert refused[layout] == why


def test_the_longest_request_is_one() -> None:
    traffic = Traffic.of("x", [Request(0, range(900), 5), Request(1, range(5), 900)])
    assert fits(904, traffic) and not fits(903, traffic)


def test_whose_errors_are_shown(tmp_path: Path) -> None:
    """Of as many GPUs, and with or without an anchor; fresh ones, kept ones, all, as there are."""
    head = "source,model,hardware,number,sources,quantity,card and host (x),two loads (x)\n"
    lines = (
        "h100,a,kept apart,throughput,0.5,1.1",
        "h100,b,looked at,time per token,9,9",
        "2 x h100,c,looked at,throughput,4,",
        "2 x h100,d,looked at,throughput,4,",
    )
    (file := tmp_path / "x.csv").write_text(head + "".join(f"predicted,m,{x}\n" for x in lines))
    with mock.patch.multiple(plan_report, MEASURED=file, FEWEST=1):
        (half, most, count, words), (other, *_) = (error_of(tp) for tp in (1, 2))
        assert (half, most, count, other) == (2, 2, 1, 4) and words.endswith("one GPU, kept apart")
        assert error_of(1, ANCHORED[3])[0] == 1.1 and error_of(2, ANCHORED[3]) is None
        assert error_of(1, what="time per token")[0] == 9
        with mock.patch.object(plan_report, "FEWEST", 2):
            assert error_of(1)[:2] == (5.5, 9)
        _, *said = errors_said(1, None)
        assert said == ["throughput: half within 2.00, nine of ten within 2.0 (1)"], (
            "of kept ones alone"
        )
        two = SimpleNamespace(loads=[SimpleNamespace(used=used) for used in (True, True, False)])
        known, line = errors_said(1, two)
        assert known.endswith("from what we predict, with an anchor of two loads, as a factor:")
        assert line == "throughput: half within 1.10, nine of ten within 1.1 (1)"
        file.write_text(file.read_text() + "predicted,m,h100,e,fresh,throughput,3,\n")
        *_, words = error_of(1)
        assert error_of(1)[0] == 3 and words.endswith("that no constant had seen")


def test_layouts_have_the_gpus_of_the_expected_rate(capsys: pytest.CaptureFixture) -> None:
    expected = Demand("you expect", 40.0, None, "")
    replicas = {
        (tp, 1): Deployment("mistral-7b", tp, "h100", max_batch_size=8, cache=10**6)
        for tp in (1, 2)
    }
    traffic = Traffic.of("x", make_requests(poisson(8, 1.0), Fixed(9), Fixed(100)))
    asked = Question(replicas, replicas[1, 1], traffic, SLO, (512,), [expected])
    layouts = {(1, 1): Found(16.0, 512), (2, 1): Found(30.0, 512)}
    plan_report.print_layouts(
        Plan(asked, replicas[1, 1], {}, Found(16.0, 512), 15.0, {}, layouts=layouts)
    )
    lines = [each.split() for each in capsys.readouterr().out.splitlines() if each[:2] == "TP"]
    assert [line[6:] for line in lines] == [["3"], ["4"]]


LIGHT = Load(dict.fromkeys(PERCENTS, 0.01), 0.0, np.full((1, 3), 0.01))
SMALL = ("--requests-file", "2000:60", "--requests", 64, "--tbt-slo", 40)


def test_an_interrupt_keeps_what_is_there(llama: Path) -> None:
    seen = [(LIGHT, 1.0)] * 3  # at the rate, and at 150 and 200 % of it; then comes a table
    load_at = mock.Mock(side_effect=[*seen, KeyboardInterrupt])
    few = {"EXACT": 1.2, "ROUGH": 1.5, "DRAWS": 1, "load_at": load_at}
    asked = "--rate", 9, "--chunk-size", 512, "--tables", "all"
    with mock.patch(*ONE_CORE), mock.patch.multiple(comparison, **few):
        done = call(plan, "--model", llama, *SMALL, *asked)
    (of, rate), _ = load_at.call_args_list[0]
    assert rate <= of.best.rate and (9 / rate).is_integer(), "replicas share it"
    assert "at this rate: P99 TBT 10.0 ms, P90 TTFT 10.0 ms" in done.stdout
    assert "at 200 % of it, within the SLO: P99 TBT 10.0 ms" in done.stdout
    assert done.returncode == 130 and "1 other samples" in done.stdout
    assert "you expect     9.00 requests/s" in done.stdout and "of one GPU" in done.stdout
    assert "policies, each" not in done.stdout


@pytest.mark.slow
def test_a_small_plan(llama: Path, tmp_path: Path) -> None:
    """All that it says, prints and writes, with a policy of one's own, on few requests."""
    flags = "--model", llama, *SMALL, "--slo", "ttft:p50:900"
    policy = ("--policy-file", ROOT / "examples" / "priority.py", "--rate", 9)
    few = {"DRAWS": 2, "LOADS": (0.9, 1.0), "EXACT": 1.2, "ROUGH": 1.5}
    here = mock.patch(*ONE_CORE)  # so small that more processes would only cost
    sizes = mock.patch.multiple(plan, TP=(1, 2), PP=(2,))
    with here, sizes, mock.patch.multiple(comparison, **few):
        done = call(plan, *flags, *policy, "--quick", "--tables", "all", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for words in ("token budget   C = ", "TP1-PP2", f"vllm serve '{llama}' ", "priority"):
        assert words in said, words
    lines = [line.split() for line in said.splitlines()]
    one, two = (next(x for x in lines if x[:2] == [f"TP{tp}", str(tp)]) for tp in (1, 2))
    assert float(two[3]) > float(one[3]) > 0, "requests/s"
    assert {"priority", "sarathi_serve"} <= {line[0] for line in lines if line}
    assert "you expect     9.00 requests/s" in said and "100 %" in said
    assert said.index("token budget   C") < said.index("anchor     none"), "the answer comes first"
    rows = read_rows(tmp_path / "quick" / "plan.csv")
    assert len(rows.where("best")) == 2 and {*rows.by("layout")} == {"TP1", "TP2", "TP1-PP2"}
    assert 2 * rows.one("capacity per GPU", layout="TP2") == pytest.approx(float(two[3]), rel=0.01)
    assert {*rows.by("rate")} and (tmp_path / "quick" / "plan.png").exists()


def found_plan(of: Deployment, traffic: Traffic, slo: Slo, rate: float, C: int = 512) -> Plan:
    """With a capacity of `rate`, whatever it is."""
    asked = Question({(1, 1): of}, of, traffic, slo, (C,))
    curve = {C: Found(rate, C, 300), 2 * C: Found(rate / 2, 2 * C, 300)}
    return Plan(asked, of, curve, curve[C], 0.0, {})


@pytest.mark.parametrize(
    ("fullest", "size", "cache", "tokens"),
    [("B", 4, 10**6, "200:200"), ("the cache", 256, 4000, "200:200"), ("C", 256, 10**6, "3000:9")],
)
def test_what_requests_wait_for(fullest: str, size: int, cache: int, tokens: str) -> None:
    """For a place in the batch, for room in the cache, or for tokens of an iteration."""
    of = Deployment("mistral-7b", max_batch_size=size, cache=cache, software="vllm")
    _, requests, _ = plan.requests_of(plan.read_options(["--requests-file", tokens]))
    found = found_plan(of, Traffic.of("x", requests), Slo.of(0.2, 0.5), 1.0)
    trace = comparison.run_at(found, 20.0)
    found.over = Load.steady(trace)
    found.full = comparison.fullness(trace, of, 512)
    assert max(found.full, key=found.full.get) == fullest
    assert 0.75 < found.full[fullest] <= 1.01
    said = plan_report.what_binds(found)
    assert said.startswith("TTFT and scheduling delay, at 110 % of this: P99 TBT ")
    assert f"Requests wait for {fullest} (full: C " in said
    assert ("A larger C serves less" in said) == (fullest == "C")


def test_what_else_binds() -> None:
    """A TBT that is missed needs no queue. In a lighter run, nothing may be missed."""
    of = Deployment("mistral-7b")
    found = found_plan(of, Traffic.of("x", [Request(0, range(9), 9)]), Slo.of(0.009), 1.0)
    found.over = LIGHT
    assert plan_report.what_binds(found) == (
        "TBT, at 110 % of this: P99 TBT 10.0 ms, P90 TTFT 10.0 ms, median scheduling delay 0 s"
    )
    found.question = replace(found.question, slo=SLO)
    assert "nothing, in one run" in plan_report.what_binds(found)


def test_less_than_one_request_at_a_time_is_no_capacity() -> None:
    """By what a token shares its iteration with: requests that come in bursts do share."""
    of = Deployment("mistral-7b", software="vllm")
    requests = make_requests(poisson(300, 1.0), Fixed(100), Fixed(100))
    bursts = [replace(each, arrival=float(i // 10)) for i, each in enumerate(requests)]
    comparison.check_several(found_plan(of, Traffic.of("x", requests), SLO, 9.0), (1, 1))
    comparison.check_several(found_plan(of, Traffic.of("x", bursts), SLO, 0.05), (1, 1))
    with pytest.raises(UserError, match=r"no useful rate.*: 0.05 requests/s do, which"):
        comparison.check_several(found_plan(of, Traffic.of("x", requests), SLO, 0.05), (1, 1))


@pytest.mark.parametrize(
    ("word", "gpu", "layout", "formats"),
    [
        ("h100", "h100", "TP2", ("bf16", "bf16")),
        ("tp1", "a100-80gb", "TP1", ("bf16", "bf16")),
        ("L40S:tp4", "l40s", "TP4", ("bf16", "bf16")),
        ("h100:tp2-pp2", "h100", "TP2-PP2", ("bf16", "bf16")),
        ("h100:fp8", "h100", "TP2", ("fp8", "bf16")),
        ("cache-fp8", "a100-80gb", "TP2", ("bf16", "fp8")),
    ],
)
def test_a_replica_beside_it(word: str, gpu: str, layout: str, formats: tuple) -> None:
    """What it leaves out is as in the question, and so are the SLO and the traffic."""
    flags = ["--model", "mistral-7b", "--tp", "2", "--requests-file", "100:10", "--beside", word]
    question, _ = plan.prepare(plan.read_options(flags))
    [of] = question.beside
    assert (of.cost_model.gpu.name, of.layout) == (gpu, layout)
    model = of.cost_model.model
    assert (model.weights, model.cache) == formats
    assert of.host == question.replicas[2, 1].host and of.utilization == 0.9


def test_replicas_side_by_side(capsys: pytest.CaptureFixture) -> None:
    """Each has its best budget, found to the same precision."""
    flags = ["--model", "mistral-7b", "--requests-file", "100:10", "--beside", "h100"]
    question, refused = plan.prepare(plan.read_options(flags))
    asked = []

    def find(*of: object, **_: float) -> Found:
        asked.append((of[0].cost_model.gpu.name, of[5]))
        return Found(50.0 if of[0].cost_model.gpu.name == "h100" else 20.0, of[4], 64, {})

    def perform(answer: Callable, jobs: Sequence, _: str) -> dict:
        return {job: answer(job) for job in jobs}

    best = mock.Mock(side_effect=lambda *of: find(*of[:4], 384, of[5]))
    with mock.patch.multiple(comparison, find_capacity=find, best_budget=best):
        for part, found in comparison.search(question, (1, 1), (), (), refused, perform):
            plan.PARTS[part](found)
    assert ("h100", EXACT) in asked
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    wanted = ["h100", "TP1", "bf16", "bf16", "384", "50.0", "50.0"]
    assert wanted in [line[:7] for line in lines]


def test_what_prefix_caching_saves(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lines = [f"{i},{100 + 150 * turn},50,chat{i % 40}" for turn in range(3) for i in range(40)]
    lines = [f"{40 * n // 40},{line.partition(',')[2]}" for n, line in enumerate(lines)]
    (path := tmp_path / "chats.csv").write_text(
        "\n".join(["arrival,prompt_tokens,output_tokens,session_id", *lines])
    )
    flags = ["--model", "mistral-7b", "--requests-file", str(path), "--prefix-caching"]
    question, _ = plan.prepare(plan.read_options(flags))
    found = found_plan(question.replicas[1, 1], question.traffic, SLO, 9.0)
    found.question = question
    found.prefixes = comparison.run_prefixes(found)
    plan_report.print_prefixes(found)
    said = capsys.readouterr().out
    whole = 40 * (100 + 250 + 400)
    hits = 40 * (144 + 288)  # whole blocks of 16 tokens: of 150 tokens but the last, and of 300
    rows = [line.split() for line in said.splitlines() if line.startswith("with")]
    assert [row[1] for row in rows] == [str(whole), str(whole - hits)]
