"""The choice of a device, and its memory: what a GPU would answer, without one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from command.checks import UserError
from configs import MODELS, ModelConfig
from executor import synchronized_clock
from more.loading import device as devices
from more.loading.device import batch_bytes, check_memory, choose_device, default_length, why_unseen
from more.loading.load import load_model
from more.loading.requests import usual_length

CUDA = torch.device("cuda")
ANOTHER = "update it, or install an older PyTorch: docs/gpu.md"
REPORTS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n": f"535.104.05: {ANOTHER}",
    "": f"of an unknown version: {ANOTHER}",
}


def gpu_of(monkeypatch: pytest.MonkeyPatch, free: int, kept: int) -> None:
    """kept: bytes that PyTorch gives back when it is asked."""
    now = [free]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: now.append(free + kept))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (now[-1], 10**11))


def test_what_pytorch_keeps_of_freed_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `del llm` its memory is PyTorch's, and the next LLM gets it."""
    demo = MODELS["demo"]
    dtype = torch.float16
    gpu_of(monkeypatch, 10**6, kept=10**10)
    check_memory(demo, 4, 256, dtype, CUDA)
    gpu_of(monkeypatch, 10**6, kept=0)
    with pytest.raises(UserError, match="but cuda has 0.0 GB"):
        check_memory(demo, 4, 256, dtype, CUDA)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], Path]:
    """A build for CUDA 13.0 that sees no GPU. Call it with what the driver says of itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def root(report: str | None) -> Path:
        if report is not None:
            about = tmp_path / "proc/driver/nvidia/version"
            about.parent.mkdir(parents=True)
            about.write_text(report, encoding="utf-8")
        return tmp_path

    monkeypatch.setattr(devices, "why_unseen", lambda: why_unseen(tmp_path))
    return root


@pytest.mark.parametrize("report", REPORTS)
def test_a_driver_that_is_too_old_is_said(
    report: str, unseen: Callable, capsys: pytest.CaptureFixture
) -> None:
    unseen(report)
    assert choose_device("auto") == torch.device("cpu")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("the device is the CPU: PyTorch ")
    needs = "is built with CUDA 13.0 and needs an NVIDIA driver 580 or newer, and the driver here"
    assert f"{needs} is {REPORTS[report]}\n" in said
    with pytest.raises(UserError, match=f"'cuda' is not here: PyTorch .* is {REPORTS[report]};"):
        choose_device("cuda")
    assert choose_device("cpu") == torch.device("cpu")
    assert not capsys.readouterr().err


def test_a_machine_without_a_gpu_is_not_bothered(
    unseen: Callable, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = unseen(None)
    assert choose_device("auto") == torch.device("cpu")
    (root / "dev").mkdir()
    (root / "dev/nvidia-caps").mkdir()
    assert why_unseen(root) == ""
    (root / "dev/nvidia0").touch()
    assert "driver 580 or newer" in why_unseen(root)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user hides it
    assert why_unseen(root) == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)  # a build for CPUs: the user's choice, too
    assert why_unseen(root) == ""
    assert not capsys.readouterr().err


def test_the_clock_waits_for_our_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sends of a pipeline have streams of their own, and wait for the next stage."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for all streams"))
    stream = SimpleNamespace(synchronize=lambda: waited.append("ours"))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: waited.append(device) or stream
    )
    for device in (torch.device("cuda:1"), torch.device("cpu")):
        assert synchronized_clock(device) <= synchronized_clock(torch.device("cpu"))
    assert waited == [torch.device("cuda:1"), "ours"]


QWEN = ModelConfig(  # 3-0.6B: 1.2 GB of weights in bfloat16, and 0.11 MB of cache for a token
    "q", 28, 16, 1024, 3072, 151936, 40960, n_kv_head=8, head_dim=128, tied=True
)


def test_a_batch_of_wider_numbers_takes_more() -> None:
    assert batch_bytes(QWEN, 8, 8192, 4) > 1.8 * batch_bytes(QWEN, 8, 8192, 2)


def test_a_stage_asks_for_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = MODELS["demo"]
    cpu = torch.device("cpu")
    need = replace(demo, n_layer=2).parameters * 4
    monkeypatch.setattr(devices, "memory_of", lambda _: need + 10**6)
    load_model(demo, None, torch.float32, cpu, own=range(2), length=8)
    with pytest.raises(UserError, match="GB of weights"):
        load_model(demo, None, torch.float32, cpu, length=8)


def test_the_usual_length() -> None:
    """By hand. The least is for weights that do not fit: then the refusal says so."""
    found = [usual_length(QWEN, 8, 2, memory * 10**9) for memory in (1, 8, 16, 17, 900)]
    assert found == [256, 2048, 4096, 8192, 8192]
    assert usual_length(QWEN, 1, 2, 8 * 10**9) == usual_length(QWEN, 8, 2, None) == 8192
    assert usual_length(QWEN, 8, 4, 8 * 10**9) == 1024
    assert usual_length(replace(QWEN, window=300), 8, 2, 8 * 10**9) == 300
    assert usual_length(MODELS["demo"], 8, 2, 10**10) == MODELS["demo"].max_length


def test_what_nobody_asks_for_fits_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """On a GPU by all of its memory, whatever is free; a refusal names a length that fits."""
    monkeypatch.setattr(devices, "memory_of", lambda _: 8 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 17 * 10**9))
    assert default_length(QWEN, 8, torch.bfloat16, torch.device("cpu")) == 2048
    said = capsys.readouterr().err
    assert said.startswith(
        "q: a request may have 2048 tokens (the model allows 40960), and the cache"
    )
    assert said.count("\n") == 1
    for device, begin in ((torch.device("cpu"), 8192), (CUDA, 40960)):
        with pytest.raises(UserError, match=r"give max_length \d+ at most") as refusal:
            check_memory(QWEN, 8, begin, torch.bfloat16, device)
        fits = int(str(refusal.value).split("max_length ")[1].split()[0])
        check_memory(QWEN, 8, fits, torch.bfloat16, device)
        with pytest.raises(UserError):
            check_memory(QWEN, 8, fits + 400, torch.bfloat16, device)
    monkeypatch.setattr(devices, "memory_of", lambda _: 17 * 10**9)
    assert default_length(QWEN, 8, torch.bfloat16, CUDA) == 8192
    for model, length in ((MODELS["demo"], 1024), (replace(QWEN, window=300), 300)):
        assert default_length(model, 8, torch.bfloat16, torch.device("cpu")) == length
    assert capsys.readouterr().err.count("\n") == 1
