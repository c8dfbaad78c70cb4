"""native.cpp beside what it stands for: `attention.reference`, the model's own small operators, the
cache's own writes.
"""

import _ctypes
import dataclasses
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import TINY, attend_spans, tiny_model
from torch import Tensor

import model
from attention import PLAIN, FlatBatch, Span, reference
from checks import UserError
from configs import MODELS
from engine import LLM, SamplingParams
from fast import library, native
from fast.backends import choose_backend
from kvcache import KVCache

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
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


def forget() -> None:
    """The next call compiles, or looks for what has been compiled."""
    native.outcome.cache_clear(), native.function.cache_clear(), native.tell.cache_clear()


@pytest.fixture(params=["this CPU", "one without AVX-512"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param != "this CPU":
        if platform.machine() != "x86_64":
            pytest.skip("needs an x86 CPU")
        monkeypatch.setattr(
            native,
            "FLAGS",
            ["-march=haswell" if flag == "-march=native" else flag for flag in native.FLAGS],
        )
    forget()
    yield
    forget()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As in earnest; the other tests have one."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def case(
    shape: str, head_dim: int, n_kv_head: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    rows, slots, contexts = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(slots), rows, 4, head_dim, generator=generator)
    keys, values = torch.randn(2, n_kv_head, 4, 512, head_dim, generator=generator)
    return q.to(dtype), keys.to(dtype), values.to(dtype), slots, contexts


def attend(*arguments) -> Tensor:
    return attend_spans(native.attention, *arguments)


def exact(q: Tensor, keys: Tensor, values: Tensor, slots: list[int], contexts: list[int]) -> Tensor:
    return reference(q.double(), keys.double(), values.double(), slots, contexts)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_math(
    shape: str, head_dim: int, dtype: torch.dtype, cpu: None, two_threads: None
) -> None:
    for n_kv_head in (4, 2, 1):
        arguments = case(shape, head_dim, n_kv_head, dtype)
        torch.testing.assert_close(
            attend(*arguments).double(), exact(*arguments), rtol=0, atol=CLOSE[dtype]
        )


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_context_counts(shape: str, dtype: torch.dtype, cpu: None) -> None:
    """What lies behind a context, or in other slots, changes no bit, not even NaN."""
    q, keys, values, slots, contexts = case(shape, 64, 2, dtype)
    expected = attend(q, keys, values, slots, contexts)
    live = torch.zeros(4, 512, dtype=torch.bool)
    for slot, context in zip(slots, contexts, strict=True):
        live[slot, :context] = True
    for cache in (keys, values):
        cache[:, ~live] = float("nan")
    torch.testing.assert_close(attend(q, keys, values, slots, contexts), expected, rtol=0, atol=0)


def test_a_row_sees_nothing_behind_itself() -> None:
    """Promise 1: the rows of a chunk are those of the whole prompt, even where a later key would
    outweigh all others.
    """
    q, keys, values, _, _ = case("whole prompt", 64, 4, torch.float32)
    keys[:, 2, 40] *= 1000
    whole = attend(q, keys, values, [2], [70])
    for start, end in ((0, 13), (13, 40), (40, 41), (41, 70)):
        chunk = attend(q[:, start:end], keys, values, [2], [end])
        torch.testing.assert_close(chunk, whole[:, start:end], rtol=1e-5, atol=1e-5)
    assert torch.equal(attend(q[:, :40], keys, values, [2], [40]), whole[:, :40])


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_nan_is_not_hidden(dtype: torch.dtype) -> None:
    for shape in ("short chunk, deep", "decodes"):
        for spoiled in range(3):  # q, keys, values
            arguments = case(shape, 64, 4, dtype)
            (arguments[0][0] if spoiled == 0 else arguments[spoiled][:, arguments[3][0]])[
                ..., 5
            ] = float("nan")
            assert attend(*arguments)[0].isnan().any()


@pytest.mark.parametrize("shape", ["decodes", "short chunk, deep"])
def test_a_strided_cache(shape: str) -> None:
    """Heads and slots need not lie side by side; what is between them is left alone."""
    q, keys, values, slots, contexts = case(shape, 64, 2, torch.float32)
    wide = torch.full((2, 3, 6, 520, 64), float("nan"))  # more heads, slots and tokens
    parts = wide[:, :2, 1:5, :512]
    parts.copy_(torch.stack((keys, values)))
    before = wide.clone()
    y = attend(q, *parts, slots, contexts)
    assert torch.equal(y, attend(q, keys, values, slots, contexts))
    assert torch.equal(wide.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", CLOSE)
def test_small_operators(dtype: torch.dtype, rows: int, cpu: None, two_threads: None) -> None:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    def close(ours: Tensor, plain: Tensor) -> None:
        torch.testing.assert_close(ours.double(), plain, rtol=CLOSE[dtype], atol=CLOSE[dtype] / 10)

    norm = torch.nn.RMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data = draw(96)
    x = draw(rows, 2, 96, scale=30)
    with torch.inference_mode():
        close(native.RMSNorm(norm)(x.transpose(0, 1)), norm.double()(x.double().transpose(0, 1)))
    inner = draw(rows, 2 * 48, scale=40)  # e^40 is no bfloat16's, nor e^-40 a difference to 1
    close(native.swiglu(inner), model.swiglu(inner.double()))
    heads, angles = (
        draw(rows, 5, 64),
        torch.rand(rows, 1, 32, generator=generator, dtype=torch.float64),
    )
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = heads.double()
    model.rotate(expected, 4, cos.double(), sin.double())  # v, beside q and k, is left alone
    assert torch.equal(expected[:, 4:], heads[:, 4:].double()) and not torch.equal(
        expected[:, :4], heads[:, :4].double()
    )
    native.rotate(heads, 4, cos, sin)
    close(heads, expected)


def test_extreme_gates() -> None:
    extreme = torch.tensor(
        [[-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan")] * 2 + [1.0] * 16]
    )
    torch.testing.assert_close(
        native.swiglu(extreme), model.swiglu(extreme), rtol=1e-5, atol=1e-30, equal_nan=True
    )


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("dtype", CLOSE)
def test_a_whole_batch_in_one_call(
    dtype: torch.dtype, n_kv_head: int, cpu: None, two_threads: None
) -> None:
    """Two chunks, one of them of a single row, and two decodes: what is written, and what each span
    sees, as span by span.
    """
    config = dataclasses.replace(TINY["llama"], n_head=4, n_kv_head=n_kv_head, head_dim=32)
    generator = torch.Generator().manual_seed(0)
    batch = flat_batch([(2, 10, 70), (0, 0, 1), (3, 60, 1), (1, 0, 1)])
    batch.spans[2:] = [Span(slice(71, 73), (3, 1), (61, 1))]
    caches = [KVCache(config, 4, 80, dtype) for _ in range(2)]
    for cache in caches:
        for part in (cache.k, cache.v):
            part.copy_(torch.randn(part.shape, generator=generator.manual_seed(1)))
    qkv = torch.randn(73, 4 + 2 * n_kv_head, 32, generator=generator).to(dtype)
    before = caches[0].k.clone()
    expected = PLAIN["math"](batch, caches[0])(1, qkv)
    y = native.attention(batch, caches[1])(1, qkv)
    torch.testing.assert_close(y, expected, rtol=0, atol=CLOSE[dtype])
    assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)
    assert (caches[1].k != before).any(dim=-1).sum() == 73 * n_kv_head, (
        "the new rows of that layer, and no others"
    )


@pytest.mark.parametrize("policy", ["sarathi", "request_level", "vllm_v0"])
def test_llm_generates_the_same(policy: str) -> None:
    """The demo model in float32, all that is native against all that is not."""
    prompts = ["def open(path, mode):", "class List:\n    ", "import " * 40]
    tokens = []
    for attention_name in ("native", "sdpa"):
        llm = LLM(
            "demo",
            policy=policy,
            chunk_size=48,
            max_batch_size=2,
            dtype="float32",
            device="cpu",
            attention=attention_name,
        )
        assert llm.attention == attention_name and (
            llm.model.layers[0].rotate is native.rotate
        ) == (attention_name == "native")
        tokens.append(
            [output.token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=24))]
        )
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("flavour", TINY)
def test_every_kind_of_model(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, biases, norms of q and k, tied embeddings, GPT-2: a hybrid batch's logits,
    native beside plain.
    """
    wide = dataclasses.replace(
        TINY[flavour], name="wide", hidden=32 * TINY[flavour].n_head, intermediate=48, head_dim=32
    )
    monkeypatch.setitem(TINY, "wide", wide)
    plain, ours = (tiny_model("wide", torch.float32) for _ in range(2))
    caches = [KVCache(wide, 3, 40) for _ in range(2)]
    native.install(ours)
    assert (
        isinstance(ours.layers[1].norm_2, native.RMSNorm)
        == isinstance(ours.norm, native.RMSNorm)
        == (flavour != "gpt2")
    )
    steps = [  # (slot, first position, rows): prompts, then a chunk beside two decodes
        [(0, 0, 9), (1, 0, 17)],
        [(2, 0, 20), (0, 9, 1), (1, 17, 1)],
    ]
    for step in steps:
        logits = [
            plain(flat_batch(step), caches[0], PLAIN["sdpa"]),
            ours(flat_batch(step), caches[1], native.attention),
        ]
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
    assert logits[0].std() > 0.1, "logits that could differ"


def flat_batch(step: list[tuple[int, int, int]]) -> FlatBatch:
    tokens, slots, positions, spans = [], [], [], []
    for slot, start, rows in step:
        spans.append(Span(slice(len(tokens), len(tokens) + rows), (slot,), (start + rows,)))
        tokens += [(7 * slot + 3 * i) % 97 for i in range(start, start + rows)]
        slots += [slot] * rows
        positions += range(start, start + rows)
    last = torch.tensor([span.rows.stop - 1 for span in spans])
    return FlatBatch(
        torch.tensor(tokens), torch.tensor(slots), torch.tensor(positions), spans, last
    )


def test_auto_takes_it() -> None:
    assert LLM("demo", device="cpu").attention == "native"
    assert LLM("demo", device="cpu", dtype="float64").attention == "sdpa"


def test_what_it_is_not_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "small", dataclasses.replace(TINY["llama-gqa"], name="small"))
    with pytest.raises(
        UserError,
        match="'native' needs a head_dim that is a multiple of 32 up to 256.*here they are 8 and 3",
    ):
        LLM("small", dtype="float32", device="cpu", attention="native")
    assert LLM("small", dtype="float32", device="cpu").attention == "sdpa"
    with pytest.raises(
        UserError, match="'native' needs a CPU, and bfloat16 or float32; this is cpu, float64"
    ):
        LLM("demo", dtype="float64", device="cpu", attention="native")
    with pytest.raises(UserError, match="'native' needs a CPU.*this is cuda"):
        choose_backend("native", torch.device("cuda"), torch.bfloat16, MODELS["demo"])


def test_no_compiler_or_a_broken_one(
    cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Asked for, it says why; unasked, sdpa does the work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken, silent, no_folder = tmp_path / "c++", tmp_path / "true", tmp_path / "file"
    silent.write_text("#!/bin/sh\nfor last; do :; done\ntouch $last\n")
    silent.chmod(0o755)
    broken.write_text("#!/bin/sh\necho 'native.cpp:1: error: no vectors here' >&2\nexit 1\n")
    broken.chmod(0o755)
    no_folder.touch()
    for change, message in (
        (
            lambda: monkeypatch.setenv("CXX", str(broken)),
            r"cannot compile native.cpp \(native.cpp:1: error: no vectors here\): choose",
        ),
        (
            lambda: monkeypatch.setenv("CXX", str(silent)),
            r"cannot be compiled, kept or loaded \(.*native-\w+.so.*\): choose",
        ),
        (
            lambda: monkeypatch.setenv("CXX", "g++ -O1"),
            r"\$CXX is 'g\+\+ -O1', which is no program: choose",
        ),
        (
            lambda: (
                monkeypatch.delenv("CXX"),
                monkeypatch.setenv("XDG_CACHE_HOME", str(no_folder)),
            ),
            r"native.cpp cannot be compiled, kept or loaded \(.*file.*\): choose",
        ),
        (
            lambda: monkeypatch.setattr(native, "compiler", lambda: None),
            r"needs a C\+\+ compiler \(g\+\+ on Linux",
        ),
    ):
        change()
        forget()
        with pytest.raises(UserError, match=message):
            LLM("demo", device="cpu", attention="native")
        assert LLM("demo", device="cpu").attention == "sdpa"
        assert [path.name for path in (tmp_path / "nano-sarathi").glob("*")] == []
    said = capfd.readouterr().err
    assert said.count("compiling") == 2, "a compiler that has failed is not tried again"
    assert said.count("PyTorch's operators do the same, more slowly") == 4, (
        "of each failure but that there is no compiler"
    )


def test_it_is_compiled_once(
    cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        forget()
        native.library()
    assert capfd.readouterr().err.count("compiling native.cpp") == 1
    assert len(list((tmp_path / "nano-sarathi").glob("native-*.so"))) == 1


def test_a_new_compiler_compiles_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = native.library()._name
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\nfor last; do :; done\ncp {made} $last\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for installed, files in ((1, 1), (1, 1), (2, 2)):
        os.utime(script, (installed, installed))
        forget()
        native.library()
        assert len(list((tmp_path / "nano-sarathi").glob("*.so"))) == files
    forget()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the compiled library, in a cache of its own. A script stands for the compiler."""
    made = Path(native.library()._name)
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\nfor last; do :; done\ncp {made} $last\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield Path(native.library()._name)
    forget()


# In another process: what is cut short may end it.
LOAD = """
import torch
from fast import library, native
found = native.outcome()
print(type(found).__name__, "" if isinstance(found, native.ctypes.CDLL) else found)
"""


def load_anew(seconds: float = 60.0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", LOAD]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds
    )


@pytest.mark.parametrize("what", ["cut short", "another library", "a pipe", "a link", "nothing"])
def test_a_damaged_library_is_made_again(kept: Path, what: str, tmp_path: Path) -> None:
    data = kept.read_bytes()
    kept.unlink()
    if what == "cut short":
        kept.write_bytes(data[: len(data) // 2])
    elif what == "another library":
        kept.write_bytes(Path(_ctypes.__file__).read_bytes())
    elif what == "a pipe":
        os.mkfifo(kept)
    elif what == "a link":
        (tmp_path / "elsewhere.so").write_bytes(data)
        kept.symlink_to(tmp_path / "elsewhere.so")
    done = load_anew()
    assert (done.returncode, done.stdout) == (0, "CDLL \n"), done
    assert done.stderr.count("compiling native.cpp") == 1
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert kept.is_file() and not kept.is_symlink() and kept.read_bytes() == data


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_is_not_trusted(kept: Path, mode: int) -> None:
    kept.parent.chmod(mode)
    done = load_anew()
    assert done.stdout.startswith("UserError attention 'native': "), done
    assert "nano-sarathi' may be written by others (chmod go-w mends that)" in done.stdout
    kept.parent.chmod(0o700)
    kept.parent.parent.chmod(0o777)
    assert "which everybody may write" in load_anew().stdout
    kept.parent.parent.chmod(0o1777)  # as /tmp
    assert load_anew().stdout == "CDLL \n"


def test_a_folder_of_another_user_is_not_trusted(kept: Path) -> None:
    about = list(kept.stat())
    about[4] = os.geteuid() + 1  # st_uid
    assert "belongs to user" in library.unsafe(os.stat_result(about))
    about[4] = 0
    assert library.unsafe(os.stat_result(about)) is None


def test_a_relative_cache_is_refused(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    done = load_anew()
    assert "XDG_CACHE_HOME is 'here'; it must be an absolute path: choose auto" in done.stdout
    assert not (ROOT / "here").exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_compiler_that_hangs_is_ended(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And so is what it has started."""
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nsleep 1000\n")
    script.chmod(0o755)
    kept.unlink()
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(native, "run_compiler", partial(library.run_compiler, seconds=1.0))
    forget()
    start = time.monotonic()
    with pytest.raises(UserError, match="hangs has not ended after 1 s: choose auto"):
        native.library()
    assert time.monotonic() - start < 30
    assert list(kept.parent.iterdir()) == []
    child = Path("/proc", (tmp_path / "child").read_text(encoding="utf-8").strip(), "stat")
    assert not child.exists() or child.read_text(encoding="utf-8").split()[2] == "Z"


def test_a_compiler_that_makes_something_else(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "other"
    script.write_text(f"#!/bin/sh\nfor last; do :; done\ncp {_ctypes.__file__} $last\n")
    script.chmod(0o755)
    kept.unlink()
    monkeypatch.setenv("CXX", str(script))
    forget()
    with pytest.raises(UserError, match="what was compiled has no function attend_bfloat16: cho"):
        native.library()
    assert list(kept.parent.iterdir()) == []


def test_as_many_slots_as_requests() -> None:
    batch, cache = flat_batch([(0, 4, 1), (1, 5, 1), (2, 6, 1)]), KVCache(TINY["llama"], 4, 16)
    for slots, contexts in (((0, 1), (5, 6)), ((0, 1, 2), (5, 6)), ((0, 1), (5, 6, 7))):
        batch.spans = [Span(slice(0, 3), slots, contexts)]
        with pytest.raises(ValueError, match="zip"):
            native.attention(batch, cache)
