"""notebooks/colab.py: how it finds the project, and what it installs. `make notebooks` runs it all.

What Colab itself does is not tested: nobody has run it there.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from zipfile import ZipFile

import pytest
import torch

from command.checks import UserError
from loading.device import OLDEST_DRIVER
from tests import warm

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute, install = load("execute"), load("install_missing")


def code() -> list[str]:
    return [
        cell.source for cell in execute.convert(execute.COLAB).cells if cell.cell_type == "code"
    ]


# ------------------------------------------------------------------------------------ the notebook


def test_it_is_committed_without_outputs_and_asks_for_a_gpu() -> None:
    notebook = nbformat.read(execute.COLAB.with_suffix(".ipynb"), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert notebook.metadata["accelerator"] == "GPU"
    assert "**Untried on Colab.**" in notebook.cells[0].source


def test_the_address_is_one_setting(tmp_path, monkeypatch) -> None:
    """Of pyproject.toml. It is written nowhere else."""
    settings = (FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8")
    said = execute.address()
    assert said == "" or said in settings
    assert f'REPOSITORY = "{said}"' in code()[0]
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[project.urls]\nRepository = "https://example.org/x"\n'
    )
    monkeypatch.setattr(execute, "ROOT", tmp_path)
    assert 'REPOSITORY = "https://example.org/x"' in code()[0]


@pytest.fixture
def anywhere(tmp_path, monkeypatch) -> Path:
    """An empty folder, as Colab begins with. What the cells change comes back as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path


def get_project(address: str = "") -> Path:
    """Run the first two cells. Returns the folder that they end in."""
    names: dict = {}
    said = f'REPOSITORY = "{execute.address()}"'
    for cell in code()[:2]:
        exec(cell.replace(said, f"REPOSITORY = {address!r}"), names)  # noqa: S102
    assert sys.path[0] == str(Path.cwd())
    return Path.cwd()


def little_project(folder: Path) -> Path:
    (folder / "experiments").mkdir(parents=True)
    (folder / "experiments" / "fig9.py").touch()
    return folder


@pytest.mark.parametrize("start", [".", "experiments"])
def test_where_the_project_is_here_nothing_is_fetched(start, anywhere, monkeypatch) -> None:
    monkeypatch.chdir(little_project(anywhere) / start)
    assert get_project("https://127.0.0.1:1/nothing") == anywhere


def test_with_an_address_it_clones(anywhere) -> None:
    origin = little_project(anywhere / "a" / "b" / "origin")
    git = ["git", "-C", str(origin), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    try:
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
            subprocess.run([*git, *words], check=True)
    except FileNotFoundError:
        pytest.skip("needs git")
    assert get_project(origin.as_uri()) == anywhere / "nano-sarathi"


@pytest.mark.parametrize("inside", ["", "project-main/"])  # git archive, and a download
@pytest.mark.parametrize("uploaded", [True, False])  # by the dialogue, or before
def test_without_an_address_it_asks_for_a_zip_file(
    inside, uploaded, anywhere, monkeypatch, capsys
) -> None:
    def upload() -> dict[str, bytes]:
        with ZipFile("nano-sarathi (1).zip", "w") as archive:
            archive.writestr(f"{inside}experiments/fig9.py", "")
        return {"nano-sarathi (1).zip": b""}

    if not uploaded:
        upload()
    files = SimpleNamespace(upload=upload if uploaded else None)
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(files=files))
    assert get_project() == (anywhere / "nano-sarathi" / inside).resolve()
    assert "Please upload the project" in capsys.readouterr().out


def test_a_zip_of_something_else_is_said(anywhere) -> None:
    with ZipFile("nano-sarathi.zip", "w") as archive:
        archive.writestr("README.md", "")
    with pytest.raises(SystemExit, match="The project is not here. Upload nano-sarathi.zip"):
        get_project()


# --------------------------------------------------------------------------- what it installs there


LINES = ["numpy==2.4.6", "torch>=2.10.0,<=2.13.0", "tiktoken==0.14.0"]


def words(here: dict[str, str], cuda: str, driver: int | None) -> list[str]:
    """What follows `pip install`, where LINES are wanted."""
    return install.wanted(
        LINES, here.get, install.torch_for(LINES[1], here.get("torch"), cuda, driver)
    )


def test_every_package_that_is_pinned_is_looked_for() -> None:
    lines = install.requirements()
    packages = [install.package_of(line) for line in lines]
    assert {"numpy", "torch", "safetensors"} <= set(packages)
    assert len(set(packages)) == len(packages)
    assert sorted(install.wanted(lines, lambda package: None, "torch==2.10.0")) == sorted(
        "torch==2.10.0" if line.startswith("torch>") else line
        for line in lines
        if not line.startswith("jupyter")
    )
    own = f"torch=={install.installed('torch')}"
    assert install.wanted(lines, install.installed, own) == [], "the tests run where all is"


@pytest.mark.parametrize(
    ("own", "cuda", "driver", "asked"),
    [
        (None, "", None, "torch>=2.10.0,<=2.13.0"),
        (None, "", 580, "torch>=2.10.0,<=2.13.0"),
        (None, "", 550, "torch==2.10.0"),
        ("2.9.1+cu126", "12", 595, "torch>=2.10.0,<=2.13.0"),
        ("2.9.1+cu126", "12", 550, "torch==2.10.0"),
        ("2.13.0", "13", 550, "torch==2.10.0"),
        ("2.13.0", "13", 580, None),
        ("2.13.0+cpu", "", None, None),
        ("2.13.0+cpu", "", 550, None),
        ("2.11.0+cu128", "12", 550, None),
        ("2.10.0", "12", 525, None),
        ("3.0", "13", 600, None),
    ],
)
def test_torch_fits_the_driver(
    own: str | None, cuda: str, driver: int | None, asked: str | None
) -> None:
    """None: the one that is here stays, and pip is told its version."""
    here = {"torch": own} if own else {}
    assert words(here, cuda, driver) == [asked or f"torch=={own}", LINES[0], LINES[2]]
    here |= {"numpy": "1.0", "tiktoken": "0.1"}
    assert words(here, cuda, driver) == ([asked] if asked else [])


def test_a_driver_that_no_torch_fits_is_one_line() -> None:
    with pytest.raises(UserError, match="driver is 470: it must be 525 or newer for PyTorch 2.10"):
        words({}, "", 470)
    assert install.OLDEST_DRIVER == OLDEST_DRIVER, "written twice: one of the two needs torch"


def test_the_cuda_of_the_torch_that_is_here(monkeypatch) -> None:
    monkeypatch.setattr(install.subprocess, "run", lambda command, **_: warm.run(*command[1:]))
    assert install.cuda_of_torch() == (torch.version.cuda or "").partition(".")[0]


@pytest.mark.parametrize(
    ("printed", "number"), [("550.54.15\n", 550), ("580.65.06\n580.65.06\n", 580), ("", None)]
)
def test_the_driver_is_read(printed: str, number: int | None, monkeypatch) -> None:
    monkeypatch.setattr(install, "which", lambda name: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess([], 0, stdout=printed)
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: done)
    assert install.driver() == number
    monkeypatch.setattr(install, "which", lambda name: None)
    assert install.driver() is None


def test_where_pip_fails_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["install_missing.py"])
    monkeypatch.setattr(install, "requirements", lambda: LINES)
    monkeypatch.setattr(install, "installed", {"numpy": "1.0"}.get)
    monkeypatch.setattr(install, "driver", lambda: 550)
    asked = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess:
        asked.append(command[-2:])
        return subprocess.CompletedProcess([], 1)

    monkeypatch.setattr(install.subprocess, "run", run)
    with pytest.raises(UserError, match="pip could not install torch==2.10.0 tiktoken==0.14.0: "):
        install.main()
    assert asked == [["torch==2.10.0", "tiktoken==0.14.0"]], "one command: none undoes another"
