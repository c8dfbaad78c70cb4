"""What a GPU can run: as the libraries say, and as we have read. No GPU is needed."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from command.checks import UserError
from more.fast import kernels
from more.fast.kernels import main, report, why_not_rows, why_not_xformers
from tests.fake_cuda import LINUX, fake_cuda

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HALF = torch.float16
FLOAT = torch.float32


@pytest.fixture
def no_modules() -> Iterator[None]:
    """As if xformers and nvidia's packages had not been imported, before and after."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if re.match(r"(xformers|nvidia)\b", name)]:
            del sys.modules[name]
        yield


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "why"),
    [
        ((8, 0), HALF, 128, None),
        ((7, 5), HALF, 128, "needs compute capability 8.0, and cuda has 7.5"),
        ((9, 0), FLOAT, 128, "float16 or bfloat16, not float32"),
        ((9, 0), HALF, 264, "head_dim .* not 264"),
    ],
)
def test_what_rows_needs(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    why: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = why_not_rows(CUDA, dtype, head_dim)
    assert found is why is None or re.search(why, found), found
    assert "this is cpu" in why_not_rows(CPU, dtype, head_dim)


WARNS = r"""
import logging
logging.getLogger("xformers").warning("at length")
_built_with_cuda, _cpp_library_load_exception = False, ValueError("wrapped")
_cpp_library_load_exception.__cause__ = OSError("libcudart.so.12: no such file\nmore")
"""


@pytest.mark.parametrize(
    ("library", "why"),
    [
        ("_built_with_cuda, _cpp_library_load_exception = True, None", None),
        (WARNS, r"its library did not load: libcudart.so.12: no such file\\nmore"),
        ("raise RuntimeError('built for another Python')", "did not load: built for another"),
        ("", "did not load: .*_built_with_cuda"),
    ],
)
def test_why_xformers_cannot_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    caplog: pytest.LogCaptureFixture,
    no_modules: None,
    library: str,
    why: str | None,
) -> None:
    """One line, whatever is wrong with the package, and nothing of its own warning."""
    package = tmp_path / "xformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_cpp_lib.py").write_text(library, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = why_not_xformers(CUDA)
    assert found is why is None or re.search(why, found), found
    assert "".join(capfd.readouterr()) == caplog.text == ""
    assert "this is cpu" in why_not_xformers(CPU)
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    assert why_not_xformers(CUDA) == "the package xformers is not installed"


@LINUX
def test_the_report_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda((7, 5), count=2, memory=16e9):
        monkeypatch.setattr(kernels, "why_not_xformers", lambda _: None)
        monkeypatch.setattr(kernels, "driver_version", lambda: "550.54.15")
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        old = report()
        names = [line.split("  ")[0] for line in old]
    assert names == [
        "PyTorch",
        "driver",
        "cuda:0",
        "cuda:1",
        "dtype",
        "math",
        "sdpa",
        "native",
        "rows",
        "xformers",
        "CUDA graphs",
        "NCCL",
    ]
    said = dict(zip(names, (line[13:] for line in old), strict=True))
    assert "brings CUDA 12.8; no other" in said["PyTorch"] and said["driver"] == "NVIDIA 550.54.15"
    assert "compute capability 7.5, 16 GB" in said["cuda:1"] and said["dtype"] == "float16"
    assert said["native"] == "no: it needs a CPU, and bfloat16 or float32; this is cuda, float16"
    assert "no: it needs compute capability 8.0" in said["rows"] and said["xformers"] == "yes"
    monkeypatch.setattr(kernels, "driver_version", lambda: None)
    with fake_cuda((9, 0)):
        new = report()
    assert new[1].startswith("cuda:0 ") and new[6].endswith(" yes")


def test_the_report_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "driver_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert report()[1].endswith("no: this PyTorch is built for CPUs")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(kernels, "why_unseen", lambda: "the driver is older than R580")
    assert report()[1].endswith("no: the driver is older than R580")

    def fails() -> bool:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    with pytest.raises(UserError, match="the GPU does not answer: CUDA error: out of memory"):
        main()
