"""shapes.py counts what holds and what does not, and makes nothing up."""

import sys
from pathlib import Path

import pytest

from command.cli import run_main
from experiments import shapes
from experiments.lib.common import Point, write_csv


def rows(figure: str, series: str, x_unit: str, values: dict[float, float]) -> list[Point]:
    return [
        Point(figure, series, x, x_unit, y, "x", "measured", "laptop", "an abacus")
        for x, y in values.items()
    ]


def find(tmp_path: Path, points: list[Point]) -> dict[str, tuple[int, int]]:
    for figure in {point.figure for point in points}:
        write_csv(tmp_path / f"{figure}.csv", [point for point in points if point.figure == figure])
    found = shapes.find_shapes(tmp_path)
    return {
        claim: (
            sum(sum(f.comparisons) for f in findings),
            sum(len(f.comparisons) for f in findings),
        )
        for claim, (_, findings) in found.items()
    }


def test_a_machine_like_the_papers(tmp_path: Path) -> None:
    points = rows("fig3", "prefill, total L=512", "B", {1: 0.52, 2: 0.5, 4: 0.51})
    points += rows("fig3", "decode, total L=512", "B", {1: 9, 2: 5, 4: 3})
    points += rows("fig8", "L=256 C=256", "B", {2: 5, 4: 3})
    points += rows("fig8", "L=512 C=256", "B", {2: 4, 4: 2})
    points += rows("fig9", "C=128 L=512 B=5", "P:D", {16: 1.1, 32: 1.2, 64: 1.1})
    # the spread says nothing about the peak
    points += rows("fig9", "C=128 L=512 B=5 highest", "P:D", {16: 9, 32: 2, 64: 2})
    points += rows("fig11", "orca best L=512", "P:D", {16: 1.05})
    points += rows("fig11", "sarathi C=128 L=512", "P:D", {16: 1.2})
    points += rows("fig11", "sarathi C=64 L=512", "P:D", {16: 1.01})
    points += rows("fig13", "prefill L=512", "C", {64: 1.5, 128: 1.2, 256: 1.1})
    counts = [(1, 1), (2, 2), (2, 2), (2, 2), (1, 1), (2, 2), (2, 2)]
    assert find(tmp_path, points) == dict(zip(shapes.SHAPES, counts, strict=True))


def test_a_machine_unlike_it(tmp_path: Path) -> None:
    points = rows("fig3", "prefill, total L=512", "B", {1: 0.52, 2: 0.6})
    points += rows("fig3", "decode, total L=512", "B", {1: 3, 2: 5, 4: 4})
    points += rows("fig9", "C=128 L=512 B=5", "P:D", {16: 1.3, 32: 1.2})
    points += rows("fig11", "orca best L=512", "P:D", {16: 0.9})
    points += rows("fig11", "sarathi C=64 L=512", "P:D", {16: 0.8})
    # fig8 and fig13 were not measured, and are not there
    assert list(find(tmp_path, points).values()) == [(0, 1), (1, 2), (0, 1), (0, 2)]


def test_one_point_is_no_comparison(tmp_path: Path) -> None:
    points = rows("fig3", "prefill, total L=64", "B", {1: 0.5})
    points += rows("fig3", "decode, total L=64", "B", {1: 9})
    points += rows("fig8", "L=64 C=32", "B", {2: 5})
    points += rows("fig9", "C=16 L=64 B=4", "P:D", {5: 1.3})
    points += rows("fig13", "prefill L=64", "C", {16: 2})
    assert find(tmp_path, points) == {}


def call(*flags: str) -> None:
    arguments, sys.argv = sys.argv, ["shapes.py", *flags]
    try:
        run_main(shapes.main)
    finally:
        sys.argv = arguments


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    find(tmp_path, rows("fig3", "decode, total L=512", "B", {1: 3, 2: 5, 4: 4}))
    call("--out", str(tmp_path))
    said = capsys.readouterr().out
    assert (
        "Measured: laptop on an abacus" in said
        and "L=512: 3, 5, 4 x at B = 1, 2, 4: 1 of 2 hold" in said
    )
    assert "not measured yet: " in said and "(fig13.py --measure)" in said


def test_nothing_measured_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        call("--out", str(tmp_path))
    assert "nothing measured to compare in fig3.csv, fig8.csv" in capsys.readouterr().err
