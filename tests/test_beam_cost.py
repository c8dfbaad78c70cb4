"""What a beam search is priced at: bytes by the paper's formulas, seconds by hand, and a mix."""

import pytest

from batch import Batch, Chunk, Request
from configs import GPUS, LINKS, MODELS
from costmodel import CostModel, make_batch
from more.beam.cost import BeamCostModel, cache_bytes, make_beams, moved_tokens, read_tokens
from more.beam.request import CACHES

TILE = GPUS["max-1550-tile"]
LLAMA = MODELS["llama2-13b"]


def prefill(cache: str, width: int, prompt: int = 1024) -> Batch:
    (request,) = make_beams(cache, 1, width, prompt, 0)
    return Batch([Chunk(request, 0, prompt)], [])


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("expanded", [False, True])
def test_without_beams_it_is_the_cost_model(tp: int, expanded: bool) -> None:
    gpu = GPUS["a100-80gb"]
    link = LINKS["nvlink-a100"]
    plain = CostModel(LLAMA, gpu, tp=tp, link=link)
    beams = BeamCostModel(LLAMA, gpu, tp=tp, link=link, expanded=expanded)
    for batch in (
        make_batch([(0, 300, 300)]),
        make_batch([(256, 128, 900), (0, 20, 20)], decodes=7, context=400),
        make_batch(decodes=5, context=1024),
    ):
        assert beams.seconds(batch) == pytest.approx(plain.seconds(batch), rel=1e-12)
        assert beams.operators(batch) == plain.operators(batch)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("tp", [1, 8])
def test_operators_sum_to_seconds(cache: str, width: int, tp: int) -> None:
    cost = BeamCostModel(LLAMA, TILE, tp=tp, link=LINKS["max-1550-cards"], expanded=True)
    rider = make_batch([(0, 100, 300)], decodes=2, context=50)
    for response in (1, 2, 16, 17):
        beams = make_beams(cache, 2, width, 200, response)
        (late,) = make_beams(cache, 1, width, 64, 0)
        batch = Batch([*rider.chunks, Chunk(late, 0, 64)], [*rider.decodes, *beams])
        assert sum(cost.operators(batch).values()) == pytest.approx(cost.seconds(batch), rel=1e-12)


def test_bytes_by_hand() -> None:
    """The paper's example, to the byte. A segment grows by 16 steps."""
    gptj = MODELS["gptj-6b"]
    assert gptj.kv_bytes_per_token() == 2 * 32 * 32 * 128 * 2
    assert cache_bytes(gptj, "standard", 32, 4, 1024, 1024) == 137_438_953_472
    assert cache_bytes(gptj, "segment", 32, 4, 1024, 1024) == 85_899_345_920
    token = LLAMA.kv_bytes_per_token()
    for response, held in ((1, 164), (16, 164), (17, 228), (32, 228), (33, 292)):
        assert cache_bytes(LLAMA, "segment", 1, 4, 100, response) == held * token


def test_what_attention_reads() -> None:
    """By hand: prompt 1000, 20 steps of 4 beams."""
    (segment,), (standard,) = (make_beams(cache, 1, 4, 1000, 20) for cache in CACHES)
    assert read_tokens(segment) == 1000 + 4 * 20
    assert read_tokens(standard) == 4 * (1000 + 20)
    [wide] = make_beams("segment", 1, 4096, 8000, 1)  # its FLOPs take longer than reading
    flops = 2 * 2 * 4096 * 8001 * 40 * 40 * 128  # layers, heads, channels
    for tp in (1, 8):
        cost = BeamCostModel(LLAMA, TILE, tp=tp, link=LINKS["max-1550-cards"])
        seconds = flops / tp / (TILE.peak * cost.efficiency.attention)
        assert cost.beam_attention(wide) == pytest.approx(seconds)


def test_what_moves_besides() -> None:
    """By hand. 19 steps are in the cache before the step that is priced, or 16, or none."""
    held = 4 * 1019
    for width, response, expand, select, concatenate in (
        (4, 20, 0, 2 * held, held + (held + 4)),
        (4, 1, 1000 + 4000, 0, 4000 + 4004),
        (1, 20, 0, 0, 1019 + 1020),
    ):
        moved = moved_tokens(make_beams("standard", 1, width, 1000, response)[0])
        assert moved == {"expand": expand, "index_select": select, "concatenate": concatenate}
    grown = [moved_tokens(make_beams("segment", 1, 4, 1000, n)[0])["grow"] for n in range(1, 35)]
    found = {n: tokens for n, tokens in enumerate(grown, 1) if tokens}
    assert found == {17: 2 * 4 * 16, 33: 2 * 4 * 32}


def test_the_prefill_runs_once_unless_prompts_are_repeated() -> None:
    once = BeamCostModel(LLAMA, TILE)
    expanded = BeamCostModel(LLAMA, TILE, expanded=True)
    assert once.seconds(prefill("standard", 4)) == once.seconds(prefill("segment", 1))
    assert expanded.seconds(prefill("segment", 4)) == once.seconds(prefill("segment", 1))
    four = Batch([Chunk(Request(i, range(1024), 2), 0, 1024) for i in range(4)], [])
    assert expanded.seconds(prefill("standard", 4)) == once.seconds(four)
    assert "expand" not in expanded.operators(Batch([], make_beams("standard", 1, 4, 1024, 1)))


def test_a_chunk_beside_beams_shares_the_weights() -> None:
    cost = BeamCostModel(LLAMA, TILE)
    chunk = make_batch([(0, 240, 1024)])
    beams = Batch([], make_beams("segment", 4, 4, 1024, 64))
    together = Batch(chunk.chunks, beams.decodes)
    assert cost.rows(together) == (240 + 16, 16), "the chunk is not the last: it has no logits"
    linears = [cost.operators(batch)["ffn_ln1"] for batch in (together, chunk, beams)]
    assert linears[0] < 0.75 * sum(linears[1:])
    assert cost.attention(together) == pytest.approx(cost.attention(chunk) + cost.attention(beams))
