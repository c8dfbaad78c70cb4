"""Sarathi-Serve's pipelines: what a deployment is, and what its experiment compares."""

from dataclasses import replace

import pytest

from command.checks import UserError
from configs import GPUS, LINKS, MODELS
from configs.hosts import HOSTS
from costmodel import make_batch, tokens_that_fit
from experiments import serve_pipelines
from experiments.lib.papers import CHAT, MISTRAL, OURS, Job, Settled, settled_capacities
from experiments.serve_pipelines import (
    AT_PEAK,
    ETHERNETS,
    FALCON,
    FALCON_TP8,
    LLAMA,
    SOFTWARE,
    slos,
)
from serving.capacity import Deployment, Load
from serving.traffic import at_rate, repeat
from simulate import simulate


def test_one_stage_is_simulate() -> None:
    requests = CHAT.requests(20)
    found = MISTRAL.serve(at_rate(requests, 2.0), "sarathi_serve", 512)
    wanted = simulate(
        at_rate(requests, 2.0), "mistral-7b", "a100-80gb", policy="sarathi_serve", chunk_size=512,
        max_batch_size=128, cache_tokens=MISTRAL.cache_tokens, software="sarathi_serve",
    )  # fmt: skip
    assert found.finished == wanted.finished and found.iterations == wanted.iterations


def test_a_pipeline_serves_every_request_with_the_words_of_simulate() -> None:
    requests = CHAT.requests(24)
    trace = FALCON.serve(at_rate(requests, 1.0), "sarathi_serve", 512)
    assert len(trace.finished) == len(trace.lives) == 24
    tokens = sum(len(life.tokens) for life in trace.lives.values())
    assert tokens == sum(request.max_tokens for request in requests)
    assert Load.of(trace).value("tbt", 99) > FALCON.passage(make_batch(decodes=1, context=2))


@pytest.mark.parametrize("deployment", (FALCON, FALCON_TP8), ids=lambda each: each.layout)
def test_the_times_between_tokens_are_the_whole_passage(deployment: Deployment) -> None:
    """One request alone: each decode waits for the host once, passes all stages and comes back."""
    found = {}
    for host in ("none", "sarathi-serve"):
        one = replace(deployment, host=host)
        (life,) = one.serve(CHAT.requests(1), "sarathi_serve", 512).lives.values()
        found[host] = one.passage(make_batch(decodes=1, context=life.prompt_tokens + 1))
        assert life.tbt[0] == pytest.approx(found[host], rel=1e-3)
    waits = HOSTS["sarathi-serve"].around(0.0, 1)
    assert found["sarathi-serve"] == pytest.approx(found["none"] + waits)


def test_a_hop_and_tp8_cross_the_same_ethernet() -> None:
    for case in serve_pipelines.CAUSES:
        link, host = ETHERNETS[case["link"]], SOFTWARE[case["host"]]
        pipeline, tp8 = serve_pipelines.falcon(link, host)
        assert LINKS[tp8.link].between == LINKS[pipeline.hop] == LINKS[link]
        assert pipeline.host == tp8.host == host
    with pytest.raises(UserError, match="host .*'vllm'.*sarathi-serve"):
        serve_pipelines.falcon(host="vllm")


def test_a_pipelines_memory_is_that_of_all_its_stages() -> None:
    """Eight GPUs hold the weights once, and there are eight KV heads: TP8 has as much."""
    whole = tokens_that_fit(MODELS["falcon-180b"], GPUS["a100-80gb-pcie"], tp=8)
    assert FALCON.cache_tokens == FALCON_TP8.cache_tokens == whole
    assert FALCON.layout == "TP4-PP2" and FALCON.hardware == FALCON_TP8.hardware


@pytest.mark.parametrize(("policy", "most"), [("orca", 4), ("vllm_v0", 64)])
def test_micro_batches_share_the_batch_size(policy: str, most: int) -> None:
    requests = at_rate(CHAT.requests(80), 1000.0)
    trace = LLAMA.serve(requests, policy, 512)
    found = max(iteration.num_decodes + iteration.num_chunks for iteration in trace.iterations)
    assert found <= most


def test_slos_are_of_the_pipeline_and_budgets_of_the_artefact() -> None:
    assert slos(FALCON_TP8) == slos(FALCON)
    assert slos(FALCON)["strict"] == (5 * FALCON.decode_iteration, 512)
    assert slos(FALCON)["5 s"] == (5.0, 2048)
    assert slos(LLAMA)["relaxed"] == (25 * LLAMA.decode_iteration, 1536)


@pytest.mark.slow
def test_each_capacity_stands_still() -> None:
    """As many as twice the requests serve it, and no more than a little above."""
    job, few = Job(FALCON_TP8, CHAT.name, OURS), 96
    bounds, precision = slos(job.deployment), serve_pipelines.PRECISION
    for name, best in settled_capacities(
        job, CHAT.requests(few), bounds, precision=precision
    ).items():
        assert best.requests >= few and best.requests % few == 0
        bound, budget = bounds[name]

        def served(rate: float, best: Settled = best, budget: int = budget) -> Load:
            arrivals = repeat(CHAT.requests(few), 2 * best.requests // few)
            return Load.steady(job.deployment.serve(at_rate(arrivals, rate), job.policy, budget))

        assert served(best.rate / precision).meets(bound), name
        assert not served(best.rate * precision**2).meets(bound), name


def test_the_published_prefill_is_no_sum_of_two_stages() -> None:
    """1150 ms are less than what two stages need at 100 % of their peak."""
    milliseconds = serve_pipelines.iterations(FALCON)
    published = serve_pipelines.NUMBERS["ss_falcon_prefill"]
    assert published < milliseconds[AT_PEAK] < milliseconds["prefill of 4K, all stages"]
    assert milliseconds["prefill of 4K, one stage"] == pytest.approx(published, rel=0.1)
