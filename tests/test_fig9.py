"""Figure 9: a user's model, steady states, and which chunk sizes are measured."""

import pytest
import torch
from conftest import call

import configs
from experiments import fig9
from experiments.lib.engines import LLAMA_33B, Priced, setups
from experiments.lib.rows import read_rows, with_paper
from experiments.lib.steady import Workload, balance, first_period, steady_window, tokens_per_second
from more.loading import checkpoint
from more.loading.load import new_model, random_weights
from simulate import simulate
from timeline import Iteration, Trace

ENGINE = Priced("llama-13b", "a6000")


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
        for row in told.where("error"):
            assert row["error"] == f"{100 * (row['gain'] / row['paper gain'] - 1):+.1f} %"
    assert setups("mistral-7b", "h100").popitem()[1] == dict.fromkeys((1024, 2048, 3072), 18)
    assert list(setups("gpt2-124m", None).popitem()[1]) == [1024]  # its positions


@pytest.mark.parametrize("factor", [0.5, 1, 2.5])
def test_the_first_period_is_like_any_other(factor: float) -> None:
    """What a measurement takes time for: within 1 % of the steady state."""
    ratio = factor * balance(128, 8)
    for policy in ("baseline", "sarathi", "orca", "staggered orca"):
        work, policy = Workload(512, 8, ratio, "staggered" in policy), policy.split()[-1]
        options = {"policy": policy, "chunk_size": 128, "max_batch_size": 8}
        trace = simulate(work.requests(64), **options)
        found = tokens_per_second(trace, 512, *first_period(work, policy))
        assert found == pytest.approx(tokens_per_second(trace, 512, 24, 48), rel=0.01), policy


def test_a_window_counts_from_one():
    trace = Trace([Iteration(0.25, 4.0, 1, 0, 1)], finished=[(7, 1.0), (3, 2.5), (5, 4.0)])
    assert steady_window(trace, 1, 3) == (1.0, 4.0) and steady_window(trace, 0, 2) == (0.25, 2.5)


@pytest.mark.slow
def test_quick_measurement_adds_measured_rows(tmp_path, monkeypatch):
    # a point of each predicted curve will do here
    monkeypatch.setattr(fig9, "ratios", lambda *_: [14.0])
    model = new_model(configs.MODELS["demo"], torch.float32, torch.device("cpu"))
    random_weights(model, seed=0)
    checkpoint.save(model, tmp_path / "tiny")
    where = f"--device cpu --dtype float32 --model {tmp_path / 'tiny'} --out {tmp_path}".split()
    result = call(fig9, "--measure", "--quick", *where)
    assert result.returncode == 0, result.stderr
    measured = read_rows(tmp_path / "fig9.csv").where("gain", source="measured", L=64, B=3)
    assert {*measured.column("C")} == {8, 16} and {*measured.column("PD")} == {3.0}
