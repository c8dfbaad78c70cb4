"""Figure 9: a user's model, and steady states."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shared import call

from command.checks import UserError
from experiments import fig9, fig10
from experiments.lib.engines import LLAMA_33B, cases, setups
from experiments.lib.measuring import first_period
from experiments.lib.rows import Rows, with_paper
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


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[None]:
    """What was measured earlier stays as it is, and no other file is written."""
    rows = Rows([{"source": "measured", "model": "m", "hardware": "h", "gain": 2.0}], {"gain": "x"})
    rows.write(path := tmp_path / "fig9.csv")
    before = path.read_bytes()
    yield
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("sizes", [256, (), (0, 256), "256", None])
@pytest.mark.parametrize("name", ["CHUNK_SIZES", "GPU_SIZES"])
def test_a_constant_that_is_wrong_is_named(
    name: str, sizes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fig9, name, sizes)
    done = call(fig9, "--out", tmp_path)
    said = f"error: {name} is {sizes!r}; it must be a tuple of whole numbers from 1, such as (256,)"
    assert done.returncode == 2 and done.stderr.startswith(said)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"C": (256, 0)}, "C is 0; it must be a whole number from 1"),
        ({"C": "256"}, "C is '256'; it must be a whole number from 1"),
        ({"B": 2.5}, "B is 2.5; it must be a whole number from 1"),
        ({"L": ()}, "fig9 has no rows, so nothing is written: the constants at the top"),
    ],
)
def test_a_case_that_is_wrong_or_missing_is_said(case: dict, said: str, tmp_path: Path) -> None:
    """Whatever the study: here fig9's table, and fig10's cases."""
    [sweep] = fig10.STUDY.sweeps
    cases_of = cases(**{"L": 1024, "B": 18, "C": 256} | case)
    study = replace(fig10.STUDY, name="fig9", sweeps=[replace(sweep, cases=cases_of)])
    with pytest.raises(UserError, match=re.escape(said)):
        study.run(["--out", str(tmp_path)])


def test_no_table_without_rows_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a has no rows, so nothing is written"):
        Rows().write(tmp_path / "a.csv")
    assert not [*tmp_path.iterdir()]


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
