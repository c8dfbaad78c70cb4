"""The texts of results/index.html and results/fidelity.md: those that are committed fit the results
that are committed.
"""

import importlib
import itertools
import re
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from command.cli import run_main
from experiments import fidelity
from experiments.lib import holes
from experiments.lib.common import ROOT
from experiments.lib.rows import Rows, read_rows
from tests.lines import tracked

gallery = importlib.import_module("experiments.all")
RESULTS = ROOT / "results"


def rises(values: list[float]) -> bool:
    """None is more than 1 % below the one before it, and the last is the largest."""
    pairs = itertools.pairwise(values)
    return max(values) == values[-1] and all(after > 0.99 * before for before, after in pairs)


WHOLE = ("orca", "vllm_v0", "hybrid_only")
CHUNKS = ("sarathi", "sarathi_serve", "dynamic", "chunked_only")
# What a heading claims beyond the numbers that it prints, of scripts that are no studies.
OF_ROWS: dict[str, Callable[[Rows], bool]] = {
    "policies": lambda rows: (
        all(rows.one("stalls", policy=policy, source="predicted") for policy in WHOLE)
        and not any(rows.where(source="predicted", policy=CHUNKS).column("stalls"))
        and rows.one("TTFT of Y", policy="request_level", source="predicted")
        > rows.one("TTFT of Y", policy="orca", source="predicted")
    ),
    "choose_chunk": lambda rows: rises(rows.where("C").column("longest TBT")),
}


def elements(out: Path) -> list[tuple[str, dict[str, str | None]]]:
    """Those of index.html with their attributes, in order."""
    found = []
    reader = HTMLParser()
    reader.handle_starttag = lambda tag, attributes: found.append((tag, dict(attributes)))
    reader.feed((out / "index.html").read_text(encoding="utf-8"))
    return found


def test_each_script_and_each_result_is_named() -> None:
    """By the table of docs/results.md; by the gallery, as every study is, or beside its numbers."""
    documents = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")}
    rows = "".join(re.findall(r"^\| `.*", documents["results"], re.MULTILINE))
    every = (ROOT / "experiments").glob("*.py")
    names = [path.name for path in every if "__main__" in path.read_text(encoding="utf-8")]
    assert [name for name in names if f"`{name}" not in rows] == []
    names = {path.stem for path in RESULTS.glob("*.csv")}
    text = "".join(documents.values())
    left = [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert {*left, *gallery.STUDIES} <= gallery.captions().keys()


def test_each_result_has_a_script_that_writes_it() -> None:
    """Those that are committed. `gpu_day.py` wrote the folder h200."""
    scripts = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    written = scripts | {"calibration-llama-0.2b"}  # by calibrate.py
    found = [path for path in tracked("csv", "json", "md", "png") if path.parent == RESULTS]
    assert len(found) > 50
    names = {path.stem.removesuffix("_measured") for path in found}
    assert sorted(names - written) == [], "no command writes them"


@pytest.mark.parametrize("name", OF_ROWS)
def test_the_words_of_a_heading_are_true(name: str) -> None:
    assert OF_ROWS[name](read_rows(RESULTS / f"{name}.csv"))


def test_the_page_has_all_figures_and_no_dead_link(built_gallery: Path) -> None:
    page = elements(built_gallery)
    sections = [attributes["id"] for tag, attributes in page if tag == "section"]
    assert sections[:2] == ["policies", "fig9"] and {*sections} == gallery.captions().keys()
    ids = [attributes["id"] for _, attributes in page if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, each in page:
        if tag == "img":
            size = gallery.size_of(built_gallery / each["src"])
            assert (each["width"], each["height"]) == tuple(map(str, size))
            assert len(each["alt"]) > 60, each["src"]
        if tag == "a":
            file, _, place = each["href"].partition("#")
            assert place in ids if not file else (built_gallery / file).is_file(), each


def test_what_is_no_study_is_drawn_from_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clone has no picture of it, and its page has all figures."""
    for name in ("choose_chunk.csv", "fidelity.csv"):
        shutil.copy(RESULTS / name, tmp_path)
    gallery.write_page(tmp_path)
    assert "not in the gallery" not in capsys.readouterr().out
    assert (tmp_path / "choose_chunk.png").read_bytes().startswith(b"\x89PNG")


def test_errors_are_of_the_paper() -> None:
    row = {"model": "m", "hardware": "h"}
    rows = Rows([row | {"source": "paper", "y": 2.0}, row | {"source": "predicted", "y": 3.0}])
    rows.units = {"y": "ms"}
    assert gallery.published(rows) == [["y", "2.00", "3.00", "+50.0 %"]]


def test_the_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--page runs no script, draws what has no picture, and leaves out what has no results.

    Fig 6 needs torch, which a bare clone's environment does not have.
    """
    monkeypatch.setattr(gallery, "find_spec", lambda _: None)
    for name in ("fig6.csv", "fig7.csv", "fidelity.csv"):
        shutil.copy(RESULTS / name, tmp_path)
    monkeypatch.setattr(sys, "argv", ["all.py", "--page", "--out", str(tmp_path)])
    monkeypatch.setattr(gallery, "run_script", None)
    run_main(gallery.main)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("<section") == 1 and 'id="fig7"' in page
    assert (tmp_path / "fig7.png").read_bytes().startswith(b"\x89PNG")


def test_each_explanation_is_shown() -> None:
    """None stands there for a number that is close enough by now, or that has another name."""
    rows = fidelity.read(RESULTS / "fidelity.csv")
    shown = {row.id: fidelity.told(row) for row in rows if row.explanation}
    assert shown.keys() == holes.read_texts()[fidelity.PAGE].keys()
    assert shown["f8_high"].startswith("-18.3 %, +2.4 % with a cause that was tried. The")
    assert "%, not explained. As for" in shown["f10_linear"]
    own = [row for row in rows if row.kind not in ("given", "fitted")]
    assert fidelity.summary(rows)[-2:] == fidelity.summary(own)[-2:], "a choice needs no cause"
    whole = fidelity.largest_batches()  # two of them are met by a cause, to the last request
    tried = [row.tried for row in rows if row.tried is not None and row.id not in whole]
    assert min(map(abs, tried)) > 0.1, "nor what is fitted"


def test_a_number_of_several_places_counts_once() -> None:
    """What we predict alike is one, but for Fig 8's smallest: Table 4 has less, and batches."""
    rows = [row for row in fidelity.read(RESULTS / "fidelity.csv") if row.kind == "predicted"]
    apart = {"f8_low", *fidelity.largest_batches()}
    counted = {row.id: row.predicted for row in fidelity.distinct(rows) if row.id not in apart}
    assert len(counted) == len({*counted.values()})
    assert "f11a_sarathi_3k" in counted, "Table 4's 1.22 is Fig 11's 1.23"


def test_what_is_not_measured_yet_says_how_to_measure_it() -> None:
    text = gallery.fill("fig9", "{measured[gain, L=512 C=64]:.2f}", Rows())
    assert text == "Not measured yet: python experiments/fig9.py --measure does it."
