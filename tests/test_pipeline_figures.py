"""Fig 5 and 12: what the scripts write, and the shape of what they find."""

import json
import sys
from pathlib import Path

import pytest

from cli import run_main
from experiments import fig5, fig12
from experiments.lib.common import paper_numbers, read_csv


def call(module, *flags: str) -> None:
    arguments, sys.argv = sys.argv, [f"{module.__name__}.py", *flags]
    try:
        run_main(module.main)
    finally:
        sys.argv = arguments


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results")
    call(fig5, "--out", str(path))
    call(fig12, "--quick", "--out", str(path))
    return path


def test_fig5_has_every_kind_of_bubble_and_sarathi_fewer(out: Path) -> None:
    found = {point.series: point.y for point in read_csv(out / "fig5.csv")}
    assert all(found[f"orca, {cause}"] > 0 for cause in ("PB1", "PB2", "PB3"))
    assert sum(found[f"sarathi, {cause}"] for cause in ("PB1", "PB2", "PB3")) < 0.2 * sum(
        found[f"orca, {c}"] for c in ("PB1", "PB2", "PB3")
    )
    assert found["sarathi, makespan"] < found["orca, makespan"]
    assert (out / "fig5.png").read_bytes().startswith(b"\x89PNG")


def test_fig5_for_perfetto(out: Path) -> None:
    """Lanes of stages and of requests; no two slices of a lane overlap."""
    events = json.loads((out / "fig5.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {
        event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    assert {"orca: stages", "sarathi: stages", "stage 0", "stage 1", "A", "D"} <= names
    slices = [event for event in events if event["ph"] == "X"]
    assert {"PB1", "PB2", "PB3"} <= {event["name"] for event in slices}
    ends: dict[tuple[int, int], int] = {}
    for event in slices:
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(lane, 0)
        ends[lane] = event["ts"] + event["dur"]


def test_fig12_has_the_papers_numbers_beside_ours(out: Path) -> None:
    points = read_csv(out / "fig12.csv")
    paper = {point.series: point.y for point in points if point.source == "paper"}
    assert paper == {series: paper_numbers()[name] for name, (series, _) in fig12.PAPER.items()}
    assert (out / "fig12.png").read_bytes().startswith(b"\x89PNG")


def test_fig12_in_order() -> None:
    """SARATHI over stages first, replicas without stages second, Orca over stages last, far behind
    in bubbles; in step, Orca comes nearer.
    """
    ratios = fig12.run(fig12.Setup(), 600).ratios
    assert ratios["sarathi over tp-only"] > 1.2 and ratios["tp-only over orca"] > 1.2
    assert ratios["median bubble reduction"] > 5
    in_step = fig12.run(
        fig12.replace(fig12.Setup(), refill_every=fig12.in_step(fig12.Setup())), 600
    ).ratios
    assert 1 < in_step["tp-only over orca"] < ratios["tp-only over orca"]


def test_largest_batches_are_the_papers() -> None:
    assert (
        [row[2] for row in fig12.batch_sizes()]
        == [row[3] for row in fig12.batch_sizes()]
        == [27, 11]
    )


def test_options_are_checked(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        call(fig12, "--hop", "string")
    assert "unknown hop 'string': choose from nvlink-a100" in capsys.readouterr().err


def test_too_few_requests_for_a_ratio(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        call(fig12, "--requests", "1", "--out", str(tmp_path))
    assert capsys.readouterr().err.startswith(
        "error: half of the 1 requests meet no bubble under SARATHI"
    )
