"""Figure 9: a user's model, and steady states."""

import pytest

from experiments import fig9
from experiments.lib.engines import LLAMA_33B, setups
from experiments.lib.measuring import first_period
from experiments.lib.rows import with_paper
from more.serving.steady import Workload, balance, steady_window, tokens_per_second
from more.simulate import simulate
from timeline import Iteration, Trace


def test_a_users_model_has_the_papers_numbers_where_it_is_the_papers(monkeypatch):
    monkeypatch.setattr(fig9, "ratios", lambda size, _: [balance(256, size)])
    for on, count in ((LLAMA_33B, 3), ({"model": "mistral-7b", "hardware": "h100"}, 0)):
        flags = {"model": on["model"], "gpu": on["hardware"]}
        rows = fig9.STUDY.predict(quick=True, **flags)
        assert {tuple(row[key] for key in on) for row in rows} == {tuple(on.values())}
        assert len(rows.where(source="paper")) == count
        assert fig9.STUDY.own(flags, rows) == (not count)
        told = with_paper(rows, "gain", "at P:D")
        assert len(told.column("error")) == len(told.column("paper at P:D")) == count
        for row in told.where("error") if count else ():
            assert row["error"] == f"{100 * (row['gain'] / row['paper gain'] - 1):+.1f} %"
    assert setups("mistral-7b", "h100").popitem()[1] == dict.fromkeys((1024, 2048, 3072), 18)
    assert list(setups("gpt2-124m", None).popitem()[1]) == [1024]  # its positions


@pytest.mark.parametrize("factor", [0.5, 1, 2.5])
def test_the_first_period_is_like_any_other(factor: float) -> None:
    """What a measurement takes time for: within 1 % of the steady state."""
    ratio = factor * balance(128, 8)
    for policy in ("baseline", "sarathi", "orca", "staggered orca"):
        work = Workload(512, 8, ratio, "staggered" in policy)
        policy = policy.split()[-1]
        options = {"policy": policy, "chunk_size": 128, "max_batch_size": 8}
        trace = simulate(work.requests(64), **options)
        found = tokens_per_second(trace, 512, *first_period(work, policy))
        assert found == pytest.approx(tokens_per_second(trace, 512, 24, 48), rel=0.01), policy


def test_a_window_counts_from_one():
    trace = Trace([Iteration(0.25, 4.0, 1, 0, 1)], finished=[(7, 1.0), (3, 2.5), (5, 4.0)])
    assert steady_window(trace, 1, 3) == (1.0, 4.0) and steady_window(trace, 0, 2) == (0.25, 2.5)
