"""The figure of CONTRIBUTING.md works, CITATION.cff is right, workflows run what make runs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml  # comes with jupytext

from docs import fill, site
from experiments import fidelity
from experiments.lib import holes
from experiments.lib.common import paper_numbers
from experiments.lib.rows import read_rows

gallery = import_module("experiments.all")
ROOT = Path(__file__).parent.parent
FIGURES = (  # of the papers: how many
    ("SARATHI", "Fig", 13),
    ("SARATHI", "Table", 4),
    ("TD-Pipe", "Fig", 16),
    ("TD-Pipe", "Table", 2),
    ("TD-Pipe", "Algorithm", 1),
    ("segment KV", "Fig", 9),
    ("segment KV", "Table", 1),
    ("Sarathi-Serve", "Fig", 14),
    ("Sarathi-Serve", "Algorithm", 3),
)
ROWS = 121  # of experiments/paper_homes.toml
WORKFLOWS = ROOT / ".github" / "workflows"
PAGES = {"contents": "read", "pages": "write", "id-token": "write"}  # what publishing needs


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_each_figure_of_the_papers_has_a_home() -> None:
    """It is there, and names the figure, or says the words. None is left out."""
    homes = tomllib.loads(read(ROOT / "experiments" / "paper_homes.toml"))
    left = read(ROOT / "docs" / "results.md").partition("## What we do not reproduce")[2]
    for paper, items in homes.items():
        for item, home in items.items():
            file, _, words = home.partition(": ")
            text = left if file == "docs/results.md" else read(ROOT / file)
            text = re.sub(r"[\s#]+", " ", text)
            kind, _, number = item.partition(" ")
            pattern = re.escape(words) if words else rf"\b{kind}s? [\w, ]*?\b{number}[a-z]?\b"
            assert re.search(pattern, text), f"{paper}, {item}: not in {home}"
    for paper, kind, count in FIGURES:
        missing = {f"{kind} {n}" for n in range(1, count + 1)} - homes[paper].keys()
        assert not missing, (paper, missing)
    assert sum(map(len, homes.values())) >= ROWS, "no row is taken away"


# ----------------------------------------------------------------------------- for a maintainer


def test_the_figure_in_contributing_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Copied into a file, it draws paper, predicted and measured points. The head of texts.toml has
    a caption and a sentence for it, and an explanation.
    """
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", read(ROOT / "docs/CONTRIBUTING.md"), re.DOTALL | re.MULTILINE
    )
    assert len(code.splitlines()) < 60
    names: dict[str, object] = {"__name__": "NAME"}
    exec(compile(code, "NAME.py", "exec"), names)  # noqa: S102
    flags = "--quick --measure --model demo --dtype float32 --device cpu --out"
    monkeypatch.setattr(sys, "argv", ["NAME.py", *flags.split(), str(tmp_path)])
    study = names["STUDY"]
    study.run()
    rows = read_rows(tmp_path / "quick" / "NAME.csv")
    assert {row["source"] for row in rows} == {"paper", "predicted", "measured"}
    (published,) = rows.where(source="paper")
    beside = rows.one("iteration", source="predicted", B=published["B"])
    assert published["iteration"] == paper_numbers()["t2_decode_total"]
    assert beside == pytest.approx(published["iteration"], rel=0.05), "it was fitted to this number"
    [compared] = study.claims(rows.where(source="predicted")).values()
    assert compared and all(compared.values())
    assert (tmp_path / "quick" / "NAME.png").read_bytes().startswith(b"\x89PNG")
    assert "measured on this machine" in capsys.readouterr().out
    head = "\n".join(re.findall("^#     (.*)", read(ROOT / holes.TEXTS), re.MULTILINE))
    caption, explanations, sentences = tomllib.loads(head).values()
    gallery.check_caption("", caption["NAME"])
    texts = {key: gallery.fill("NAME", text, rows) for key, text in caption["NAME"].items()}
    assert f"Four decodes take {paper_numbers()['t2_decode_total']:g} ms." in texts["claim"]
    [template] = sentences["NAME"]
    filled = fill.with_sentence("Our four\ndecodes take 1 ms.", template, holes.sources(rows), "")
    assert filled == f"Our four\ndecodes take {beside:.1f} ms."
    kept = holes.read_texts()[fidelity.PAGE]["f8_high"]
    assert explanations["f8_high"]["with"] == kept["with"]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_says_which_python_to_give(tmp_path: Path) -> None:
    """Its python3.13 is where `make` looks for a newer one."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name, minor in ("old", 10), ("python3.13", 13):
        version = f"import sys; sys.version_info = (3, {minor}); $2"
        script = f'#!/bin/sh\n[ $1 = -c ] && exec {sys.executable} -c "{version}"\n'
        (tmp_path / name).write_text(script + f"echo Python 3.{minor}.1\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.defpath}"}
    command = ["make", "fig9", "PYTHON=./old"]
    pipes = {"capture_output": True, "text": True}
    said = subprocess.run(command, cwd=tmp_path, env=env, check=False, **pipes)
    assert said.stdout == "" and said.stderr.count("\n") == 1 and "Python 3.10.1." in said.stderr
    assert "type: make fig9 PYTHON=python3.13." in said.stderr


# -------------------------------------------------------------------------------- the workflows


def workflow(name: str) -> dict:
    """A workflow's one job. It may only read, unless the job says more; its actions are pinned."""
    whole = yaml.safe_load(read(WORKFLOWS / name))
    assert whole["permissions"] == {"contents": "read"}
    (job,) = whole["jobs"].values()
    assert all({*step} & {"uses", "run"} for step in job["steps"])
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", each) for each in used)
    return job


def commands(job: dict) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_of_the_site_publishes_what_make_site_writes() -> None:
    job = workflow("site.yml")
    assert commands(job) == ["make site"]
    assert re.search(r"^site:.*\n\t.* -m docs\.site$", read(ROOT / "Makefile"), re.MULTILINE)
    *_, upload, publish = job["steps"]  # what was made is sent, and then published
    assert "upload-pages-artifact@" in upload["uses"] and "deploy-pages@" in publish["uses"]
    assert ROOT / upload["with"]["path"] == site.OUT
    assert job["permissions"] == PAGES and job["environment"]["name"] == "github-pages"
    assert f"steps.{publish['id']}.outputs.page_url" in job["environment"]["url"]


def test_the_workflow_runs_what_ci_runs() -> None:
    """There, what needs no torch comes before the rest."""
    assert commands(workflow("test.yml")) == [".ci/run"]
    ran = re.findall(r"^(?:make|\.venv/bin/).*$", read(ROOT / ".ci" / "run"), re.MULTILINE)
    light = ran[: ran.index("make test")]
    promised = tomllib.loads(read(ROOT / "docs" / "without_torch.toml"))
    names = {f"make {name}" for name in promised["targets"]} | {*promised["commands"]}
    assert {" ".join(line.removeprefix(".venv/bin/").split()[:2]) for line in light} <= names


def test_the_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load(read(ROOT / "docs/CITATION.cff"))
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    assert citation["title"] == project["name"] and citation["license"] == project["license"]
    assert str(citation["version"]) == project["version"]
