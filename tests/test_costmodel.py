"""The cost model: its shape, what it was fitted to, and what it predicts without having been fitted
to it.
"""

from dataclasses import asdict, replace
from itertools import pairwise, product

import pytest

from batch import Request
from configs import GPUS, LINKS, MODELS
from configs.constants import WAIT
from configs.experts import EXPERTS, touched
from configs.hosts import HOSTS, Host
from costmodel import EFFICIENCY, CostModel, make_batch, padded
from experiments import fit, serve_phases
from experiments.lib.common import paper_numbers
from more.pipeline import StageCosts
from more.serving.capacity import cache_of_engine
from more.simulate import simulate

NUMBERS = paper_numbers()
SARATHI = EFFICIENCY["a6000", "xformers-2023"]


@pytest.fixture(scope="module")
def cost() -> CostModel:
    return CostModel(MODELS["llama-13b"], GPUS["a6000"])


def test_padded_to_tiles():
    rows = {1: 16, 16: 16, 17: 32, 33: 64, 64: 64, 65: 128, 129: 256, 256: 256, 257: 384}
    assert {tokens: padded(tokens) for tokens in rows} == rows


@pytest.mark.parametrize(
    ("model", "gpu"), [*product(MODELS, ["a6000"]), *product(["llama-13b"], GPUS)]
)
def test_more_tokens_never_cost_less(model, gpu):
    software = "vllm" if MODELS[model].experts else "xformers-2023"
    cost = CostModel(MODELS[model], GPUS[gpu], software=software)
    chunks = [cost.seconds(make_batch([(0, n, n)])) for n in range(1, 600)]
    assert all(later > earlier > 0 for earlier, later in pairwise(chunks))
    contexts = [cost.seconds(make_batch(decodes=4, context=n)) for n in (2, 100, 1000)]
    assert contexts == sorted(contexts)
    starts = [cost.seconds(make_batch([(n, 128, n + 128)])) for n in (0, 128, 512)]
    assert starts == sorted(starts)


def test_the_host_waits_for_nobody_or_works_beside_the_gpu(cost):
    batch = make_batch([(0, 300, 300)], 4, 800)  # five requests
    kernels = cost.seconds(batch)
    for host, seconds in (
        (Host(0.5, 0.1), kernels + 0.5 + 5 * 0.1),
        (Host(0.5, 0.1, overlapped=True, gap=0.01), 1.01),
        (Host(1e-6, overlapped=True, gap=0.01), kernels + 0.01),
    ):
        both = CostModel(cost.model, cost.gpu, host=host)
        assert both.kernels(batch) == kernels
        assert both.seconds(batch) == pytest.approx(seconds, rel=1e-12)
        assert both.operators(batch) == cost.operators(batch)
        alone, *others = StageCosts(cost, [20, 20])(batch)
        first, *same = StageCosts(both, [20, 20])(batch)
        assert same == others and first == pytest.approx(host.around(alone, 5), rel=1e-12)


@pytest.mark.parametrize(
    ("host", "model", "weights", "gpu", "tp", "decodes", "context", "ms"),
    [
        ("vllm-2024", "llama3.1-70b", "fp8", "h100", 4, 1, 200, 19),
        ("vllm-2024", "llama3.1-70b", "fp8", "h100", 4, 32, 200, 25),
        ("vllm-2025", "llama3.1-8b", "bf16", "a100-80gb", 2, 8, 256, 8.9),
        ("vllm-2025", "llama3.1-70b", "bf16", "a100-40gb", 8, 5, 320, 24.31),
        ("vllm-2025", "llama3.1-70b", "bf16", "a100-40gb", 8, 18, 320, 27.19),
    ],
)
def test_an_all_reduce_waits(host, model, weights, gpu, tp, decodes, context, ms):
    """Five of the six iterations that constants.WAIT is of; that of 42 requests is longer."""
    model = replace(MODELS[model], weights=weights)
    cost = CostModel(model, GPUS[gpu], tp=tp, software="vllm", host=HOSTS[host])
    batch = make_batch(decodes=decodes, context=context)
    assert 1e3 * cost.seconds(batch) == pytest.approx(ms, rel=0.03)
    waits = 2 * model.n_layer
    alone = cost.host.around(cost.kernels(batch) - waits * WAIT, decodes)
    assert 15e-6 < (ms / 1e3 - alone) / waits < 25e-6


def test_known_hosts():
    assert all(host.source for host in HOSTS.values())
    assert asdict(HOSTS["none"]) | {"source": ""} == asdict(Host())
    given = HOSTS["sarathi-artefact"]
    found = serve_phases.host_of_artefact()
    assert given.iteration == pytest.approx(found.iteration, rel=1e-3)
    assert given.request == pytest.approx(found.request, rel=1e-3)
    constant = HOSTS["sarathi-artefact-constant"]
    assert constant.iteration == pytest.approx(serve_phases.beyond(32), rel=1e-3)
    assert constant.request == 0
    runs = [
        simulate([Request(0, [0] * 9, 5)], host=host).iterations for host in ("none", "vllm-2024")
    ]
    none, some = (sum(each.seconds for each in iterations) for iterations in runs)
    assert some - none == pytest.approx(5 * HOSTS["vllm-2024"].around(0.0, 1))


def test_a_batch_reads_only_the_experts_that_it_chose() -> None:
    """One token reads as many as it chooses, many tokens read all, and none is read twice."""
    model = MODELS["qwen3-30b-a3b"]
    one, two, many = (touched(tokens, model.experts, model.chosen) for tokens in (1, 2, 4096))
    assert (one, many) == (pytest.approx(8), pytest.approx(128)) and 15 < two < 16
    cost = CostModel(model, GPUS["h100"], software="vllm")
    bytes_read = 3 * 2 * model.hidden * model.intermediate
    for tokens, read in ((1, one), (64, touched(64, 128, 8))):
        slope = cost.experts(tokens) - EXPERTS["h100", "bf16"].start
        assert slope > read * bytes_read / GPUS["h100"].bandwidth
    halved = CostModel(model, GPUS["h100"], software="vllm", tp=2)
    assert halved.experts(4096) < 0.6 * cost.experts(4096)
    routed = cost.linears(64)["ffn_ln1"] + cost.linears(64)["ffn_ln2"]
    router = cost.linear(64, model.hidden, model.experts)
    assert routed == pytest.approx(model.n_layer * (cost.experts(64) + router))
    assert cost.linears(0)["ffn_ln2"] == 0


def test_an_fp8_cache_halves_its_room_and_its_reads() -> None:
    """Of half of the GPUs' memory: weights stay. A decode's own time, not its reads, stays, too."""
    model = MODELS["llama3.1-70b"]
    wide, small = (
        CostModel(replace(model, cache=cache), GPUS["h100"], tp=4, software="vllm")
        for cache in ("bf16", "fp8")
    )
    assert small.kv_bytes == wide.kv_bytes / 2 == model.kv_bytes_per_token() / 8
    tokens = [cache_of_engine(cost, 1, 512, 64) for cost in (wide, small)]
    assert tokens[1] == pytest.approx(2 * tokens[0], abs=1)
    reads = [
        cost.decode_attention(8, 80_000) - cost.decode_attention(8, 0) for cost in (wide, small)
    ]
    assert reads[1] == pytest.approx(reads[0] / 2)
    assert small.prefill_attention([(30_000, 1)]) < wide.prefill_attention([(30_000, 1)])
    assert small.prefill_attention([(0, 512)]) == wide.prefill_attention([(0, 512)]), "none read"
    assert small.linears(64) == wide.linears(64) and "fp8 cache" in small.guess


def test_cards_without_p2p_gain_little_from_more() -> None:
    """Four RTX 4090 take no less time than two for a batch of decodes; A100s far less."""
    batch = make_batch(decodes=120, context=500)
    for gpu, gains in (("rtx4090", False), ("rtx3090", False), ("a100-80gb", True)):
        two, four = (
            CostModel(MODELS["llama3.1-8b"], GPUS[gpu], tp=tp, software="vllm").seconds(batch)
            for tp in (2, 4)
        )
        assert (four < 0.8 * two) == gains, gpu


def test_fp8_halves_the_weights_and_what_they_take() -> None:
    """Of the layers' products, not of the head. With many rows, the inputs' kernel counts."""
    model = MODELS["llama3.1-8b"]
    wide, small = (
        CostModel(replace(model, weights=weights), GPUS["h100"], software="vllm")
        for weights in ("bf16", "fp8")
    )
    assert small.head(8) == wide.head(8) and small.all_reduces(8) == wide.all_reduces(8)
    layers = model.n_layer * model.layer_weights
    assert wide.model.weight_bytes() - small.model.weight_bytes() == layers
    for tokens in (1, 4096):
        ratio = sum(small.linears(tokens).values()) / sum(wide.linears(tokens).values())
        assert 0.5 < ratio < 0.9


def test_logits_only_for_sampled_rows(cost):
    unfinished, whole = (make_batch([(0, 128, prompt)]) for prompt in (129, 128))
    assert cost.operators(unfinished)["others"] == 0
    assert 0 < cost.operators(whole)["others"] < 0.05 * cost.seconds(unfinished)


def test_fit_is_to_table_2_and_fig_7_only_and_within_5_percent():
    rows = product(("prefill", "decode", "hybrid"), ("linear", "attn"))
    found = fit.A6000.modelled(SARATHI)
    assert set(found) == {f"t2_{row}_{part}" for row, part in rows} | {"f7_128", "f7_256", "f7_257"}
    for name, milliseconds in found.items():
        assert milliseconds == pytest.approx(NUMBERS[name], rel=0.05), name


@pytest.mark.parametrize("model", ["yi-34b", "gpt3-175b", "llama-13b"])
def test_tensor_parallelism(model):
    """Work and memory are divided; what is added is two all-reduces per layer, checked by hand."""
    config = MODELS[model]
    link = LINKS["nvlink-a100"]
    one, eight = (CostModel(config, GPUS["a100-80gb"], tp=tp, link=link) for tp in (1, 8))
    assert sum(i * o for i, o in eight.shapes.values()) * 8 == config.layer_weights
    assert eight.kv_bytes * 8 == one.kv_bytes
    batch = make_batch([(12, 500, 512)], 12, 3000)
    operators = eight.operators(batch)
    size = 512 * config.hidden * 2  # bytes of the activations; a ring sends 2 * 7/8 of them
    each = link.latency + size * 1.75 / (300e9 * one.efficiency.memory)
    assert operators.pop("all_reduce") == pytest.approx(2 * config.n_layer * each)
    assert sum(operators.values()) + 2 * config.n_layer * each == pytest.approx(
        eight.seconds(batch), rel=1e-12
    )
    alone = one.operators(batch)  # 512 tokens are compute-bound, and what computes is divided by 8
    assert alone["ffn_ln1"] / 8 < operators["ffn_ln1"] < alone["ffn_ln1"] / 6
    # neither the last wave's idle SMs nor the cost of a hybrid batch are divided
    assert alone["attn"] / 8 <= operators["attn"] < alone["attn"] / 3
