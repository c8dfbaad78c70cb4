"""Figure 9: predicted peaks near the paper's, the CSV's form, flags that complain in one line."""

import pytest
import torch
from conftest import call

import configs
from engine import LLM
from experiments import fig9
from experiments.lib.common import paper_numbers
from experiments.lib.engines import LLAMA_33B, Priced, setups
from experiments.lib.measuring import ChunkProfile, best_and_neighbour, profile_chunk_sizes
from experiments.lib.rows import read_rows, with_paper
from experiments.lib.steady import (
    Workload,
    balance,
    first_period,
    split,
    steady_window,
    tokens_per_second,
)
from loading import checkpoint
from loading.load import new_model, random_weights
from simulate import simulate
from timeline import Iteration, Trace

ENGINE = Priced("llama-13b", "a6000")


@pytest.mark.parametrize("number", ["f9_c256", "f9_c512", "t4_33b_1k_total", "t4_33b_3k_total"])
def test_predicted_peak_is_the_papers(number):
    on, length, size, ratio = fig9.PAPER[number]
    engine, batch_size = Priced(*on.values()), setups(*on.values()).popitem()[1][length]
    places = [part * ratio for part in (0.4, 0.7, 0.9, 1, 1.05, 1.4, 2)]
    found = {
        place: fig9.gain_of(engine, length, batch_size, place, size)["gain"] for place in places
    }
    best = max(found, key=found.get)
    assert found[best] == pytest.approx(paper_numbers()[number], rel=0.05)
    assert ratio / 1.2 < best < ratio * 1.2


def test_a_users_model_has_the_papers_numbers_where_it_is_the_papers(monkeypatch):
    monkeypatch.setattr(fig9, "ratios", lambda length, size, _: [balance(256, size)])
    for on, count in ((LLAMA_33B, 3), ({"model": "mistral-7b", "hardware": "h100"}, 0)):
        flags = {"model": on["model"], "gpu": on["hardware"]}
        rows = fig9.STUDY.predict(quick=True, **flags)
        assert {tuple(row[key] for key in on) for row in rows} == {tuple(on.values())}
        assert len(rows.where(source="paper")) == count
        assert fig9.STUDY.own(flags, rows) == (not count)
        told = with_paper(rows, "gain", "at P:D")
        assert len(told.where("error")) == len(told.where("paper at P:D")) == count
    assert setups("mistral-7b", "h100").popitem()[1] == dict.fromkeys((1024, 2048, 3072), 18)
    assert list(setups("gpt2-124m", None).popitem()[1]) == [1024]  # its positions


def test_small_chunks_gain_less():
    """SARATHI Sec 5.1.3: 128 gains much less than 256 and 512, 256 the most."""
    sizes = (128, 512, 256)
    peaks = [fig9.gain_of(ENGINE, 1024, 18, balance(size, 18), size)["gain"] for size in sizes]
    assert peaks == sorted(peaks)


def test_steady_state_does_not_depend_on_the_window():
    for policy, staggered in (("baseline", False), ("sarathi", False), ("orca", True)):
        trace = simulate(Workload(1024, 18, 10, staggered).requests(8 * 18), policy=policy)
        windows = [
            tokens_per_second(trace, 1024, 18 * first, 18 * last)
            for first, last in ((2, 3), (2, 4), (3, 7))
        ]
        assert windows == pytest.approx([windows[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(
    "length, batch_size, chunk_size", [(512, 8, 128), (512, 8, 256), (256, 4, 64)]
)
@pytest.mark.parametrize("factor", [0.5, 0.8, 1, 1.5, 2.5])
def test_the_first_period_is_like_any_other(length, batch_size, chunk_size, factor):
    """What a measurement takes time for, at the shapes that are measured: within 1 % of the steady
    state.
    """
    ratio = factor * balance(chunk_size, batch_size)
    for policy, staggered in (
        ("baseline", False),
        ("sarathi", False),
        ("orca", False),
        ("orca", True),
    ):
        work = Workload(length, batch_size, ratio, staggered)
        trace = simulate(
            work.requests(8 * batch_size),
            policy=policy,
            chunk_size=chunk_size,
            max_batch_size=batch_size,
        )
        steady = tokens_per_second(trace, length, 3 * batch_size, 6 * batch_size)
        assert tokens_per_second(trace, length, *first_period(work, policy)) == pytest.approx(
            steady, rel=0.01
        ), policy


def test_a_window_counts_from_one():
    trace = Trace([Iteration(0.25, 4.0, 1, 0, 1)], finished=[(7, 1.0), (3, 2.5), (5, 4.0)])
    assert steady_window(trace, 1, 3) == (1.0, 4.0) and steady_window(trace, 0, 2) == (0.25, 2.5)


@pytest.mark.parametrize("length", [2, 1024])
@pytest.mark.parametrize("ratio", [0.01, 1, 14, 5000])
def test_split_keeps_the_length(length, ratio):
    prompt, decodes = split(length, ratio)
    assert prompt + decodes == length and prompt >= 1 and decodes >= 1


@pytest.mark.slow
def test_quick_measurement_adds_measured_rows(tmp_path, monkeypatch):
    # a point of each predicted curve will do here
    monkeypatch.setattr(fig9, "ratios", lambda *_: [14.0])
    model = new_model(configs.MODELS["demo"], torch.float32, torch.device("cpu"))
    random_weights(model, seed=0)
    checkpoint.save(model, tmp_path / "tiny")
    where = f"--device cpu --dtype float32 --model {tmp_path / 'tiny'} --out {tmp_path}".split()
    sizes = ["--max-length", "64", "--max-batch-size", "3"]
    result = call(fig9, "--measure", "--quick", *where, *sizes, "--chunk-size", "16")
    assert result.returncode == 0 and "Profile" not in result.stdout, result.stderr
    (row,) = read_rows(tmp_path / "fig9.csv").where(source="measured")
    assert row["model"] == "tiny" and row["hardware"] not in configs.GPUS
    assert row["gain"] > 0 and (row["L"], row["B"], row["C"]) == (64, 3, 16)
    # 24 .. 32: C = 32 is the only choice
    result = call(fig9, "--measure", "--quick", *where, *sizes)
    assert "Profile of single iterations" in result.stdout
    assert "measured below: C = 32, which looks best\n" in result.stdout
    assert read_rows(tmp_path / "fig9.csv").where(source="measured", C=32, L=64, B=3)


def test_the_profile_names_the_best_and_the_better_neighbour():
    def profiles(*gains: float) -> list[ChunkProfile]:
        return [ChunkProfile(64 * 2**i, 1.0, 1.0, 1.0, gain) for i, gain in enumerate(gains)]

    assert best_and_neighbour(profiles(0.9, 1.1, 1.2, 1.0)) == [256, 128]
    assert best_and_neighbour(profiles(1.3, 0.8, 1.2)) == [64, 128]
    assert best_and_neighbour(profiles(0.7)) == [64]


def test_the_profile_runs_what_it_says(small):
    llm = LLM(small, max_batch_size=2, max_length=64, dtype="float32", device="cpu")
    found = profile_chunk_sizes(llm, 64, 2, repeats=1)
    assert [profile.chunk_size for profile in found] == [16, 32]
    for profile in found:
        prompt, decodes = split(64, balance(profile.chunk_size, 2))
        chunks = 2 * prompt / (profile.chunk_size - 1)
        assert profile.gain == pytest.approx(
            (profile.prefill + decodes * profile.decodes) / (chunks * profile.hybrid)
        )
    assert found[0].prefill / split(64, balance(16, 2))[0] == pytest.approx(
        found[1].prefill / split(64, balance(32, 2))[0]
    )
