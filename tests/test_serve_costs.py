"""The figures of Sarathi-Serve that show what an iteration costs: phases, linears, chunks."""

import re
import statistics

import pytest

from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from experiments import fidelity, serve_chunking, serve_linears, serve_phases
from experiments.lib.common import ROOT, curves, paper_numbers, values
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


def test_prefill_is_flat_and_decode_grows() -> None:
    found = curves(serve_phases.predict(quick=True), "predicted")
    prefill, decode = ([p.y for p in found[f"{phase} throughput"]] for phase in serve_phases.PHASES)
    assert max(prefill) < 1.2 * min(prefill)
    assert decode == sorted(decode) and decode[-1] > 5 * decode[0]


def test_intensity_grows_with_the_tokens_and_falls_with_the_degree() -> None:
    one, four = (
        CostModel(MODELS["llama2-70b"], GPUS["a100-80gb"], tp=tp, software="sarathi_serve")
        for tp in (1, 4)
    )
    assert serve_linears.intensity(one, 1) == pytest.approx(1, rel=0.01)  # 2 FLOPs for 2 bytes
    assert serve_linears.intensity(four, 512) < serve_linears.intensity(one, 512)
    found = values(serve_linears.predict(quick=True))
    knees = [found[f"knee, TP{tp}"] for tp in serve_linears.DEGREES]
    assert knees == sorted(knees)


def test_a_prompt_in_one_chunk_is_the_whole_prompt() -> None:
    cost = serve_phases.NODE.cost_model
    whole = cost.seconds(make_batch([(0, 3000, 3000)]))
    assert serve_chunking.prefill_seconds(cost, 3000, 4096) == pytest.approx(whole)
    halves = cost.seconds(make_batch([(0, 2048, 3000)])) + cost.seconds(
        make_batch([(2048, 952, 3000)])
    )
    assert serve_chunking.prefill_seconds(cost, 3000, 2048) == pytest.approx(halves)


def test_the_longer_the_chunk_the_longer_the_decodes_wait() -> None:
    found = curves(serve_chunking.predict(quick=True), "predicted")
    growths = [found[f"last chunk of {chunk}"] for chunk in serve_chunking.CHUNKS]
    for points in zip(*growths, found[serve_chunking.WHOLE], strict=True):
        assert [p.y for p in points] == sorted(p.y for p in points) and points[0].y > 1
    for curve in growths:  # more decodes take longer by themselves
        assert [p.y for p in curve] == sorted((p.y for p in curve), reverse=True)


@pytest.mark.parametrize("module", [serve_phases, serve_linears, serve_chunking])
def test_each_published_number_has_a_predicted_point(module: object) -> None:
    figure = module.FIGURE
    points = figure.published_and_predicted(quick=True)
    paper = [point for point in points if point.source == "paper"]
    assert len(paper) == len(figure.paper)
    assert {point.y for point in paper} == {paper_numbers()[name] for name in figure.paper}


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


def test_the_table_of_the_better_law_is_what_fidelity_says() -> None:
    """The column "now" of docs/serving.md. "Before" is of the results before the law changed."""
    rows = {row.id: row for row in fidelity.read(ROOT / "results" / "fidelity.csv")}
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for what, pattern in (
        ("Fig 14", r"ss_fig14_\d+_\d+"), ("Fig 10", r"ss_(mistral|yi)_(chat|arxiv)_\w+"),
        ("Fig 12", r"ss_fig12_\w+"), ("Abstract", r"ss_(mistral|yi|falcon)"),
        ("Fig 11, 13", r"ss_(falcon_strict_vllm_pp|falcon_strict_vllm_tp8|llama70_orca)"),
        ("Table 3", r"ss_slo_(strict_mistral|relaxed_mistral|relaxed_yi)"),
        ("Table 4", r"ss_t4_\w+"),
    ):  # fmt: skip
        errors = [abs(row.error) for name, row in rows.items() if re.fullmatch(pattern, name)]
        (shown,) = re.findall(rf"^\| {what}: .*$", text, re.MULTILINE)
        _, _, count, _, now, *_ = shown.split("|")
        assert (int(count), now.strip()) == (len(errors), f"{statistics.median(errors):.1f} %"), (
            what
        )
