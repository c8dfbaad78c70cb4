"""Serving over time: capacity, token budget and what Sarathi-Serve says of its policies; the
scripts' own flags.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import Odd, ran

from batch import Request
from costmodel import TILE, make_batch
from experiments import serve_capacity, serve_stalls
from experiments.lib.flags import WRITES, ScriptParser, file_name
from experiments.lib.papers import LOOKS, MISTRAL, YI, looks_of
from experiments.lib.rows import read_rows
from more.serving import planner
from more.serving.capacity import Deployment, Load, token_budget, worst_iteration
from more.serving.search import percentile
from more.serving.traffic import Uniform, make_requests, poisson
from scheduler import POLICIES, SarathiServe
from timeline import Life, Trace

pytestmark = pytest.mark.usefixtures("sketches")


@given(st.lists(st.floats(-1e9, 1e9), max_size=40), st.floats(0, 100))
def test_a_percentile_without_numpy_is_numpys(values: list[float], percent: float) -> None:
    """To the last bit: figures and grades must not depend on where they are computed."""
    expected = np.percentile(values, percent) if values else 0.0
    assert percentile(values, percent) == expected


def test_a_percentile_among_infinite_values_is_infinite() -> None:
    """Where numpy has NaN. (Requests that did not end have such times.)"""
    values = [1.0, 2.0, 3.0, math.inf, math.inf]
    found = [percentile(values, percent) for percent in (0, 25, 50, 51, 75, 99, 100)]
    assert found == [1, 2, 3, *[math.inf] * 4]


def test_a_closed_loop_goes_on_after_a_rejected_request() -> None:
    POLICIES["odd"] = Odd
    requests = make_requests([0.0] * 9, *[Uniform(9, 9)] * 2)
    trace = MISTRAL.serve(requests, "odd", 64, clients=1)
    assert [own for own, _ in trace.finished] == [1, 3, 5, 7]
    assert [own for own, _ in trace.rejected] == [0, 2, 4, 6, 8]


def test_start_and_end_are_left_out_of_a_load() -> None:
    """Eight requests, one a second; the first two are the start, and 7 s is the last arrival."""
    lives = {i: Life(i, float(i), 5, i + 0.5, tokens=[i + 0.6, i + 0.8]) for i in range(8)}
    lives[0] = Life(0, 0.0, 5, 0.0, tokens=[1.0, 9.0])  # a gap of 8 s, at the start
    lives[1] = Life(1, 1.0, 5, 9.0, tokens=[9.5, 30.0])  # a delay of 8 s, at the start
    lives[6].tokens.append(40.0)  # a gap of 33 s, at the end
    load = Load.steady(Trace(lives=lives))
    assert load.value("tbt", 99) == pytest.approx(0.2) and load.median_delay == pytest.approx(0.5)
    assert [load.value(*each) for each in (("ttft", 99), ("tpot", 50))] == pytest.approx([0.6, 0.2])
    assert Load.of(Trace(lives=lives)).value("tbt", 99) > 20


def test_the_stages_of_a_pipeline_share_memory_and_batch() -> None:
    """Each has half of the weights, so two GPUs have more than twice the room of one."""
    one, two = (Deployment("mistral-7b", stages=n, max_batch_size=8) for n in (1, 2))
    assert two.cache_tokens > 2 * one.cache_tokens and two.hardware == "2 x a100-80gb"
    for engine, policy, most in ((one, "vllm_v1", 8), (one, "orca", 16), (two, "vllm_v1", 4)):
        trace = engine.serve(make_requests([0.0] * 20, *[Uniform(9, 9)] * 2), policy, 512)
        assert max(each.num_chunks + each.num_decodes for each in trace.iterations) == most
    gap, *_ = two.serve([Request(0, range(99), 3)], "vllm_v1", 512).tbts
    assert two.passage(make_batch(decodes=1, context=100)) == pytest.approx(gap, rel=1e-9)


@settings(deadline=None, max_examples=30)
@given(slo=st.floats(0.04, 1.0))
def test_token_budget_is_the_largest_that_fits(slo: float) -> None:
    cost = MISTRAL.cost_model
    budget = token_budget(cost, slo)
    assert budget % TILE == 0 and worst_iteration(cost, budget) <= slo
    assert budget == 8192 or worst_iteration(cost, budget + TILE) > slo


def test_no_iteration_is_longer_than_the_worst() -> None:
    """Up to what several prompts' ends in one batch cost more than one's: their keys and values are
    read apart.
    """
    requests = make_requests(poisson(60, 4.0), Uniform(1000, 1900), Uniform(50, 148))
    trace = MISTRAL.serve(requests, "sarathi_serve", 512)
    most = max(iteration.num_decodes for iteration in trace.iterations)
    worst = worst_iteration(MISTRAL.cost_model, 512, most, 2048, 2048)
    assert 0.8 * worst < max(iteration.seconds for iteration in trace.iterations) < 1.02 * worst


class Picky(SarathiServe):
    """A researcher's own policy. It is good under a budget of 1024 tokens alone."""

    name = "picky"

    def __init__(self, size: int, chunk_size: int, cache_tokens: int | None = None):
        super().__init__(size if chunk_size == 1024 else 1, chunk_size, cache_tokens)


@pytest.mark.usefixtures("sketches")
def test_a_policy_of_ones_own_is_compared_with_a_budget_and_a_colour_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    POLICIES["picky"] = Picky
    monkeypatch.setattr(serve_capacity, "DEPLOYMENTS", (MISTRAL,))
    monkeypatch.setattr(planner, "FEWEST", 48)
    path = tmp_path / "short.csv"
    lines = [f"{0.5 * i},{3000 + 10 * i},{30 + i}" for i in range(20)]
    path.write_text("\n".join(["arrival,prompt_tokens,output_tokens", *lines]), encoding="utf-8")
    flags = ["--quick", "--requests-file", str(path), "--policy", "picky", "--out", str(tmp_path)]
    ran("serve_capacity", *flags)
    found = read_rows(tmp_path / "quick" / "serve_capacity-short-picky.csv")
    assert list(found.by("policy")) == [*serve_capacity.POLICIES, "picky"]
    picky, ours, rival = (
        found.where(policy=name, slo="relaxed") for name in ("picky", "sarathi_serve", "vllm_v0")
    )
    assert not rival.column("budget"), "it runs whole prompts"
    assert picky.one("budget") == 1024
    assert picky.one("capacity") == pytest.approx(ours.one("capacity"), rel=0.35)
    looks = looks_of([*LOOKS, "picky", "another"])
    assert len(set(looks.values())) == len(looks)


def test_all_means_every_policy() -> None:
    parser = ScriptParser("", serve_capacity.STUDY.flags | WRITES)
    options = parser.parse_args(["--policy", "all", "--policy", "vllm_v0:4096"])
    assert options.policy == ["vllm_v0:4096", *POLICIES]
    assert file_name("name", options) == "name-all-vllm_v0-4096"


def test_the_curve_of_stalls_ends_with_all_tokens() -> None:
    """Where the first iteration starts late, as in every measured run, too."""
    requests = [Request(i, range(3000), 20, arrival=7.0) for i in range(3)]
    _, *steps = serve_stalls.over_time(YI.serve(requests, "vllm_v0", 512))
    curve = [(step["time"], step["output tokens"]) for step in steps]
    assert curve[0] == (0, 0) and curve[-1][1] == 60 and curve[-1][0] < 7


def test_slos_are_close_to_the_papers() -> None:
    for deployment, slos in serve_capacity.PAPER_SLOS.items():
        for iterations, slo in slos.items():
            assert iterations * deployment.decode_iteration == pytest.approx(slo, rel=0.2)


@pytest.mark.slow
def test_stalls_of_priced_and_real_runs_as_a_trace_file(tmp_path: Path) -> None:
    measure = ["--measure", "--device", "cpu", "--dtype", "float32", "--model", "demo"]
    out = str(tmp_path)
    file = tmp_path / "run.json"
    ran("serve_stalls", "--quick", "--out", out, "--perfetto", str(file), *measure)
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    told = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    groups = [name.split(" (")[0] for name in told]
    assert told[0] == "vllm_v0: engine (predicted: yi-34b on 2 x a100-80gb, vllm_v0, C = 1536)"
    runs = [f"{what}{policy}" for what in ("", "measured ") for policy in serve_stalls.COMPARED]
    assert groups == [f"{run}: {part}" for run in runs for part in ("engine", "requests")]
