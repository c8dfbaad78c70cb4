"""The figures of Sarathi-Serve that show what an iteration costs: phases, linears, chunks."""

import pytest

from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments import fidelity, serve_chunking, serve_linears, serve_phases
from experiments.lib.papers import MISTRAL


def test_parts_are_the_whole() -> None:
    cost, batch = MISTRAL.cost_model, make_batch([(512, 512, 2048)], decodes=8)
    assert sum(serve_phases.parts(cost, batch).values()) == pytest.approx(cost.seconds(batch))


def test_a_decode_costs_the_linear_operators_as_much_as_tokens_up_to_the_knee() -> None:
    """As many tokens as the knee, at the marginal price of large batches, take a decode's time."""
    cost = CostModel(MODELS["llama2-70b"], GPUS["a100-80gb"], software="sarathi_serve")
    one, low, high = (sum(cost.linears(tokens).values()) for tokens in (1, 4096, 8192))
    knee = serve_phases.saturating_tokens(cost)
    assert knee * (high - low) / 4096 == pytest.approx(one)
    assert 64 < knee < 512


def test_intensity_grows_with_the_tokens_and_falls_with_the_degree() -> None:
    one, four = (
        CostModel(MODELS["llama2-70b"], GPUS["a100-80gb"], tp=tp, software="sarathi_serve")
        for tp in (1, 4)
    )
    assert serve_linears.intensity(one, 1) == pytest.approx(1, rel=0.01)  # 2 FLOPs for 2 bytes
    assert serve_linears.intensity(four, 512) < serve_linears.intensity(one, 512)
    knees = serve_linears.STUDY.predict().where(source="predicted").column("knee")
    assert knees == sorted(knees)


def test_a_prompt_in_one_chunk_is_the_whole_prompt() -> None:
    cost = serve_phases.NODE.cost_model
    whole = cost.seconds(make_batch([(0, 3000, 3000)]))
    assert serve_chunking.prefill_seconds(cost, 3000, 4096) == pytest.approx(whole)
    halves = cost.seconds(make_batch([(0, 2048, 3000)])) + cost.seconds(
        make_batch([(2048, 952, 3000)])
    )
    assert serve_chunking.prefill_seconds(cost, 3000, 2048) == pytest.approx(halves)


@pytest.mark.parametrize(
    "bound, ours, verdict",
    [("upper", 5, "met"), ("upper", 7, "not met"), ("lower", 5, "not met"), ("lower", 7, "met")],
)
def test_bounds_have_two_sides(bound: str, ours: float, verdict: str) -> None:
    row = {
        "id": "x", "source": "sarathi", "where": "", "quantity": f"share ({bound} bound)",
        "conditions": "", "value": "6", "unit": "%", "kind": "measured",
    }  # fmt: skip
    judged = fidelity.judge(row, ours, {})
    assert judged.verdict == verdict and (judged.error is None) == (verdict == "met")
