"""The figures of Sarathi-Serve: what an iteration costs, and what a deployment is."""

from dataclasses import replace

import pytest

from configs import GPUS, LINKS, MODELS
from configs.hosts import HOSTS
from costmodel import CostModel, make_batch
from experiments import fidelity, serve_chunking, serve_phases, serve_pipelines
from experiments.lib.papers import CHAT, MISTRAL
from experiments.serve_pipelines import ETHERNETS, FALCON, FALCON_TP8, HOST_NAMES, LLAMA, slos
from more.serving.capacity import Deployment


def test_parts_are_the_whole() -> None:
    cost = MISTRAL.cost_model
    batch = make_batch([(512, 512, 2048)], decodes=8)
    assert sum(serve_phases.parts(cost, batch).values()) == pytest.approx(cost.seconds(batch))


def test_a_decode_costs_the_linear_operators_as_much_as_tokens_up_to_the_knee() -> None:
    """As many tokens as the knee, at the marginal price of large batches, take a decode's time."""
    cost = CostModel(MODELS["llama2-70b"], GPUS["a100-80gb"], software="vidur-2024")
    one, low, high = (sum(cost.linears(tokens).values()) for tokens in (1, 4096, 8192))
    knee = serve_phases.saturating_tokens(cost)
    assert knee * (high - low) / 4096 == pytest.approx(one) and 64 < knee < 512


def test_a_prompt_in_one_chunk_is_the_whole_prompt() -> None:
    cost = serve_phases.NODE.cost_model
    for size, chunks in ((4096, [(0, 3000)]), (2048, [(0, 2048), (2048, 952)])):
        wanted = sum(cost.seconds(make_batch([(*chunk, 3000)])) for chunk in chunks)
        assert serve_chunking.prefill_seconds(cost, 3000, size) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "bound, ours, verdict",
    [("upper", 5, "met"), ("upper", 7, "not met"), ("lower", 5, "not met"), ("lower", 7, "met")],
)
def test_bounds_have_two_sides(bound: str, ours: float, verdict: str) -> None:
    row = dict.fromkeys(("where", "conditions", "unit"), "") | {
        "id": "x",
        "source": "sarathi",
        "quantity": f"share ({bound} bound)",
        "value": "6",
        "kind": "measured",
    }
    judged = fidelity.judge(row, ours, {})
    assert judged.verdict == verdict and (judged.error is None) == (verdict == "met")


@pytest.mark.parametrize("deployment", (FALCON, FALCON_TP8), ids=lambda each: each.layout)
def test_the_times_between_tokens_are_the_whole_passage(deployment: Deployment) -> None:
    """One request alone: each decode waits for the host once, passes all stages and comes back."""
    found = {}
    for host in ("none", "sarathi-artefact"):
        one = replace(deployment, host=host)
        (life,) = one.serve(CHAT.requests(1), "sarathi_serve", 512).lives.values()
        found[host] = one.passage(make_batch(decodes=1, context=life.prompt_tokens + 1))
        assert life.tbt[0] == pytest.approx(found[host], rel=1e-3)
    waits = HOSTS["sarathi-artefact"].around(0.0, 1)
    assert found["sarathi-artefact"] == pytest.approx(found["none"] + waits)


def test_a_hop_and_tp8_cross_the_same_ethernet() -> None:
    for case in serve_pipelines.CAUSES:
        link = ETHERNETS[case["link"]]
        host = HOST_NAMES[case["host"]]
        pipeline, tp8 = serve_pipelines.falcon(link, host)
        assert LINKS[tp8.link].between == LINKS[pipeline.hop] == LINKS[link]
        assert pipeline.host == tp8.host == host


def test_slos_are_of_the_pipeline_and_budgets_of_the_artefact() -> None:
    assert slos(FALCON_TP8) == slos(FALCON)
    assert slos(FALCON)["strict"] == (5 * FALCON.decode_iteration, 512)
    assert slos(FALCON)["5 s"] == (5.0, 2048)
    assert slos(LLAMA)["relaxed"] == (25 * LLAMA.decode_iteration, 1536)
