"""`make gpu`, rehearsed: on a CPU and on a GPU that is not there; steps that fail, hang or die."""

import importlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import LINUX, fake_cuda

import executor
from command.checks import UserError
from configs import MODELS
from experiments import gpu_day, studies
from experiments.lib import measuring
from experiments.lib.engines import Sweep
from experiments.lib.rows import Rows, read_rows
from experiments.lib.study import Study
from tests import spawn

BAD = """
import os, time
from experiments import gpu_day

def raises(day): raise ValueError("no such kernel")
def hangs(day):
    with open(day.out / "gpu.jsonl", "a") as file:
        file.write('\\n{"step": "hal')
    time.sleep(60)
def dies(day): os._exit(9)
def breaks(day): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def last(day): day.note(what="a copy", unit="GB/s", value=1.0)

STEPS = {each.__name__: (40, each) for each in (raises, hangs, dies, breaks, last)}
STEPS["hangs"] = 1, hangs
gpu_day.STEPS = STEPS
work = gpu_day.work
def begin(*given): work(*given)
"""


@pytest.mark.slow
def test_a_bad_step_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_steps.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gpu_day, "STEPS", gpu_day.STEPS)
    monkeypatch.setattr(gpu_day, "work", importlib.import_module("bad_steps").begin)
    names = ["raises", "hangs", "dies", "breaks", "last"]
    out = tmp_path / "out"
    out.mkdir()
    assert gpu_day.drive(out, "cpu", names, 120) == []
    failed = {row["step"]: row["failed"] for row in gpu_day.read(out, "end")}
    assert failed["last"] == "" and [*failed] == names
    assert "no such kernel" in failed["raises"] and "illegal memory" in failed["breaks"]
    assert failed["hangs"] == "ended after 1 s" and failed["dies"] == "ended itself, status 9"
    assert "hangs: 1 s, ended" in gpu_day.summarize(out, [])
    (out / "quick").mkdir()
    (out / "quick" / "fig3.png").touch()  # of a rehearsal
    gpu_day.bundle(out)
    with zipfile.ZipFile(out / "gpu-day.zip") as made:
        assert {"gpu.jsonl", "summary.txt", "log.txt", "quick/fig3.png"} <= {*made.namelist()}
    assert [row["value"] for row in gpu_day.read(out, "a copy")] == [1.0]


def check(out: Path) -> None:
    rows = gpu_day.read(out)
    assert not [row["failed"] for row in rows if row.get("failed")]
    assert {"decodes", "chunk", "sampling"} <= {row["what"] for row in rows}
    made = {path.name for path in out.rglob("*.png")}
    assert {f"{name}.png" for name in ("fig3", "fig4", "fig8", "fig9", "table4")} <= made


@pytest.mark.slow
def test_all_steps_on_a_cpu(tmp_path: Path) -> None:
    names = [name for name in gpu_day.STEPS if name not in ("tests", "validate")]
    assert gpu_day.drive(tmp_path, "cpu", names, 300) == []
    check(tmp_path)


def committed(study: Study, quick: bool, **_: object) -> Rows:
    rows = read_rows(gpu_day.ROOT / "results" / f"{study.name}.csv")
    return rows.where(source=("predicted", "paper"))


def first_and_last(*asked: object, up_to: Callable = Sweep.up_to) -> Sweep:
    cases = up_to(*asked).measured
    return replace(asked[0], measured=[*cases[:1], *cases[1:][-1:]])


@LINUX
@pytest.mark.slow
def test_all_steps_on_a_gpu_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors have no numbers, so clocks and tokens are made up. One layer of each model."""
    ticks = iter(range(10**9))
    now = lambda *_: 1e-3 * next(ticks)
    for name in ("llama-13b", "llama3.1-8b", "llama-33b"):
        monkeypatch.setitem(MODELS, name, replace(MODELS[name], n_layer=1))
    monkeypatch.setattr(executor, "sample", lambda logits, samplers: [1] * len(logits))
    for place in ("executor", "more.fast.graphs"):
        monkeypatch.setattr(f"{place}.synchronized_clock", now)
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 1e3 * now())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(gpu_day.Day, "run", lambda day, name, *command: day.note(what=name))
    monkeypatch.setattr(Study, "predict", committed)  # tests/test_figures.py predicts
    monkeypatch.setattr(Sweep, "up_to", first_and_last)
    with fake_cuda((9, 0)):
        day = gpu_day.Day(tmp_path, "cuda")
        assert day.model == "llama-13b"
        for day.now, (_, function) in gpu_day.STEPS.items():
            function(day)
    gpu_day.summarize(tmp_path, [])
    check(tmp_path)
    measured = read_rows(tmp_path / "table4.csv").where(source="measured")
    assert {*measured.column("model")} == {"llama-13b", "llama-33b"}


@LINUX
@pytest.mark.parametrize(
    ("name", "memory", "flags", "runs"),
    [
        ("fig9", 80e9, [], ("llama-13b", 18, 1024)),
        ("fig9", 24e9, [], ("llama-0.2b", 6, 512)),
        ("fig9", 80e9, ["--quick"], ("llama-0.2b", 3, 64)),
        ("fig8", 45e9, [], ("llama-13b", 18, 1024)),
        ("fig8", 40e9, [], ("llama-13b", 15, 1024)),
        ("fig8", 16e9, ["--model", "llama3.2-3b"], ("llama3.2-3b", 18, 1024)),
        ("table4", 85e9, ["--model", "llama-33b"], ("llama-33b", 10, 1024)),
        ("serve_stalls", 80e9, [], ("llama-0.2b", 8, 512)),
        *(
            (name, 80e9, [], ("llama-13b", B, L))
            for name, B, L in (
                ("fig3", 18, 1024),
                ("fig4", 32, 1024),
                ("fig7", 1, 640),
                ("fig10", 18, 1024),
                ("fig11", 18, 1024),
                ("fig13", 18, 1024),
                ("table2", 4, 1024),
                ("table4", 6, 1024),
            )
        ),
    ],
)
def test_a_gpu_runs_the_papers_cases_where_they_fit(
    name: str,
    memory: float,
    flags: list[str],
    runs: tuple,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def load(options: object, size: int, length: int) -> None:
        raise UserError(f"{(options.model, size, length)}")

    monkeypatch.setattr(measuring, "load_llm", load)
    with fake_cuda(memory=memory), pytest.raises(UserError) as asked:
        studies()[name].run(["--measure", "--out", str(tmp_path), *flags])
    assert str(asked.value) == str(runs)
    assert ("runs the paper's cases" in capsys.readouterr().out) == (runs[0] != "llama-0.2b")


WITHOUT = """
import sys
hidden = "fastapi httpx openai playwright pydantic transformers uvicorn"
sys.modules |= dict.fromkeys(hidden.split())
import pytest
sys.exit(pytest.main(["--collect-only", "-m", "cuda", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.mark.slow
def test_tests_of_a_gpu_need_no_package_of_the_server() -> None:
    found = spawn.run("-c", WITHOUT)
    assert found.returncode == 0, found.stdout[-2000:]
    assert "test_graphs.py" in found.stdout
