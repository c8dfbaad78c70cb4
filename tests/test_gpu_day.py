"""`make gpu`, rehearsed on a CPU: all steps; one that raises, hangs, or ends its process."""

import zipfile
from pathlib import Path

import pytest

from experiments import gpu_day

BAD = """
import os, time
from pathlib import Path
from experiments import gpu_day

def raises(day): raise ValueError("no such kernel")
def hangs(day):
    with open(day.out / "gpu.jsonl", "a") as file:
        file.write('{"step": "hal')
    time.sleep(60)
def dies(day): os._exit(9)
def breaks(day): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def last(day): day.note(what="a copy", unit="GB/s", value=1.0)

for each in (raises, hangs, dies, breaks, last):
    gpu_day.STEPS[each.__name__] = 1 if each is hangs else 30, each
work = gpu_day.work
"""


def test_a_bad_step_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_steps.py").write_text(BAD)
    found = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from bad_steps import Path, work"
    monkeypatch.setattr(gpu_day, "WORKER", found)
    monkeypatch.setitem(gpu_day.STEPS, "hangs", (1, None))
    names = ["raises", "hangs", "dies", "breaks", "last"]
    for name in set(names) - {"hangs"}:
        monkeypatch.setitem(gpu_day.STEPS, name, (30, None))
    out = tmp_path / "out"
    out.mkdir()
    assert gpu_day.drive(out, "cpu", names, 120) == []
    failed = {row["step"]: row["failed"] for row in gpu_day.read(out, "end")}
    assert failed["last"] == "" and [*failed] == names
    assert "no such kernel" in failed["raises"] and "illegal memory" in failed["breaks"]
    assert "status -9" in failed["hangs"] and "status 9" in failed["dies"]
    assert "- hangs: 0 s, ended" in gpu_day.summarize(out, [])
    gpu_day.bundle(out)
    with zipfile.ZipFile(out / "gpu-day.zip") as made:
        assert {"gpu.jsonl", "gpu.png", "summary.md", "log.txt"} <= {*made.namelist()}
    assert [row["value"] for row in gpu_day.read(out, "a copy")] == [1.0]


@pytest.mark.slow
def test_all_steps_on_a_cpu(tmp_path: Path) -> None:
    names = [name for name in gpu_day.STEPS if name not in ("tests", "validate")]
    assert gpu_day.drive(tmp_path, "cpu", names, 300) == []
    rows = gpu_day.read(tmp_path)
    assert not [row["failed"] for row in rows if row.get("failed")]
    assert {"decodes", "chunk", "sampling", "table4"} <= {row["what"] for row in rows}
    made = {path.name for path in tmp_path.iterdir()}
    assert {f"{name}.png" for name in ("fig3", "fig4", "fig8", "fig9")} <= made
