"""Our cost model beside AIConfigurator's estimates: the committed file, and what is made of it."""

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from command.cli import run_main
from configs import GPUS, MODELS
from costmodel import CostModel
from experiments import beside_aiconfigurator as beside
from experiments.lib.rows import read_rows


@pytest.fixture(scope="module")
def found() -> list[beside.Comparison]:
    rows = beside.estimated()
    return beside.compare(row for row in rows if row.on_grid and row.model in beside.NAMES)


def test_the_file_holds_all_shapes_and_its_source() -> None:
    head = beside.FILE.read_text(encoding="utf-8").splitlines()[0]
    assert head.startswith("#") and "AIConfigurator 0.12.0" in head and "Apache 2.0" in head
    rows = beside.estimated()
    names = ("gpu", "model", "tp", "kind", "batch", "length")
    assert [tuple(getattr(row, name) for name in names) for row in rows] == list(beside.shapes())
    assert all(row.products > 0 and row.attention > 0 and row.others > 0 for row in rows)
    assert all((row.all_reduces > 0) == (row.tp > 1) for row in rows)
    assert sum(row.on_grid for row in rows) > 1900 and sum(not row.on_grid for row in rows) > 300


def test_a_row_becomes_the_iteration_that_it_names() -> None:
    row = beside.Row("h100", "llama3.1-8b", 1, "prefill", 4, 512, 1, 1, 1, 0)
    batch = row.iteration()
    assert [(c.start, c.length, c.is_last) for c in batch.chunks] == [(0, 512, True)] * 4
    batch = replace(row, kind="decode").iteration()
    assert [request.context for request in batch.decodes] == [511] * 4 and not batch.chunks


def test_the_parts_add_up_to_the_iteration(found: list[beside.Comparison]) -> None:
    for each in found[:: len(found) // 20]:
        row = each.row
        cost = CostModel(
            MODELS[row.model],
            GPUS[row.gpu],
            tp=row.tp,
            link=beside.LINKS[beside.SYSTEMS[row.gpu][1]],
            software=beside.SOFTWARE,
        )
        whole = 1e3 * cost.seconds(row.iteration())
        assert sum(each.ours.values()) == pytest.approx(whole)
        assert each.error == pytest.approx(whole / row.total - 1)
        assert sum(map(each.share, beside.PARTS)) == pytest.approx(each.error)


def test_the_script_prints_and_writes_the_median(
    found: list[beside.Comparison],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "argv", ["beside_aiconfigurator.py", "--out", str(tmp_path)])
    assert run_main(beside.main) in (None, 0)
    median = 100 * statistics.median(abs(each.error) for each in found)
    assert median < 4
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("grid"))
    assert said.split()[1:3] == [str(len(found)), f"{median:.1f}"]
    written = read_rows(tmp_path / f"{beside.NAME}.csv")
    assert written.one("median error", shapes="grid") == pytest.approx(median, rel=1e-4)
    assert (tmp_path / f"{beside.NAME}.png").read_bytes().startswith(b"\x89PNG")


def test_collecting_needs_the_other_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def no_version(name: str) -> str:
        raise beside.PackageNotFoundError(name)

    words = ["beside_aiconfigurator.py", "--collect", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    for version, said in ((no_version, "no aiconfigurator here"), (lambda name: "1.0", "is 1.0")):
        monkeypatch.setattr(beside, "version", version)
        with pytest.raises(SystemExit):
            run_main(beside.main)
        assert said in capsys.readouterr().err
