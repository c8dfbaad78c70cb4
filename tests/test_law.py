"""What the law says of single kernels and links, by hand, and how near it is to measured ones."""

import sys
from dataclasses import replace

import pytest

from batch import Batch
from command.checks import UserError
from configs import GPUS, LINKS, MODELS, Link, Nodes
from configs.constants import (
    ALL_REDUCES,
    EFFICIENCY,
    KNOWN,
    WAIT,
    AllReduce,
    Efficiency,
    constants,
    reduce_seconds,
)
from configs.experts import EXPERTS, FP8
from costmodel import DIAGONAL, ENDS, KERNELS, CostModel, make_batch
from experiments import fit
from experiments.fit import Kernel, one_layer, predicted

PLAIN = Efficiency(compute=0.5, memory=0.5, attention=0.5, p=2.0)
A100 = GPUS["a100-80gb"]


def one(efficiency: Efficiency, heads: int = 8, kv_heads: int = 8, gpu=A100) -> CostModel:
    return CostModel(one_layer(heads, kv_heads), gpu, efficiency)


def test_a_product_runs_in_waves() -> None:
    """108 blocks fill an A100 once. One column of blocks more needs a second wave."""
    shapes = [(128, 4096, 108 * 128), (128, 4096, 109 * 128)]
    sharp = replace(PLAIN, memory=1e6, waves=1.0, idle=9.0)
    full, more = (one(sharp).linear(*shape) for shape in shapes)
    assert more == pytest.approx(2 * full, rel=1e-6)
    assert full == pytest.approx(2 * 128 * (4096 + ENDS) * 108 * 128 / (0.5 * A100.peak), rel=1e-6)
    capped = one(replace(sharp, idle=0.25)).linear(*shapes[1])
    assert capped == pytest.approx(1.25 * 109 / 108 * full, rel=1e-6)
    smooth = [one(replace(sharp, waves=0.0)).linear(*shape) for shape in shapes]
    assert smooth[1] / smooth[0] == pytest.approx(109 / 108, rel=1e-6)


def test_masked_blocks_are_skipped_or_not() -> None:
    """Half of a prompt's square; but not of the keys before a chunk."""
    flash = replace(PLAIN, skips_masks=True)
    whole, skipping = (one(each).chunk_attention(0, 2**17) for each in (PLAIN, flash))
    assert skipping / whole == pytest.approx(0.5, rel=0.01)
    behind = [one(each).chunk_attention(2**17, 1024) for each in (PLAIN, flash)]
    assert behind[1] / behind[0] == pytest.approx(1.0, rel=0.15)
    fast = replace(flash, prefill_memory=1e6)
    pairs = 8 * 512 * (1024 - (512 - DIAGONAL) / 2) + 108 * 128 * (1024 - (512 - DIAGONAL) / 2) / 2
    assert one(fast).chunk_attention(512, 512) == pytest.approx(
        4 * 128 * pairs / (0.5 * A100.peak), rel=1e-3
    )


def test_attention_of_2023_runs_in_whole_waves() -> None:
    """8 heads of 13 blocks need one wave of 108 SMs, 14 blocks two."""
    fast = replace(PLAIN, prefill_memory=1e6)
    full, more = (one(fast).chunk_attention(0, blocks * 128) for blocks in (13, 14))
    assert more / full == pytest.approx(2 * 14 / 13, rel=1e-3)


def test_kernels_and_blocks_take_time_to_start() -> None:
    slow = replace(PLAIN, prefill_start=5e-3, prefill_block=1e-3, decode_start=7e-3)
    slow = replace(slow, decode_block=2e-3, attention=1e6)
    assert one(slow).chunk_attention(0, 16) == pytest.approx(5e-3 + 8 / 108 * 1e-3, rel=1e-2)
    assert one(slow).decode_attention(27, 54) == pytest.approx(7e-3 + 2 * 2e-3, rel=1e-3)
    together = one(slow).prefill_attention([(0, 16)] * 3)
    assert together == pytest.approx(5e-3 + 24 / 108 * 1e-3, rel=1e-2), "one start for all"


def test_bytes_that_fit_the_cache_are_faster() -> None:
    cached = one(replace(PLAIN, cache=4.0))
    small = A100.l2
    middle = 1.5 * A100.l2
    large = 2 * A100.l2
    assert cached.from_memory(small) == pytest.approx(small / 4)
    assert cached.from_memory(middle) == pytest.approx(middle - 0.75 * small / 2)
    assert cached.from_memory(large) == large
    tokens = int(small / 2 / 4096)  # K and V of 8 heads of 128 channels
    plain = one(PLAIN).decode_attention(1, tokens)
    assert cached.decode_attention(1, tokens) == pytest.approx(plain / 4)


def test_a_hybrid_batch_costs_extra() -> None:
    cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])
    parts = [make_batch([(0, 1021, 1021)]), make_batch(decodes=3)]
    both = make_batch([(0, 1021, 1021)], decodes=3)
    extra = cost.attention(both) - sum(cost.attention(part) for part in parts)
    assert extra == pytest.approx(40 * EFFICIENCY["a6000", "xformers-2023"].hybrid)
    assert 0.8e-3 < extra < 1e-3


def test_norms_and_activations_move_bytes() -> None:
    model = MODELS["llama3.1-8b"]
    own = EFFICIENCY["h100", "vllm"]
    cost = CostModel(model, GPUS["h100"], software="vllm")
    values = 2 * 4 * 4096 + 3 * 14336 + 2 * (32 + 8) * 128 + 2 * 2 * 8 * 128
    each = KERNELS * own.launch + 100 * 2 * values / (3350e9 * own.elementwise)
    assert cost.elementwise(100) == pytest.approx(32 * each)
    assert CostModel(model, GPUS["a6000"]).elementwise(100) == 0.0


def test_all_reduces_are_those_that_were_measured() -> None:
    model = MODELS["llama3.1-8b"]
    cost = CostModel(model, GPUS["h100"], tp=8, software="vllm")
    assert cost.link.name == "nvlink-h100"
    for tokens, place in ((1, 0), (31, 0), (64, 1), (1024, 2)):
        size = tokens * 4096 * 2
        way = ALL_REDUCES["nvlink-h100", "vllm"][8][place]
        once = way.latency + 1.75 * size / way.bandwidth
        assert cost.all_reduces(tokens) == pytest.approx(64 * (once + WAIT))


def test_a_faster_way_waits_for_the_end_of_the_one_before() -> None:
    ways = AllReduce(0, 1e-6, 1e9), AllReduce(1000, 0.0, 10e9)
    times = [1e6 * reduce_seconds(ways, size, 2) for size in (500, 1000, 10000, 30000)]
    assert times == pytest.approx([1.5, 2.0, 2.0, 3.0])


def test_nothing_takes_no_time() -> None:
    for gpu, software in EFFICIENCY:
        tp = 2 if software == "vllm" else 1
        cost = CostModel(MODELS["llama3.1-8b"], GPUS[gpu], tp=tp, software=software)
        assert cost.seconds(Batch([], [])) == 0.0
        assert set(cost.operators(Batch([], [])).values()) == {0.0}
        assert cost.chunk_attention(0, 0) == cost.decode_attention(0, 0) == 0.0


def test_a_gpu_of_unknown_sms_has_no_waves_and_no_blocks() -> None:
    own = replace(EFFICIENCY["a100-80gb", "vllm"], waves=0.0, prefill_block=0.0, decode_block=0.0)
    model = MODELS["llama3.1-8b"]
    unknown = replace(A100, sms=0)
    cost, plain = (
        CostModel(model, unknown, each) for each in (EFFICIENCY["a100-80gb", "vllm"], own)
    )
    for batch in (make_batch([(0, 1000, 1000)], decodes=3), make_batch([(0, 9, 9)])):
        assert cost.seconds(batch) == plain.seconds(batch) > 0


def test_gpus_beyond_the_kv_heads_hold_copies_of_their_weights() -> None:
    model = MODELS["llama3.1-70b"]  # 64 heads, 8 KV heads
    widths = [CostModel(model, GPUS["h100"], tp=tp).shapes["preproj"][1] for tp in (1, 8, 16, 64)]
    assert widths == [128 * heads for heads in (64 + 2 * 8, 8 + 2, 4 + 2, 1 + 2)]


def test_only_a_chunk_s_own_keys_lie_in_the_cache() -> None:
    """Other layers have pushed out those of earlier tokens."""
    slow = replace(PLAIN, attention=1e6, skips_masks=True)
    cold, warm = (one(replace(slow, cache=cache)) for cache in (1.0, 4.0))
    saved = [
        cold.chunk_attention(start, 64) - warm.chunk_attention(start, 64) for start in (0, 512)
    ]
    own = 2 * 64 * (8 + 8) * 128 * 2 * (1 - 1 / 4) / (A100.bandwidth * 0.5)
    assert saved == pytest.approx([own, own], rel=0.01)


@pytest.mark.parametrize(
    "gpu, owner", [("t4", "a100-80gb"), ("l4", "l40s"), ("b200", "h100"), ("mi300x", "a100-80gb")]
)
def test_a_gpu_borrows_from_its_own_generation(gpu: str, owner: str) -> None:
    found, guess = constants(gpu, "vllm")
    assert found == EFFICIENCY[owner, "vllm"]
    assert guess.startswith(f"vllm was not measured on the {gpu}, which borrows the {owner}'s")
    mine = replace(GPUS[gpu], name="mine")  # of no table
    assert CostModel(MODELS["llama3.1-8b"], mine, software="vllm").efficiency == found


def test_a_gpu_newer_than_the_table_computes_fp8() -> None:
    """As do the last three generations that are in it."""
    newest = replace(GPUS["b200"], name="mine", generation="rubin")
    model = replace(MODELS["llama3.1-8b"], weights="fp8")
    cost = CostModel(model, newest, software="vllm")
    assert cost.fp8 and cost.efficiency == EFFICIENCY["h100", "vllm"]
    assert "generation 'rubin' is taken as newer than turing" in cost.guess
    with pytest.raises(UserError, match="products on the mine is known here"):
        CostModel(model, replace(newest, generation=""), software="vllm")


def test_every_gpu_has_its_sheet_and_all_constants_a_source() -> None:
    for gpu in GPUS.values():
        assert gpu.source and gpu.sms > 1 and gpu.l2 >= 4e6 and gpu.link in LINKS, gpu.name
        ratio = gpu.peak / gpu.bandwidth  # FLOPs for each byte
        assert 70 < ratio < 450, gpu.name
        assert gpu.generation in KNOWN
    for owner, efficiency in EFFICIENCY.items():
        assert efficiency.source.startswith("experiments/fit.py: "), owner
        assert "%" in efficiency.source, owner


def held(gpu: str) -> dict:
    """What `fit.fit_later` finds, without a search."""
    found = {
        "fp8 experts" if weights == "fp8" else "experts": own
        for (on, weights), own in EXPERTS.items()
        if on == gpu
    }
    own = {"fp8 product": replace(EFFICIENCY[gpu, "vllm"], **FP8[gpu])} if gpu in FP8 else {}
    return found | own


def test_the_script_complains_of_other_constants(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit.py", "vllm"])
    monkeypatch.setattr(fit, "fit_gpu", lambda *_: PLAIN)
    monkeypatch.setattr(fit, "fit_later", held)
    with pytest.raises(SystemExit, match=r'other constants: EFFICIENCY\["a100-80gb", "vllm"\]'):
        fit.main()
    monkeypatch.setattr(fit, "fit_gpu", lambda gpu: EFFICIENCY[gpu, "vllm"])
    fit.main()


def test_one_law_for_a_kernel_and_for_a_batch() -> None:
    """An iteration's attention is the kernel's, in every layer."""
    cost = CostModel(MODELS["llama3.1-8b"], GPUS["h100"], software="vllm")
    kernel = Kernel("h100", "prefill", (3, 500, 32, 8), 0.0)
    seconds = predicted([kernel], "h100", cost.efficiency)[0]
    assert cost.attention(make_batch([(0, 500, 500)] * 3)) == pytest.approx(32 * seconds)
    kernel = Kernel("h100", "decode", (5, 700, 32, 8), 0.0)
    batch = make_batch([], 5, 700)
    cold, warm = (
        32 * predicted([kernel], "h100", each)[0]
        for each in (replace(cost.efficiency, cache=1.0), cost.efficiency)
    )
    assert warm < cost.attention(batch) == pytest.approx(cold), "other layers fill the cache"


@pytest.mark.parametrize(
    ("name", "billions"), [("llama3.2-3b", 3.21), ("qwen2.5-32b", 32.8), ("falcon-180b", 179.5)]
)
def test_models_are_as_large_as_published(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=0.06)


def test_falcon_has_one_all_reduce_per_layer() -> None:
    falcon = MODELS["falcon-180b"]
    link = LINKS["nvlink-a100"]
    options = {"tp": 8, "link": link, "software": "vidur-2024"}
    one, two = (
        CostModel(replace(falcon, parallel=parallel), A100, **options) for parallel in (True, False)
    )
    once = link.all_reduce(512 * 14848 * 2, 8, one.efficiency.memory)
    assert two.all_reduces(512) == 2 * one.all_reduces(512) == 2 * falcon.n_layer * once
    assert one.linears(512) == two.linears(512)


def test_a_ring_sends_nearly_twice_the_tensor() -> None:
    link = Link("wire", 10e9, 5e-6)
    assert link.all_reduce(1e9, 4, 0.8) == pytest.approx(5e-6 + 1.5e9 / 8e9)
    assert replace(link, measured=True).all_reduce(1e9, 4, 0.8) == pytest.approx(5e-6 + 0.15)


def test_two_nodes_share_their_parts_out() -> None:
    """By hand: 4 GPUs send 3/4 of 8 MB, then the port 2 x 1/2 of it, then the GPUs 3/4 again."""
    nodes = Nodes("two", Link("near", 100e9, 1e-6), Link("far", 10e9, 30e-6), per_node=4)
    near = 2 * 6e6 / (100e9 * 0.8)
    far = 8e6 / (10e9 * 0.8)
    assert nodes.all_reduce(8e6, 8, 0.8) == pytest.approx(1e-6 + near + 30e-6 + far)
    assert nodes.all_reduce(8e6, 4, 0.8) == nodes.inside.all_reduce(8e6, 4, 0.8)
    with pytest.raises(ValueError, match="6 GPUs do not fill nodes of 4"):
        nodes.all_reduce(8e6, 6, 0.8)
