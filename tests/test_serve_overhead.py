"""experiments/serve_overhead.py, small: its numbers must be of the same tokens."""

from pathlib import Path

import pytest
from conftest import call

from experiments import serve_overhead
from experiments.lib.rows import read_rows


@pytest.mark.slow
def test_each_way_is_timed_on_the_same_requests(tmp_path: Path) -> None:
    done = call(serve_overhead, "--quick", "--out", tmp_path)
    assert done.returncode in (0, None), done.stderr
    rows = read_rows(tmp_path / "serve_overhead.csv")
    assert [row["way"] for row in rows] == list(serve_overhead.WAYS)
    assert all(row["source"] == "measured" and row["time"] > 0 for row in rows)
    assert rows[0]["over generate"] == 1
    for row in rows[1:]:
        low, middle, high = (row[f"over generate{end}"] for end in (" lowest", "", " highest"))
        assert low <= middle <= high and f"{row['time']:.3g}" in done.stdout


def test_what_is_streamed_comes_token_by_token() -> None:
    """The laptop model has no tokenizer: without a stand-in, nothing would be streamed."""
    llm, work = serve_overhead.load("demo", quick=True)
    llm.tokenizer = None
    with serve_overhead.served(llm) as own, serve_overhead.http_client() as ask:
        whole = ask(own.port, serve_overhead.bodies_of(work, False))
        streamed = ask(own.port, serve_overhead.bodies_of(work, True))
        assert own.run(work) > 0
    tokens = sum(count for _, count in work)
    assert whole["tokens"] == streamed["tokens"] == tokens and whole["events"] == 0
    assert len(work) < streamed["events"] <= tokens + len(work)
