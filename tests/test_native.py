"""native.cpp beside what it stands for: `attention.reference`, and the small operators of model.py.
And how it is compiled once, kept, and done without where that fails.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shared import assert_within, attend_spans, attention_case, spans_bound, sum_bound, unit
from torch import Tensor

import model
from attention import reference
from command.checks import UserError
from more.fast import native
from nano_sarathi import LLM

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not native.compiler(), reason="needs a C++ compiler")

# rows of each request, slots, contexts
SHAPES = {
    "whole prompt": (70, [2], [70]),
    "chunk in its place": (249, [1], [505]),
    "one vector of rows": (16, [0], [64]),
    "a row more": (17, [3], [40]),
    "two vectors and a row": (33, [0], [33]),
    "short chunk, deep": (3, [2], [511]),
    "several chunks": (20, [1, 3], [20, 90]),
    "first token": (1, [3], [1]),
    "decodes": (1, [3, 0, 2], [9, 512, 1]),
    "all slots decode": (1, [0, 1, 2, 3], [15, 16, 17, 31]),
}


def attend(*arguments) -> Tensor:
    return attend_spans(native.attention, *arguments)


def exact(q: Tensor, keys: Tensor, values: Tensor, slots: list[int], contexts: list[int]) -> Tensor:
    return reference(q.double(), keys.double(), values.double(), slots, contexts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_math(
    shape: str, head_dim: int, dtype: torch.dtype, two_threads: None
) -> None:
    for n_kv_head in (4, 2, 1) if head_dim == 64 else (2,):
        arguments = attention_case(SHAPES[shape], head_dim, n_kv_head, dtype, 512)
        assert_within(attend(*arguments), exact(*arguments), spans_bound(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_not_hidden(dtype: torch.dtype) -> None:
    for shape in ("short chunk, deep", "decodes"):
        for spoiled in range(3):  # q, keys, values
            arguments = attention_case(SHAPES[shape], 64, 4, dtype, 512)
            part = arguments[spoiled][:, arguments[3][0]] if spoiled else arguments[0][0]
            part[..., 5] = float("nan")
            assert attend(*arguments)[0].isnan().any()


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operators(dtype: torch.dtype, rows: int, two_threads: None) -> None:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    u = unit(torch.float32)
    norm = torch.nn.RMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data = draw(96)
    x = draw(rows, 2, 96, scale=30)
    with torch.inference_mode():
        y = native.RMSNorm(norm)(x.transpose(0, 1))
        exact = norm.double()(x.double().transpose(0, 1))
    assert_within(y, exact, ((96 + 8) * u + 2 * unit(dtype)) * exact.abs())  # 96 squares
    inner = draw(rows, 2 * 48, scale=40)  # e^40 is no bfloat16's, nor e^-40 a difference to 1
    assert_within(native.swiglu(inner), *gated(inner))
    heads = draw(rows, 5, 64)
    angles = torch.rand(rows, 1, 32, generator=generator, dtype=torch.float64)
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    expected = heads.double()
    model.rotate(expected, 4, cos.double(), sin.double())  # v, beside q and k, is left alone
    assert (expected == heads).all(dim=(0, 2)).tolist() == [False] * 4 + [True]
    sizes = 2 * heads.double().abs().max()  # of two products
    native.rotate(heads, 4, cos, sin)
    assert_within(heads, expected, sum_bound(2, sizes, dtype, expected))


def gated(inner: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu` in float64, and how far it may be off: e^-x is, by |x| u of itself."""
    exact = model.swiglu(inner.double())
    gate = inner.double().chunk(2, dim=-1)[0]
    share = ((gate * (-gate).sigmoid()).abs() + 16) * unit(torch.float32) + 2 * unit(inner.dtype)
    return exact, share * exact.abs() + 1e-30  # e^-100 may be 0


def test_extreme_gates() -> None:
    gates = [-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan")]
    found = native.swiglu(torch.tensor([gates * 2 + [1.0] * 16]))
    exact, bound = gated(torch.tensor([gates[:-1] * 2 + [1.0] * 14]))
    assert found[0, [7, 15]].isnan().all()
    assert_within(found[:, [*range(7), *range(8, 15)]], exact, bound)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of the test's own, and a compiler that copies what this machine has compiled."""
    native.library()
    made = native.kept_at(native.compiler())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f"for last; do :; done\ncp {made} $last"))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    native.outcome.cache_clear(), native.function.cache_clear(), native.tell.cache_clear()


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once(fresh: Path, capfd: pytest.CaptureFixture) -> None:
    """And again for a compiler that was installed later."""
    for installed, files, count in ((None, 1, 1), (None, 1, 0), (1, 2, 1), (1, 2, 0)):
        if installed is not None:
            os.utime(os.environ["CXX"], (installed, installed))
        forget()
        native.library()
        assert [each.suffix for each in (fresh / "nano-sarathi").iterdir()] == [".so"] * files
        assert capfd.readouterr().err.count("compiling native.cpp") == count


def test_a_compiler_that_works_is_not_given_up(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """It works in a process that it has started, and a line says so."""
    made = next(part for part in Path(os.environ["CXX"]).read_text().split() if "native-" in part)
    work = "(i=0; while [ $i -lt 400000 ]; do i=$((i + 1)); done)"
    body = f"for last; do :; done\n{work}\ncp {made} $last"
    monkeypatch.setenv("CXX", script(fresh / "slow", body))
    monkeypatch.setattr(native, "LOOK", 0.1)
    monkeypatch.setattr(native, "STUCK", 50)
    native.library()
    assert "... still compiling: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'native.cpp:1: error: no vectors' >&2\nexit 1", r"compile native.cpp .*no vectors"),
        ("for last; do :; done\ntouch $last", r"cannot be compiled, kept or loaded \(.*\.so"),
        ("exec sleep 60", "broken hangs: 0.[3-9].* s for native.cpp, and nothing done"),
    ],
)
def test_a_broken_compiler(
    fresh: Path, body: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, it says why; unasked, sdpa does the work. Nothing is left."""
    monkeypatch.setenv("CXX", script(fresh / "broken", body))
    monkeypatch.setattr(native, "LOOK", 0.1)
    monkeypatch.setattr(native, "STUCK", 3)
    with pytest.raises(UserError, match=f"{message}.*: choose auto"):
        LLM("demo", device="cpu", attention="native")
    assert LLM("demo", device="cpu").attention == "sdpa"
    assert list((fresh / "nano-sarathi").iterdir()) == []
