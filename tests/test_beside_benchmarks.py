"""Public benchmarks of servers: the committed file, a closed loop, memory, and what is compared."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from configs import GPUS, MODELS
from configs.hosts import HOSTS
from costmodel import CostModel
from experiments import beside_benchmarks as beside
from experiments.lib.plan_report import ANCHORED, FRESH, KINDS, MEASURED, WAY
from experiments.lib.rows import read_rows
from more.serving.capacity import cache_of_engine

UNITS = {
    "output": "tokens/s",
    "all tokens": "tokens/s",
    "requests": "requests/s",
    **dict.fromkeys(("mean TPOT", "median TPOT", "mean ITL", "median ITL", "P99 ITL"), "ms"),
    **dict.fromkeys(("mean TTFT", "median TTFT", "mean latency"), "ms"),
}
# What vLLM says of its own memory: model, GPU and its GiB (0: of configs), tp, utilization, tokens
# of its largest batch, GiB of cache on a GPU, address
VLLM = "github.com/vllm-project/vllm"
ACCOUNTS = [
    ("llama3.1-8b", "h100", 79.22, 1, 0.9, 8192, 53.29, f"{VLLM}/pull/10511"),
    # 71.29 - 7.48 - 3.58 - 1.26
    ("llama3.1-8b", "h100", 79.22, 2, 0.9, 8192, 58.97, f"{VLLM}/pull/10511"),
    ("qwen2.5-14b", "rtx4090", 0.0, 2, 0.98, 2048, 8.69, f"{VLLM}/issues/13061"),
]


def test_the_file_is_well_formed() -> None:
    lines = beside.benchmarks()
    assert len(lines) == len({each.id for each in lines}) > 300
    for each in lines:
        assert each.model.removesuffix("-fp8") in MODELS and each.gpu in GPUS, each
        assert each.unit == UNITS[each.quantity] and each.value > 0, each
        assert each.engine in ("vllm", "sglang", "tensorrt-llm"), each
        assert re.fullmatch(r"fixed|sharegpt|eos:\d+", each.dataset), each
        assert re.match("https://|.*address not kept$", each.source), each
        assert each.load_kind in ("single", "burst") or each.load > 0, each
        assert min(each.prompt_tokens, each.output_tokens) >= 1 and 0 <= each.memory <= 1, each


def test_a_third_of_the_sources_is_kept_apart() -> None:
    """By the address alone, so that nobody chooses."""
    sources = {each.source: each.kept for each in beside.benchmarks()}
    assert 0.2 < sum(sources.values()) / len(sources) < 0.5
    one = beside.benchmarks()[0]
    assert replace(one, source="https://k.example").kept
    assert not replace(one, source="https://b.example").kept


def test_fresh_numbers_stand_alone() -> None:
    """No number is in both files. fp8 in the name is the weights' format; TensorRT-LLM's cache,
    too. What no kernel prices is in the file, and not compared.
    """
    seen = {}
    for each in beside.benchmarks():
        seen.setdefault(each.part, []).append(each)
    assert len(seen[FRESH]) == 146
    values = {(each.model, each.gpu, each.value) for each in seen["looked at"] + seen["kept apart"]}
    assert not {(each.model, each.gpu, each.value) for each in seen[FRESH]} & values
    formats = {(e.engine, e.shape.weights, e.shape.cache) for e in seen[FRESH] if "fp8" in e.model}
    assert formats == {("vllm", "fp8", "bf16"), ("tensorrt-llm", "fp8", "fp8")}
    assert {each.gpu for each in seen[FRESH] if not beside.is_priced(each)} == {"mi300x"}


@pytest.mark.parametrize(
    ("engine", "version", "host"),
    [
        ("vllm", "0.5.4", "vllm-2024"),
        ("vllm", "0.6.0", "vllm-2025"),
        ("vllm", "0.12", "vllm-async"),
        ("sglang", "0.3.9", "sglang-0.3"),
        ("sglang", "0.4", "none"),
        ("tensorrt-llm", "0.17", "none"),
    ],
)
def test_a_version_has_a_host(engine: str, version: str, host: str) -> None:
    each = replace(beside.benchmarks()[0], engine=engine, version=version)
    assert each.host == host in HOSTS


def test_an_anchor_of_three_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lightest and the heaviest load find a server again whose iterations take 1.3 x (ours + 1
    ms). So the load in the middle is met, and no end is compared.
    """
    one = next(each for each in beside.benchmarks() if each.what == "throughput")
    one = replace(one, load_kind="closed", requests=0, quantity="output", dataset="fixed")
    one = replace(one, engine="vllm", version="", prompt_tokens=100, output_tokens=20)
    loads = [replace(one, id=f"{clients}", load=clients) for clients in (16, 1, 128)]
    loads = [replace(each, value=beside.predicted(each, 1.3, 1e-3)) for each in loads]
    monkeypatch.setattr(beside, "benchmarks", lambda: loads)
    middle, light, heavy = loads
    beside.ends_of.cache_clear()
    assert beside.ends_of(one.place) == (light, heavy)
    ways = beside.anchors_of(light, heavy)
    assert list(ways) == list(ANCHORED) and ways["two loads"] == pytest.approx((1.3, 1e-3))
    assert beside.beside(middle, "16")["two loads"] == pytest.approx(1)
    assert "two loads" not in beside.beside(heavy, "128")
    assert ways["heaviest load"][0] > 1.3 and ways["lightest load"][0] > ways["heaviest load"][0]
    monkeypatch.setattr(beside, "benchmarks", lambda: loads[:2])
    beside.ends_of.cache_clear()
    assert beside.ends_of(one.place) == ()
    beside.ends_of.cache_clear()


@pytest.mark.parametrize("account", ACCOUNTS)
def test_the_cache_is_as_vllm_says(account: tuple) -> None:
    """Within 3 GiB a card, and 16 %."""
    model, name, card, tp, utilization, budget, published, _ = account
    gpu = replace(GPUS[name], card=card * 2**30 or GPUS[name].card)
    cost = CostModel(MODELS[model], gpu, tp=tp, software="vllm")
    ours = cache_of_engine(cost, 1, budget, 256, utilization) * cost.kv_bytes / 2**30
    assert ours == pytest.approx(published, rel=0.16) and abs(ours - published) < 3


def test_what_equals_our_prediction_has_ratio_1() -> None:
    each = next(each for each in beside.benchmarks() if each.load_kind == "single")
    for quantity in ("output", "mean TTFT"):
        one = replace(each, quantity=quantity, requests=2)
        same = replace(one, value=beside.predicted(one))
        row = beside.beside(same, each.id)
        assert row[WAY] == 1 and row["kind"] == KINDS[0]
        slower = replace(same, value=2 * same.value)  # twice the time; or twice the tokens
        assert beside.beside(slower, each.id)[WAY] == (2 if "TTFT" in quantity else 0.5)


def test_a_throughput_in_two_units_is_compared_once() -> None:
    """Of one run, no throughput is another one in another unit. b379's is not quite b378's."""
    found: dict = {}
    for each in beside.benchmarks():
        if each.what == "throughput":
            both = each.prompt_tokens + each.output_tokens
            per = {"requests": both, "output": both / each.output_tokens, "all tokens": 1}
            found.setdefault((each.run, each.source), []).append(each.value * per[each.quantity])
    for tokens in map(sorted, found.values()):
        assert all(more > 1.005 * less for less, more in pairwise(tokens)), tokens
    compared = read_rows(MEASURED).where("number").column("number")
    assert len(compared) == len(set(compared)) == 490


def test_a_throughput_that_is_the_load_is_not_compared() -> None:
    """Sent at 2 requests/s, of 100 tokens each."""
    each = replace(beside.benchmarks()[0], load_kind="rate", load=2.0, output_tokens=100)
    each = replace(each, quantity="output")
    assert replace(each, value=199).is_the_load and not replace(each, value=150).is_the_load
    assert not replace(each, value=199, quantity="mean TPOT").is_the_load
