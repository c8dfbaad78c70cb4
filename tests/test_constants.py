"""The cost model's constants: whose they are, who borrows them, and who says so."""

import re
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from batch import Request
from command.checks import UserError
from configs import GPUS, LINKS, MODELS
from configs.constants import BORROWED, STRANGERS
from configs.experts import EXPERTS, FP8
from configs.hosts import HOSTS
from costmodel import EFFICIENCY, SOFTWARE, CostModel, constants, make_batch
from experiments import fit
from experiments.lib.common import ROOT
from experiments.lib.engines import Priced, Sweep
from experiments.lib.study import guesses
from more.apart.simulate import simulate_fleet
from more.pipeline import simulate_pipeline
from more.policies import FOR_PIPELINES, POLICIES
from more.simulate import make_cost_model, simulate

L20 = EFFICIENCY["l20", "vllm-0.5.3"]


@pytest.mark.parametrize("run", [simulate, simulate_pipeline])
def test_a_trace_says_whose_constants_it_borrowed(run) -> None:
    hop = {"hop": "pcie4"} if run is simulate_pipeline else {}
    for gpu, guess in (("a6000", ""), ("h100", constants("h100", "xformers-2023")[1])):
        assert run([Request(0, [1] * 9, 3)], "llama-13b", gpu, **hop).guess == guess
    assert CostModel(MODELS["llama-13b"], GPUS["h100"], L20).guess == "", "who gives them vouches"


def test_a_trace_says_that_its_memory_is_too_small() -> None:
    """Of one T4; of its pipeline, which shares weights and cache; of too large a cache."""

    def said(run: Callable, gpu: str = "t4", **options: object) -> str:
        trace = run([Request(0, [1] * 9, 3)], "llama2-70b", gpu, tp=8, **options)
        return trace.guess.partition("% too slow; ")[2]

    small = "138 GB of weights do not fit the 128 GB of 8 x t4"
    assert said(simulate).endswith(small) and said(simulate_fleet).endswith(small)
    assert "GB" not in said(simulate_pipeline, stages=2, hop="pcie4", cache_tokens=10_000)
    assert "GB" not in said(simulate, "a100-80gb", cache_tokens=10**6)
    small = "weights and cache do not fit the 640 GB of 8 x a100-80gb"
    assert said(simulate, "a100-80gb", cache_tokens=2 * 10**6).endswith(small)
    one = {"stages": 2, "hop": "pcie4", "cache_tokens": 200_000}
    assert "GB" not in said(simulate_pipeline, memory="pool", **one)
    assert "and cache do not fit the 256 GB of 16 x t4" in said(simulate_pipeline, **one)


def test_every_results_file_says_its_guesses() -> None:
    def said(gpu: str, **options: str) -> list[str]:
        return guesses([Sweep(print, [Priced("llama-13b", gpu, **options)] * 2, [])])

    assert said("a6000") == said("a100-80gb", software="vidur-2024") == []
    (line,) = said("a100-80gb")
    assert line.startswith("xformers-2023 was not measured on the a100-80gb, which borrows the")


def test_a_name_means_one_thing() -> None:
    """However its words are joined. And a document says what each software is."""
    kinds = [POLICIES, FOR_PIPELINES, GPUS, MODELS, LINKS, HOSTS, SOFTWARE]
    plain = [name.replace("_", "-") for kind in kinds for name in kind]
    assert sorted(plain) == sorted({*plain})
    page = (ROOT / "docs" / "what-a-gpu-charges.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE) == [*SOFTWARE]


# ------------------------------------------------------------------------------ experts and fp8


@pytest.mark.parametrize("software", SOFTWARE)
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("model", ["llama3.1-8b", "mixtral-8x7b"])
def test_every_gpu_prices_a_format_or_says_why_not(model: str, weights: str, software: str) -> None:
    """No table of kernels has a hole where a GPU looks."""
    model = replace(MODELS[model], weights=weights)
    batch = make_batch([(0, 64, 64)], 4, 100)
    for gpu in GPUS.values():
        if (model.experts or weights == "fp8") and software != "vllm":
            why = "their kernels are known for vllm, not"
        elif weights == "fp8" and gpu.generation in ("turing", "ampere"):
            why = f"the {gpu.name} computes no fp8"
        elif weights == "fp8" and gpu.generation in STRANGERS:
            why = f"no public measurement of fp8 products on the {gpu.name} is known"
        else:
            assert 0 < CostModel(model, gpu, software=software).seconds(batch) < 1
            continue
        with pytest.raises(UserError, match=why):
            CostModel(model, gpu, software=software)


@pytest.mark.parametrize("gpu, owner", [("rtx4090", "l40s"), ("l40s", ""), ("h100", "")])
def test_experts_and_fp8_are_borrowed_from_who_has_them(
    gpu: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest; a GPU may have its own constants of all else, or a user's. It says so."""
    model = replace(MODELS["mixtral-8x7b"], weights="fp8")
    cost = CostModel(model, GPUS[gpu], software="vllm")
    own = owner or gpu
    assert cost.efficiency == EFFICIENCY[gpu, "vllm"]
    assert cost.fp8 == replace(EFFICIENCY[own, "vllm"], **FP8[own])
    assert cost.experts.func == EXPERTS[own, "fp8"].seconds
    said = f" of vllm were measured on the {gpu}, which borrows the {owner}'s"
    given = CostModel(model, GPUS[gpu], L20, software="vllm")
    measured = CostModel(model, replace(GPUS[gpu], measured=True), software="vllm")
    guess = f"no experts{said}; no fp8 products{said}" if owner else ""
    assert cost.guess == given.guess == measured.guess == guess
    assert not CostModel(MODELS["llama3.1-8b"], GPUS[gpu], software="vllm").guess
    monkeypatch.delitem(EXPERTS, (own, "fp8"))
    other = "l40s" if own == "h100" else "h100"
    found = CostModel(model, GPUS[gpu], software="vllm").experts.func
    assert found == EXPERTS[other, "fp8"].seconds


# ---------------------------------------------------------------------------------------- the fits

# What each prints: places of EFFICIENCY.
PRINTED = {
    "a6000": {("a6000", "xformers-2023")},
    "l20": {("l20", "vllm-0.5.3")},
    "vidur": {("a100-80gb", "vidur-2024")},
    "vllm": {(gpu, "vllm") for gpu in fit.CHOSEN},
    "law": set(),
}
SLOW = ("vllm", "law")


def test_every_constant_has_a_fit() -> None:
    assert set.union(*PRINTED.values()) == set(EFFICIENCY) and set(PRINTED) == set(fit.FITS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in fit.FITS],
)
def test_a_fit_finds_the_constants_in_use(name, monkeypatch, capsys) -> None:
    """To the last digit: the script exits with a complaint where configs/ holds others."""
    monkeypatch.setattr("sys.argv", ["fit.py", name])
    fit.main()
    said = capsys.readouterr().out
    for owner in PRINTED[name]:
        assert f'EFFICIENCY["{owner[0]}", "{owner[1]}"] = {EFFICIENCY[owner]!r}' in said


def test_a_guess_says_how_wrong_such_guesses_were() -> None:
    """constants.BORROWED holds what the L20's measured iterations say of each software."""
    found = fit.borrowed_errors()
    for software, said in BORROWED.items():
        assert statistics.median(found[software]) == pytest.approx(said, abs=0.05)
        assert f"{said:.0f} % too slow" in constants("b200", software)[1]
    assert set(BORROWED) == set(SOFTWARE) - {"vllm-0.5.3"}


def test_a_guess_says_that_all_reduces_were_not_measured() -> None:
    def guess(gpu: str, tp: int, link: str | None = None) -> str:
        return make_cost_model("llama3.1-8b", gpu, tp, link, "vllm").guess

    said = "no all-reduces of 8 GPUs over pcie4 for vllm"
    assert guess("h100", 1) == guess("h100", 8) == guess("h100", 1, "pcie4") == ""
    assert guess("h100", 8, "pcie4") == said
    assert guess("a40", 8).endswith(f"too slow; {said}")
