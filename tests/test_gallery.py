"""The texts of results/index.html and results/fidelity.md: those that are committed fit the results
that are committed, and a wrong text is one clear line.
"""

import importlib
import re
from pathlib import Path

import pytest

from checks import UserError
from experiments import fidelity
from experiments.lib import common
from experiments.lib.common import ROOT, read_csv

gallery = importlib.import_module("experiments.all")
RESULTS = ROOT / "results"


def test_the_page_shows_the_captions_and_results_of_today() -> None:
    """No hole is left open, and no text has changed since `python experiments/all.py` ran."""
    assert gallery.gallery(RESULTS) == (RESULTS / "index.html").read_text(encoding="utf-8")


def test_each_caption_has_a_script_and_results() -> None:
    for name in gallery.captions():
        assert (ROOT / "experiments" / f"{name}.py").exists(), name
        assert {(RESULTS / f"{name}.{kind}").exists() for kind in ("csv", "png")} == {True}, name


def test_each_explanation_is_shown() -> None:
    """None stands there for a number that is close enough by now, or that has another name."""
    shown = {row.id for row in fidelity.read(RESULTS / "fidelity.csv") if row.explanation}
    assert shown == fidelity.explanations().keys()


@pytest.mark.parametrize(
    "text, said",
    [
        ('[fig9]\nwhere = ""\nclaim = ""', "[fig9] must have where, claim and see"),
        ('[fig9]\nwhere = ""\nclaim = ""\nsee = ""\nsees = ""', "[fig9] must have"),
        ('[fig9]\nwhere = ""\nclaim = ""\nsee = 3', "[fig9] must have"),
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
        "{predicted[C=256 L=1024 B=18]:.2f}",  # this one has an x
        "{guessed[C=256 L=1024 B=18]:.2f}",
        "{peak[C=256 L=1024 B=18].z:.2f}",
        "{paper[C=256 L=1024 B=18@14]:.2x}",
        "{paper[C=256 L=1024 B=18@14]",
        "{}",
    ],
)
def test_a_wrong_hole_is_named(text: str) -> None:
    points = read_csv(RESULTS / "fig9.csv")
    assert gallery.fill("fig9", "{paper[C=256 L=1024 B=18@14]:.2f}", points) == "1.27"
    with pytest.raises(UserError, match=r"captions\.toml, fig9: a hole cannot be filled"):
        gallery.fill("fig9", text, points)


def test_what_is_not_measured_yet_says_how_to_measure_it() -> None:
    text = gallery.fill("fig9", "{measured[C=64 L=512 B=6@5]:.2f}", [])
    assert text == "Not measured yet: python experiments/fig9.py --measure does it."
