"""What a beam search is priced at: bytes by the paper's formulas, seconds by hand, and a mix."""

from dataclasses import replace
from itertools import pairwise

import pytest

from batch import Batch, Chunk, Request
from beam.cost import (
    BeamCostModel,
    cache_bytes,
    cache_token,
    make_beams,
    moved_tokens,
    read_tokens,
    simulate_beams,
    throughput,
)
from beam.request import CACHES, BeamMemory, BeamRequest, rows_of
from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, Efficiency, make_batch
from loop import Loop
from scheduler import make_scheduler
from simulate import CostExecutor

TILE, LLAMA = GPUS["max-1550-tile"], MODELS["llama2-13b"]


@pytest.fixture(scope="module")
def cost() -> BeamCostModel:
    return BeamCostModel(LLAMA, TILE)


def decode(cache: str, width: int, prompt: int = 1024, response: int = 64, count: int = 1) -> Batch:
    return Batch([], make_beams(cache, count, width, prompt, response))


def prefill(cache: str, width: int, prompt: int = 1024) -> Batch:
    (request,) = make_beams(cache, 1, width, prompt, 0)
    return Batch([Chunk(request, 0, prompt)], [])


# -------------------------------------------------------------------------------------------- bytes


def test_the_papers_example_to_the_byte() -> None:
    gptj = MODELS["gptj-6b"]
    assert cache_token(gptj) == 2 * 32 * 32 * 128 * 2
    assert cache_bytes(gptj, "standard", 32, 4, 1024, 1024) == 137_438_953_472
    assert cache_bytes(gptj, "segment", 32, 4, 1024, 1024) == 85_899_345_920


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gptj-6b", (32, 32, 128)),
        ("llama2-13b", (40, 40, 128)),
        ("opt-30b", (48, 56, 128)),
        ("bloom-176b", (70, 112, 128)),
    ],
)
def test_models_are_table_1(name: str, shape: tuple[int, int, int]) -> None:
    model = MODELS[name]
    assert (model.n_layer, model.n_head, model.head_dim) == shape
    billions = {"gptj-6b": 6.9, "llama2-13b": 13.0, "opt-30b": 30.0, "bloom-176b": 176.2}
    assert model.parameters / 1e9 == pytest.approx(billions[name], abs=0.1)


def test_the_real_gptj_is_as_large_as_published() -> None:
    real = replace(MODELS["gptj-6b"], n_layer=28, n_head=16, n_kv_head=16, head_dim=256)
    assert real.parameters / 1e9 == pytest.approx(6.05, abs=0.01)


def test_segments_waste_fifteen_steps_at_most() -> None:
    def held(response: int) -> int:
        return cache_bytes(LLAMA, "segment", 1, 4, 100, response) // cache_token(LLAMA)

    assert [held(n) for n in (1, 16, 17, 32, 33)] == [164, 164, 228, 228, 292]
    assert all(held(n) - (100 + 4 * n) <= 4 * 15 for n in range(1, 100))
    longer = [held(n) for n in range(1, 100)]
    assert longer == sorted(longer)


def test_grouped_heads_take_less() -> None:
    llama70 = MODELS["llama2-70b"]
    assert cache_token(llama70) * llama70.n_head == 2 * 80 * 64 * 128 * 2 * llama70.n_kv_head


def test_throughput_counts_one_sequence_for_each_prompt() -> None:
    assert throughput(8, 128, 4.0) == 256


# ------------------------------------------------------------------------------------------ seconds


def ordinary_batches() -> list[Batch]:
    return [
        make_batch([(0, 300, 300)]),
        make_batch([(256, 128, 900), (0, 20, 20)], decodes=7, context=400),
        make_batch(decodes=5, context=1024),
    ]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("expanded", [False, True])
def test_without_beams_it_is_the_cost_model(tp: int, expanded: bool) -> None:
    gpu, link = GPUS["a100-80gb"], LINKS["nvlink-a100"]
    plain = CostModel(LLAMA, gpu, tp=tp, link=link)
    beams = BeamCostModel(LLAMA, gpu, tp=tp, link=link, expanded=expanded)
    for batch in ordinary_batches():
        assert beams.seconds(batch) == pytest.approx(plain.seconds(batch), rel=1e-12)
        assert beams.operators(batch) == plain.operators(batch)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("tp", [1, 8])
def test_operators_sum_to_seconds(cache: str, width: int, tp: int) -> None:
    cost = BeamCostModel(LLAMA, TILE, tp=tp, link=LINKS["max-1550-cards"], expanded=True)
    rider = make_batch([(0, 100, 300)], decodes=2, context=50)
    for response in (1, 2, 16, 17):
        beams = make_beams(cache, 2, width, 200, response, first_id=100)
        (late,) = make_beams(cache, 1, width, 64, 0, first_id=200)
        batch = Batch([*rider.chunks, Chunk(late, 0, 64)], [*rider.decodes, *beams])
        assert sum(cost.operators(batch).values()) == pytest.approx(cost.seconds(batch), rel=1e-12)


def test_a_width_of_one_is_an_ordinary_request(cost: BeamCostModel) -> None:
    ordinary = make_batch(decodes=1, context=1024 + 64)
    assert cost.seconds(decode("segment", 1)) == cost.seconds(ordinary)
    assert cost.attention(decode("standard", 1)) == cost.attention(ordinary)
    assert cost.seconds(prefill("segment", 1)) == cost.seconds(make_batch([(0, 1024, 1024)]))


def test_what_attention_reads() -> None:
    """By hand: prompt 1000, 20 steps of 4 beams."""
    (segment,), (standard,) = (make_beams(cache, 1, 4, 1000, 20) for cache in CACHES)
    assert read_tokens(segment) == 1000 + 4 * 20
    assert read_tokens(standard) == 4 * (1000 + 20)


def test_what_moves_besides() -> None:
    """By hand. 19 steps are in the cache before the step that is priced, or 16, or none."""
    (standard,) = make_beams("standard", 1, 4, 1000, 20)
    held = 4 * 1019
    assert moved_tokens(standard) == {
        "expand": 0,
        "index_select": 2 * held,
        "concatenate": held + (held + 4),
    }
    (first,) = make_beams("standard", 1, 4, 1000, 1)
    assert moved_tokens(first) == {
        "expand": 1000 + 4000,
        "index_select": 0,
        "concatenate": 4000 + 4004,
    }
    (alone,) = make_beams("standard", 1, 1, 1000, 20)
    assert moved_tokens(alone) == {"expand": 0, "index_select": 0, "concatenate": 1019 + 1020}
    grown = [moved_tokens(make_beams("segment", 1, 4, 1000, n)[0])["grow"] for n in range(1, 35)]
    assert {n: tokens for n, tokens in enumerate(grown, 1) if tokens} == {
        17: 2 * 4 * 16,
        33: 2 * 4 * 32,
    }


def test_a_standard_decode_moves_its_cache_five_times(cost: BeamCostModel) -> None:
    operators = cost.operators(decode("standard", 4))
    once = 4 * 1088 * cost.seconds_per_cached_token
    moved = operators["attn"] + operators["concatenate"] + operators["index_select"]
    assert moved == pytest.approx(5 * once, rel=0.01)


@pytest.mark.parametrize("cache", CACHES)
def test_more_costs_more(cost: BeamCostModel, cache: str) -> None:
    for batches in (
        [decode(cache, width) for width in range(1, 9)],
        [decode(cache, 4, prompt) for prompt in (100, 1000, 4000)],
        [decode(cache, 4, 1000, response) for response in (2, 10, 100)],
        [decode(cache, 4, count=count) for count in (1, 2, 8)],
    ):
        seconds = [cost.seconds(batch) for batch in batches]
        assert all(more > less for less, more in pairwise(seconds))


def test_segment_costs_less_than_standard_and_nearly_nothing_for_width(cost: BeamCostModel) -> None:
    one, four, standard = (
        cost.seconds(decode(*which)) for which in (("segment", 1), ("segment", 4), ("standard", 4))
    )
    assert one < four < 1.02 * one < standard


def test_many_queries_for_each_key_compute_longer_than_they_read() -> None:
    """One KV head for 40 heads, 16 beams: 640 queries meet each key, and FLOPs decide."""
    mqa = replace(LLAMA, n_kv_head=1)
    cost = BeamCostModel(mqa, TILE)
    (wide,), (narrow,) = (make_beams("segment", 1, width, 4096, 2) for width in (16, 1))
    flops = 4 * 16 * 4098 * mqa.n_layer * mqa.n_head * mqa.head_dim
    computing = flops / (TILE.peak * cost.efficiency.attention)
    reading = read_tokens(wide) * cost.seconds_per_cached_token
    assert cost.beam_attention(wide) == computing > reading
    assert cost.beam_attention(narrow) == read_tokens(narrow) * cost.seconds_per_cached_token


def test_the_prefill_runs_once_unless_prompts_are_repeated() -> None:
    once, expanded = BeamCostModel(LLAMA, TILE), BeamCostModel(LLAMA, TILE, expanded=True)
    assert once.seconds(prefill("standard", 4)) == once.seconds(prefill("segment", 1))
    assert expanded.seconds(prefill("segment", 4)) == once.seconds(prefill("segment", 1))
    four = Batch([Chunk(Request(i, range(1024), 2), 0, 1024) for i in range(4)], [])
    assert expanded.seconds(prefill("standard", 4)) == once.seconds(four)
    assert "expand" not in expanded.operators(decode("standard", 4, response=1))


def test_a_chunk_beside_beams_shares_the_weights(cost: BeamCostModel) -> None:
    chunk = make_batch([(0, 240, 1024)])
    beams = decode("segment", 4, count=4)
    together = Batch(chunk.chunks, beams.decodes)
    assert rows_of(together) == 240 + 16 == cost.rows(together)[0]
    assert cost.rows(together)[1] == 16, "logits of the beams' rows; the chunk is not the last"
    linears = [cost.operators(batch)["ffn_ln1"] for batch in (together, chunk, beams)]
    assert linears[0] < 0.75 * sum(linears[1:])
    assert cost.attention(together) == pytest.approx(cost.attention(chunk) + cost.attention(beams))


def test_a_measured_bandwidth_is_not_discounted_twice(cost: BeamCostModel) -> None:
    assert TILE.measured and TILE.bandwidth == 1000e9 and TILE.memory == 64e9
    assert cost.seconds_per_cached_token == cache_token(LLAMA) / 1000e9
    assert cost.guess.startswith("sarathi was not measured on the max-1550-tile, which borrows")
    own = Efficiency(compute=0.5, memory=0.5, attention=0.5, p=2)
    assert BeamCostModel(LLAMA, TILE, efficiency=own).efficiency == own
    other = BeamCostModel(LLAMA, GPUS["a6000"])
    assert other.efficiency == CostModel(LLAMA, GPUS["a6000"]).efficiency


# --------------------------------------------------------------------------------------- simulation


def mix(cache: str = "segment") -> list[Request]:
    """Eight requests, every second one a search, all there at the start."""
    return [
        BeamRequest(i, range(150 + 40 * i), 20, beam_width=4, cache=cache)
        if i % 2
        else Request(i, range(300 + 10 * i), 30)
        for i in range(8)
    ]


@pytest.mark.parametrize("policy", ["sarathi", "sarathi_serve"])
def test_rows_of_beams_count_against_the_token_budget(policy: str) -> None:
    cost, requests = BeamCostModel(LLAMA, TILE), mix()
    loop = Loop(make_scheduler(policy, 8, 64), CostExecutor(cost))
    loop.scheduler.memory = BeamMemory(loop.scheduler.memory)
    for request in requests:
        loop.add(request)
    rows, hybrid = [], 0
    while loop.step():
        rows.append(rows_of(loop.batch))
        beams = any(isinstance(request, BeamRequest) for request in loop.batch.decodes)
        hybrid += beams and bool(loop.batch.chunks)
    assert max(rows) == 64 and hybrid > 3
    assert len(loop.trace.finished) == 8
    assert all(len(request.output) == request.max_tokens for request in requests)


@pytest.mark.parametrize("policy", ["request_level", "orca", "vllm_v0", "sarathi", "dynamic"])
def test_every_request_ends_and_segments_end_sooner(policy: str) -> None:
    segment, standard = (
        simulate_beams(mix(cache), policy=policy, max_batch_size=4) for cache in CACHES
    )
    assert len(segment.finished) == len(standard.finished) == 8
    assert segment.seconds < standard.seconds


def test_little_memory_preempts_and_ends_all_the_same() -> None:
    need = max(request.most_cached for request in mix())
    trace = simulate_beams(mix(), cache_tokens=need + 400, max_batch_size=8)
    assert trace.preempted and len(trace.finished) == 8


def test_a_search_may_hold_more_than_one_beams_positions() -> None:
    """Eight beams hold more tokens together than the model has positions for one: this is fine."""
    request = BeamRequest(0, range(3500), 500, beam_width=8)
    assert request.most_cached > LLAMA.max_length
    assert len(simulate_beams([request], policy="orca").finished) == 1
