"""native.cpp beside what it stands for: `attention.reference`, the model's own small operators, the
cache's own writes.
"""

import _ctypes
import copy
import dataclasses
import errno
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    TINY,
    assert_within,
    attend_spans,
    attention_bound,
    noise_bound,
    spans_bound,
    sum_bound,
    tiny_model,
    unit,
)
from torch import Tensor
from watch import PATIENCE, alive, descendants_of, wait_for

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


def forget() -> None:
    """The next call compiles, or looks for what has been compiled."""
    native.outcome.cache_clear(), native.function.cache_clear(), native.tell.cache_clear()


@pytest.fixture(scope="module", params=["this CPU", "one without AVX-512"])
def cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "this CPU":
            if platform.machine() != "x86_64":
                pytest.skip("needs an x86 CPU")
            flags = ["-march=haswell" if f == "-march=native" else f for f in native.FLAGS]
            patch.setattr(native, "FLAGS", flags)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_math(
    shape: str, head_dim: int, dtype: torch.dtype, cpu: None, two_threads: None
) -> None:
    if head_dim != 64:  # the second thread waits where the cores are busy: it is tested with 64
        torch.set_num_threads(1)
    for n_kv_head in (4, 2, 1):
        arguments = case(shape, head_dim, n_kv_head, dtype)
        assert_within(attend(*arguments), exact(*arguments), spans_bound(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
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
    q, keys, values, slots, contexts = case("whole prompt", 64, 4, torch.float32)
    keys[:, 2, 40] *= 1000
    whole = attend(q, keys, values, slots, contexts)
    for start, end in ((0, 13), (13, 40), (40, 41), (41, 70)):
        chunk = q[:, start:end], keys, values, [2], [end]
        rounding = spans_bound(*chunk)
        assert_within(attend(*chunk), exact(*chunk), rounding)
        assert_within(whole[:, start:end], exact(*chunk), rounding)
    assert torch.equal(attend(q[:, :40], keys, values, [2], [40]), whole[:, :40])


@pytest.mark.parametrize("dtype", DTYPES)
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operators(dtype: torch.dtype, rows: int, cpu: None, two_threads: None) -> None:
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
    sizes = 2 * heads.double().abs().max()  # of two products
    native.rotate(heads, 4, cos, sin)
    assert_within(heads, expected, sum_bound(2, sizes, dtype, expected))


def gated(inner: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu` in float64, and how far it may be off: e^-x is, by |x| u of itself."""
    exact, gate = model.swiglu(inner.double()), inner.double().chunk(2, dim=-1)[0]
    share = ((gate * (-gate).sigmoid()).abs() + 16) * unit(torch.float32) + 2 * unit(inner.dtype)
    return exact, share * exact.abs() + 1e-30  # e^-100 may be 0


def test_extreme_gates() -> None:
    gates = [-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("nan")]
    found = native.swiglu(torch.tensor([gates * 2 + [1.0] * 16]))
    exact, bound = gated(torch.tensor([gates[:-1] * 2 + [1.0] * 14]))
    assert found[0, [7, 15]].isnan().all()
    assert_within(found[:, [*range(7), *range(8, 15)]], exact, bound)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
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
    cache, exact = (KVCache(config, 4, 80, dtype) for dtype in (dtype, torch.float64))
    for part, same in ((cache.k, exact.k), (cache.v, exact.v)):
        same.copy_(part.copy_(torch.randn(part.shape, generator=generator)))
    qkv = torch.randn(73, 4 + 2 * n_kv_head, 32, generator=generator).to(dtype)
    before = cache.k.clone()
    y = native.attention(batch, cache)(1, qkv)
    expected = PLAIN["math"](batch, exact)(1, qkv.double())
    assert torch.equal(exact.k.to(dtype), cache.k) and torch.equal(exact.v.to(dtype), cache.v)
    exact.v.abs_(), qkv[:, -n_kv_head:].abs_()
    sizes = PLAIN["math"](batch, exact)(1, qkv.double())
    expected, sizes = expected.view(73, 4, 32), sizes.view(73, 4, 32)
    longest = exact.k[1].norm(dim=-1).max()
    rounding = attention_bound(qkv[:, :4], longest, expected, sizes, 80)
    assert_within(y.view(73, 4, 32), expected, rounding)
    assert (cache.k != before).any(dim=-1).sum() == 73 * n_kv_head, (
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
    exact, exact_cache = copy.deepcopy(plain).double(), KVCache(wide, 3, 40, torch.float64)
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
        batch = flat_batch(step)
        expected = exact(batch, exact_cache, PLAIN["math"])
        bound = noise_bound(plain(batch, caches[0], PLAIN["sdpa"]), expected)
        assert_within(ours(batch, caches[1], native.attention), expected, bound)
    assert expected.std() > 0.1, "logits that could differ"


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
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Asked for, it says why; unasked, sdpa does the work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    silent = write_script(tmp_path / "true", "for last; do :; done\ntouch $last")
    says = "echo 'native.cpp:1: error: no vectors here' >&2\nexit 1"
    broken, no_folder = write_script(tmp_path / "c++", says), tmp_path / "file"
    no_folder.touch()
    for change, message in (
        (
            lambda: monkeypatch.setenv("CXX", broken),
            r"cannot compile native.cpp \(native.cpp:1: error: no vectors here\): choose",
        ),
        (
            lambda: monkeypatch.setenv("CXX", silent),
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


@pytest.fixture
def fresh() -> Iterator[None]:
    """The test's own settings of the compiler and the cache count, and end with it."""
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def compiled() -> Path:
    """The compiled library of this machine. Others may have made libraries in the same cache."""
    native.library()
    stem = native.stem_of(native.compiler())
    return next(library.cache_folder().glob(f"{stem}-*.so"))


def write_script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def copies(made: str | Path) -> str:
    """A script for a compiler that makes a copy of this file. Another file: a real one's speed."""
    return f"for last; do :; done\ncp {made} $last"


@pytest.fixture
def kept(fresh: None, compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the compiled library, in a cache of its own. A script stands for the compiler."""
    monkeypatch.setenv("CXX", write_script(tmp_path / "c++", copies(compiled)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library()
    forget()
    (path,) = library.cache_folder().glob("*.so")
    return path


def test_it_is_compiled_once(kept: Path, capfd: pytest.CaptureFixture) -> None:
    """And again for a compiler that was installed later."""
    for installed, files, count in ((None, 1, 0), (1, 2, 1), (1, 2, 0), (2, 3, 1)):
        if installed is not None:
            os.utime(os.environ["CXX"], (installed, installed))
        forget()
        native.library()
        assert len(list(kept.parent.glob("native-*.so"))) == files
        assert capfd.readouterr().err.count("compiling native.cpp") == count


# In another process: what is cut short may end it. It does without torch.
LOAD = "import sys; from pathlib import Path; from fast.library import load_kept; "
LOAD += "print(load_kept(Path(sys.argv[1]), sys.argv[2]))"


def stem_of(path: Path) -> str:
    """All of a library's name but its checksum."""
    return path.stem.rpartition("-")[0]


def in_its_place(kept: Path, other: Path) -> Path:
    """Another library in a cache. The name has its checksum, so that this does not tell it."""
    file = os.open(other, os.O_RDONLY)
    path = kept.with_name(f"{stem_of(kept)}-{library.checksum(file)}.so")
    os.close(file)
    kept.unlink()
    path.write_bytes(other.read_bytes())
    path.chmod(0o700)
    return path


@pytest.mark.parametrize("what", ["cut short", "another library", "a pipe", "a link", "nothing"])
def test_a_damaged_library_is_made_again(
    kept: Path, what: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
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
    command = [sys.executable, "-c", LOAD, str(kept.parent), stem_of(kept)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done
    assert list(kept.parent.iterdir()) == []
    native.library()
    assert capfd.readouterr().err.count("compiling native.cpp") == 1
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert kept.is_file() and not kept.is_symlink() and kept.read_bytes() == data


def test_a_library_of_ours_is_taken(kept: Path) -> None:
    """What the next three tests plant is refused for its owner and mode alone."""
    path = in_its_place(kept, Path(_ctypes.__file__))
    assert hasattr(library.load_kept(kept.parent, stem_of(kept)), "PyInit__ctypes")
    assert path.exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_library_that_cannot_be_read_now_is_kept(
    kept: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, _: int) -> int:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(UserError, match=f"loaded .*{os.strerror(number)}.*: choose auto"):
            native.library()
    assert kept.exists()
    forget()
    native.library()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
@pytest.mark.parametrize("mode", [0o702, 0o720, 0o777])
def test_a_file_that_others_may_write_is_not_loaded(kept: Path, mode: int) -> None:
    path = in_its_place(kept, Path(_ctypes.__file__))
    path.chmod(mode)
    assert library.load_kept(kept.parent, stem_of(kept)) is None
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
def test_a_file_of_another_user_is_not_loaded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root gives the file away. Another user cannot, and seems to be somebody else."""
    path = in_its_place(kept, Path(_ctypes.__file__))
    if os.geteuid() == 0:
        os.chown(path, 1, 1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert library.load_kept(kept.parent, stem_of(kept)) is None
    assert not path.exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux loads an open file")
def test_what_is_checked_is_what_is_loaded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library takes its name just after its checksum was computed."""
    checksum = library.checksum

    def compute_and_swap(file: int) -> str:
        found = checksum(file)
        other = kept.with_suffix(".other")
        other.write_bytes(Path(_ctypes.__file__).read_bytes())
        other.replace(kept)
        return found

    monkeypatch.setattr(library, "checksum", compute_and_swap)
    loaded = library.load_kept(kept.parent, stem_of(kept))
    assert hasattr(loaded, "attend_bfloat16") and not hasattr(loaded, "PyInit__ctypes")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_is_not_trusted(kept: Path, mode: int) -> None:
    above = kept.parent.parent
    for folder in (kept.parent, above):
        folder.chmod(mode)
        with pytest.raises(UserError, match=rf"'{folder}' may be written by others \(chmod go-w"):
            library.cache_folder()
        folder.chmod(0o700)
    above.chmod(mode | stat.S_ISVTX)  # as /tmp
    assert library.cache_folder() == kept.parent
    kept.parent.chmod(mode | stat.S_ISVTX)  # there others could put new files
    with pytest.raises(UserError, match="may be written by others"):
        library.cache_folder()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_folders_that_we_make_are_ours_alone(
    mask: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those above the cache, too: with umask 002 they would be refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / ".cache"))
    before = os.umask(mask)
    try:
        folder = library.cache_folder()
    finally:
        os.umask(before)
    for place in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
def test_a_link_to_a_folder_that_others_may_write(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What counts is where it leads."""
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "real").mkdir(mode=0o700)
    (tmp_path / "all").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "all" / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    with pytest.raises(UserError, match=rf"'{tmp_path}/all' may be written by others"):
        library.cache_folder()


def test_a_folder_of_another_user_is_not_trusted(kept: Path) -> None:
    about = list(kept.stat())
    about[4] = os.geteuid() + 1  # st_uid
    assert "belongs to user" in library.unsafe(os.stat_result(about))
    about[4] = 0
    assert library.unsafe(os.stat_result(about)) is None


# As in `unshare -Ur`: the owner of / has no number of its own there.
ROOTS = """
import os, stat
from fast.library import unsafe
def folder(owner, mode):
    return os.stat_result((stat.S_IFDIR | mode, 0, 0, 2, owner, owner, 0, 0, 0, 0))
stat_of, os.geteuid = os.stat, lambda: 0
os.stat = lambda place: folder(65534, 0o755) if place == "/" else stat_of(place)
for mode in (0o755, 0o775, 0o1777):
    print(unsafe(folder(65534, mode), entries=True) is None, unsafe(folder(65534, mode)) is None)
print(unsafe(folder(1001, 0o755), entries=True) is None)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs Unix")
def test_a_user_namespace_has_a_root_of_another_number() -> None:
    """Folders above the cache may be its own. The cache and what is in it may not."""
    command = [sys.executable, "-c", ROOTS]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "False", "False", "False", "True", "False", "False"]


def test_a_relative_cache_is_refused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with pytest.raises(UserError, match="CACHE_HOME is 'here'; it must be an absolute path: choo"):
        native.library()
    assert not (ROOT / "here").exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_compiler_that_hangs_is_ended(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And so is what it has started."""
    body = f"sleep 1000 &\necho $! > '{tmp_path}/child'\nsleep 1000"
    monkeypatch.setenv("CXX", write_script(tmp_path / "hangs", body))
    kept.unlink()
    for seconds in (1, 10, 100):  # until it has started, also on a busy machine
        monkeypatch.setattr(native, "run_compiler", partial(library.run_compiler, seconds=seconds))
        with pytest.raises(UserError, match=f"hangs has not ended after {seconds} s: choose auto"):
            native.library()
        if (tmp_path / "child").exists():
            break
        forget()
    assert list(kept.parent.iterdir()) == []
    child = int((tmp_path / "child").read_text(encoding="utf-8"))
    wait_for(lambda: not alive(child))


WAIT = "import sys; from fast.library import run_compiler; run_compiler(sys.argv[1:])"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_a_compiler_ends_with_its_command(sign: signal.Signals, tmp_path: Path) -> None:
    """However the command ends; a closed terminal sends SIGHUP."""
    script = write_script(tmp_path / "hangs", "sleep 1000 &\nsleep 1000")
    command = [sys.executable, "-c", WAIT, script]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(descendants_of(process.pid)) == 4)  # watched.py, a shell, two sleeps
        started = descendants_of(process.pid)
        process.send_signal(sign)
    wait_for(lambda: not any(alive(pid) for pid in started))


def test_the_status_of_a_compiler_and_its_words(tmp_path: Path) -> None:
    """Also of one that leaves a child with its pipes, and of a file that is no program."""
    says = write_script(tmp_path / "says", "sleep 1000 &\necho 'error: no' >&2\nexit 3")
    assert library.run_compiler([says]) == (3, "error: no\n")
    (tmp_path / "data").write_bytes(bytes(99))
    (tmp_path / "data").chmod(0o755)
    status, said = library.run_compiler([str(tmp_path / "data")])
    assert status == 1 and re.fullmatch(r"error: .*data'\n", said)


def test_what_a_killed_command_has_left_is_removed(kept: Path) -> None:
    for age in (0, 10 * library.COMPILE_SECONDS):
        place = kept.parent / f"tmp{age}"
        place.mkdir()
        (place / "native.so").touch()
        os.utime(place, (time.time() - age,) * 2)
    library.cache_folder()
    assert sorted(path.name for path in kept.parent.iterdir()) == [kept.name, "tmp0"]


def test_a_compiler_that_makes_something_else(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", write_script(tmp_path / "other", copies(_ctypes.__file__)))
    kept.unlink()
    with pytest.raises(UserError, match="what was compiled has no function attend_bfloat16: cho"):
        native.library()
    assert list(kept.parent.iterdir()) == []


def test_as_many_slots_as_requests() -> None:
    batch, cache = flat_batch([(0, 4, 1), (1, 5, 1), (2, 6, 1)]), KVCache(TINY["llama"], 4, 16)
    for slots, contexts in (((0, 1), (5, 6)), ((0, 1, 2), (5, 6)), ((0, 1), (5, 6, 7))):
        batch.spans = [Span(slice(0, 3), slots, contexts)]
        with pytest.raises(ValueError, match="zip"):
            native.attention(batch, cache)
