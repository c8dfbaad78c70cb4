"""The texts of results/index.html and results/fidelity.md: those that are committed fit the results
that are committed, and a wrong text is one clear line.
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

from command.checks import UserError
from command.cli import run_main
from experiments import fidelity
from experiments.lib import common
from experiments.lib.common import ROOT
from experiments.lib.rows import Rows, read_rows

gallery = importlib.import_module("experiments.all")
RESULTS = ROOT / "results"
COMPLETE = '[fig9]\ngroup = "first"\nfinding = ""\nalt = ""\nwhere = ""\nclaim = ""\nsee = ""'


def rises(values: list[float]) -> bool:
    """None is more than 1 % below the one before it, and the last is the largest."""
    pairs = itertools.pairwise(values)
    return max(values) == values[-1] and all(after > 0.99 * before for before, after in pairs)


WHOLE, CHUNKS = (
    ("orca", "vllm_v0", "hybrid_only"),
    ("sarathi", "sarathi_serve", "dynamic", "chunked_only"),
)
OTHERS = ("batch first", "sequence first")
# What a heading claims beyond the numbers that it prints, of scripts that are no studies.
OF_ROWS: dict[str, Callable[[Rows], bool]] = {
    "policies": lambda rows: (
        all(rows.one("stalls", policy=policy, source="predicted") for policy in WHOLE)
        and not any(rows.where(source="predicted", policy=CHUNKS).column("stalls"))
        and rows.one("TTFT of C", policy="request_level", source="predicted")
        > rows.one("TTFT of C", policy="orca", source="predicted")
    ),
    "choose_chunk": lambda rows: rises(rows.where("C").column("longest TBT")),
    "segment_attention": lambda rows: (
        min(rows.where(source="measured", layout="head first").column("bandwidth"))
        > max(rows.where(source="measured", layout=OTHERS).column("bandwidth"))
    ),
}


class Page(HTMLParser):
    """What the tests ask of index.html: its elements with their attributes, in order."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed((out / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_each_caption_has_a_script_and_results() -> None:
    for name in gallery.captions():
        assert (ROOT / "experiments" / gallery.command_of(name).split()[0]).exists(), name
        assert (RESULTS / f"{name}.csv").exists(), name


def test_each_script_has_a_row() -> None:
    """In the table of docs/results.md."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\| `.*", text, re.MULTILINE))
    every = (ROOT / "experiments").glob("*.py")
    names = [path.name for path in every if "__main__" in path.read_text(encoding="utf-8")]
    assert [name for name in names if f"`{name}" not in rows] == []


def test_each_result_is_shown() -> None:
    """Where its script is gone, a document names the file beside the numbers."""
    documents = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    names = {path.stem for path in RESULTS.glob("*.csv")} - gallery.captions().keys()
    assert [name for name in names if not re.search(rf"\b{name}\b", documents)] == []


@pytest.mark.parametrize("name", OF_ROWS)
def test_the_words_of_a_heading_are_true(name: str) -> None:
    assert OF_ROWS[name](read_rows(RESULTS / f"{name}.csv"))


def test_the_page_begins_with_the_policies_and_fig_9(built_gallery: Path) -> None:
    """And no hole of a caption is left open."""
    page = Page(built_gallery)
    assert [section["id"] for section in page.of("section")][:2] == ["policies", "fig9"]
    assert {section["id"] for section in page.of("section")} == gallery.captions().keys()


def test_the_page_can_be_read_without_its_pictures_and_on_a_phone(built_gallery: Path) -> None:
    page = Page(built_gallery)
    assert page.elements[0] == ("html", {"lang": "en"})
    assert any(meta.get("name") == "viewport" for meta in page.of("meta"))
    assert not page.of("script")
    for image in page.of("img"):
        assert (built_gallery / image["src"]).is_file() and image["loading"] == "lazy"
        size = gallery.size_of(built_gallery / image["src"])
        small = image["alt"] == ""  # in the contents: what it shows stands beside it
        assert small or (image["width"], image["height"]) == tuple(map(str, size))
        assert small or len(image["alt"]) > 60, image["src"]
    heads = page.of("th")
    assert heads and {head["scope"] for head in heads} == {"col", "row"}
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in page.of("a"):
        place = link["href"]
        assert place[1:] in ids if place.startswith("#") else (built_gallery / place).is_file(), (
            place
        )


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
    shown = {row.id for row in fidelity.read(RESULTS / "fidelity.csv") if row.explanation}
    assert shown == fidelity.explanations().keys()


@pytest.mark.parametrize(
    "text, said",
    [
        (COMPLETE.replace("see", "#"), "[fig9] must have group (first, sarathi, "),
        (COMPLETE + '\nsees = ""', "[fig9] must have"),
        (COMPLETE.replace('see = ""', "see = 3"), "[fig9] must have"),
        (COMPLETE.replace("first", "last"), "[fig9] must have"),
        ('fig9 = "It gains."', "[fig9] must have"),
        ('[fig9]\nsee = "It gains.\n', "Illegal character '\\n' (at line 2, column 17)"),
    ],
)
def test_a_wrong_caption_is_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "captions.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    with pytest.raises(UserError, match=re.escape(f"experiments/captions.toml: {said}")):
        gallery.captions.__wrapped__()  # reads the file anew


@pytest.mark.parametrize(
    "text",
    [
        "{predicted[C=999 L=1024 B=18]:.2f}",  # no such series
        "{predicted[gain, L=1024]:.2f}",  # of many
        "{guessed[gain, llama-13b L=1024 C=256 peak]:.2f}",
        "{paper[gain, llama-13b L=1024 C=256 peak].y:.2f}",
        "{paper[gain, llama-13b L=1024 C=256 peak]:.2x}",
        "{paper[gain, llama-13b L=1024 C=256 peak]",
        "{}",
    ],
)
def test_a_wrong_hole_is_named(text: str) -> None:
    rows = read_rows(RESULTS / "fig9.csv")
    assert gallery.fill("fig9", "{paper[gain, llama-13b L=1024 C=256 peak]:.2f}", rows) == "1.27"
    with pytest.raises(UserError, match=r"captions\.toml, fig9: a hole cannot be filled"):
        gallery.fill("fig9", text, rows)


def test_what_is_not_measured_yet_says_how_to_measure_it() -> None:
    text = gallery.fill("fig9", "{measured[gain, L=512 C=64]:.2f}", Rows())
    assert text == "Not measured yet: python experiments/fig9.py --measure does it."
