"""The operators between two linear operators, in C++, called through ctypes.

PyTorch's operators are slow for both parts of a hybrid batch. A bfloat16 chunk writes its scores to
memory and reads them back. A decode copies K and V to float32 before it reads them. The small
operators around them read the same rows several times. We found no operators of PyTorch that do
better on a CPU. So there is a C++ file. `attention` is the back end. `install` puts the small
operators into a model.

On first use, this machine's compiler compiles native.cpp in some seconds, for this CPU's
instructions. `~/.cache/nano-sarathi` keeps the result. Without a compiler, PyTorch's operators do
the same, more slowly.
"""

from command.first import ARCHITECTURE

import ctypes
import hashlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from shutil import which

import torch
from torch import Tensor, nn

from attention import AttendLayer, FlatBatch
from command.checks import UserError
from kvcache import KVCache
from more.fast.packed import install_small
from more.paged.cache import PagedCache

SOURCE = Path(__file__).with_name("native.cpp")
# -mtune=generic: GCC 12 thinks that recent AMD processors are older ones. Code for the older ones
# loads values a second time, although they are in registers.
FLAGS = ["-std=c++17", "-O3", f"-march={ARCHITECTURE}", "-mtune=generic"]
FLAGS += ["-fopenmp", "-shared", "-fPIC"]
POINTER = ctypes.c_void_p
INTEGER = ctypes.c_int64
ARGUMENTS = {
    "attend": [POINTER] * 8,
    "attend_beams": [POINTER] * 8,
    "normalize": [POINTER] * 3 + [INTEGER] * 2 + [ctypes.c_float],
    "rotate": [POINTER] * 3 + [INTEGER] * 4,
    "gate": [POINTER] * 2 + [INTEGER] * 2,
    "step": [POINTER] * 7,
}
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
LOOK = 20.0  # s: so often we look at a compiler that works, and say so
STUCK = 6  # looks without progress, after which we give a compiler up
OTHERWISE = ": choose auto, sdpa or math"  # at the end of each error message
# as in native.cpp: the most that a CPU has
LANES = 16
MAX_HEAD_DIM = 256
MAX_GROUPS = 64


class NoCompiler(UserError):
    """No compiler. With "auto" this is normal, so we say nothing."""


class Sizes(ctypes.Structure):
    """As in native.cpp."""

    _fields_ = [
        (name, INTEGER)
        for name in ("n", "n_head", "n_kv_head", "head_dim", "stride", "kv_head", "kv_slot")
    ]


def compiler() -> str | None:
    """The C++ compiler: $CXX, a program without options, or else g++ on Linux.

    On a Mac, g++ lacks OpenMP. On Windows, it misaligns vectors on the stack.
    Raises UserError if $CXX is no program.
    """
    if name := os.environ.get("CXX"):
        if not which(name):
            raise UserError(f"$CXX is {name!r}, which is no program")
        return which(name)
    return which("g++") if sys.platform == "linux" else None


def misfit(device: torch.device, dtype: torch.dtype, head_dim: int, groups: int) -> str | None:
    """What `attention` would need instead of this device, dtype or size. None: it can run."""
    if device.type != "cpu" or dtype not in DTYPES:
        return (
            f"a CPU, and bfloat16 or float32; this is {device}, {str(dtype).removeprefix('torch.')}"
        )
    if head_dim % (2 * LANES) or head_dim > MAX_HEAD_DIM or groups > MAX_GROUPS:
        return (
            f"a head_dim that is a multiple of {2 * LANES} up to {MAX_HEAD_DIM}, and up to"
            f" {MAX_GROUPS} heads to a key head; here they are {head_dim} and {groups}"
        )
    return None


def check(device: torch.device, dtype: torch.dtype, head_dim: int, groups: int) -> None:
    """Raises UserError if `attention` cannot run with these on this machine."""
    if reason := misfit(device, dtype, head_dim, groups):
        raise UserError(f"attention 'native' needs {reason}{OTHERWISE}")
    library()


def usable(device: torch.device, dtype: torch.dtype, head_dim: int, groups: int) -> bool:
    """Whether `attention` can run with these. If the compiler failed, a message says so, once."""
    if misfit(device, dtype, head_dim, groups):
        return False
    if isinstance(failure := outcome(), UserError):
        if not isinstance(failure, NoCompiler):
            tell(str(failure))
        return False
    return True


@cache
def tell(failure: str) -> None:
    say(f"{failure.removesuffix(OTHERWISE)}; PyTorch's operators do the same, more slowly")


def library() -> ctypes.CDLL:
    """native.cpp, compiled now or earlier. Raises UserError if it cannot be compiled."""
    if isinstance(found := outcome(), UserError):
        raise found
    return found


@cache
def outcome() -> ctypes.CDLL | UserError:
    """The library, or the reason why there is none. A failure is kept: there is one attempt."""
    try:
        if (program := compiler()) is None:
            return NoCompiler(
                "attention 'native' needs a C++ compiler (g++ on Linux, or one that $CXX names)"
                f"{OTHERWISE}"
            )
        kept = kept_at(program)
        if kept.exists():
            return ctypes.CDLL(str(kept))
        return compiled(program, kept)
    except UserError as error:
        return UserError(f"attention 'native': {error}{OTHERWISE}")
    # no home; a disk that is full, is read-only, or does not allow programs to run
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return UserError(
            f"attention 'native': {SOURCE.name} cannot be compiled, kept or loaded ({error})"
            f"{OTHERWISE}"
        )


def kept_at(program: str) -> Path:
    """Where the library is kept between runs. Its name tells all that it is made of.

    Machines with different CPUs may share a home: so that includes the CPU's instructions. A new
    compiler should compile again: so it includes the compiler's date of installation, too.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = home / "nano-sarathi"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    installed = str(os.stat(program).st_mtime_ns)
    text = SOURCE.read_text(encoding="utf-8")
    made_of = [text, program, installed, *FLAGS, platform.machine(), instructions()]
    return folder / f"native-{hashlib.sha256(' '.join(made_of).encode()).hexdigest()[:16]}.so"


def compiled(program: str, kept: Path) -> ctypes.CDLL:
    """Compile native.cpp, load it, and keep it. Raises UserError where the compiler does."""
    say(f"compiling {SOURCE.name}, once on this machine ...")
    with tempfile.TemporaryDirectory(dir=kept.parent) as workplace:
        made = Path(workplace) / kept.name
        with subprocess.Popen(
            [program, *FLAGS, str(SOURCE), "-o", str(made)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"LC_ALL": "C"},  # messages in English, with the word "error"
            start_new_session=True,  # g++ starts other programs: so all of them can be ended
            text=True,
            errors="replace",
        ) as process:
            try:
                said = wait_for(process)
            except BaseException:  # Ctrl-C, too
                process.kill()
                with suppress(OSError, AttributeError):  # Windows has no sessions
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            reason = next((line for line in said.splitlines() if "error" in line), "no message")
            raise UserError(f"{program} cannot compile {SOURCE.name} ({reason.strip()[:200]})")
        library = ctypes.CDLL(str(made))  # only what can be loaded is kept
        made.replace(kept)  # two processes may make it at once: the last one's stays
    return library


def wait_for(compiler: subprocess.Popen) -> str:
    """What a compiler says. On a busy machine it may take minutes: a line tells what it does.

    Raises UserError if it hangs: in STUCK looks it has used no time of a core.
    """
    begin = time.perf_counter()
    used = stuck = 0.0
    while True:
        try:
            return compiler.communicate(timeout=LOOK)[1]
        except subprocess.TimeoutExpired:
            before = used
            used = core_seconds(compiler.pid)
            stuck = 0 if used > before else stuck + 1
            waited = time.perf_counter() - begin
            if stuck == STUCK:
                raise UserError(
                    f"{compiler.args[0]} hangs: {waited:.3g} s for {SOURCE.name}, and nothing done"
                ) from None
            say(f"... still compiling: {waited:.0f} s, of which it had a core for {used:.0f} s")


def core_seconds(session: int) -> float:
    """Seconds of a core that the processes of a session have used, as Linux counts them.

    Elsewhere it is 0: there, a compiler may take no longer than one that hangs.
    """
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # its own, and those of what has ended
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def instructions() -> str:
    """What this CPU can do, as Linux lists it; elsewhere its name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )


@cache
def function(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """A function of native.cpp for this dtype. Give it `data_ptr()` for each tensor."""
    found = getattr(library(), f"{name}_{DTYPES[dtype]}")
    found.argtypes = ARGUMENTS[name]
    found.restype = None
    return found


def attention(batch: FlatBatch, cache: KVCache) -> AttendLayer:
    """A back end (attention.py), for what `check` lets through.

    One call per layer writes the cache and attends in all spans. The cores share this work.
    """
    numbers = requests_of(batch, cache)
    count = sum(len(span.slots) for span in batch.spans)
    run = function("attend", cache.k.dtype)
    n_kv_head, _, _, head_dim = cache.k.shape[1:]
    strides = cache.k.stride()[1:]
    assert cache.v.stride()[1:] == strides and strides[2:] == (head_dim, 1)

    def attend_layer(layer: int, qkv: Tensor) -> Tensor:
        assert qkv.is_contiguous() and qkv.dtype == cache.k.dtype and qkv.shape[2] == head_dim
        rows, heads, _ = qkv.shape
        n_head = heads - 2 * n_kv_head
        y = torch.empty(rows, n_head * head_dim, dtype=qkv.dtype)
        sizes = Sizes(count, n_head, n_kv_head, head_dim, heads * head_dim, *strides[:2])
        keys, values = cache.layers[layer]
        # bytes of one head
        q = qkv.data_ptr()
        size = head_dim * qkv.element_size()
        k = q + n_head * size
        v = q + (n_head + n_kv_head) * size
        run(q, k, v, keys.data_ptr(), values.data_ptr(), y.data_ptr(), numbers, ctypes.byref(sizes))
        return y

    return attend_layer


def requests_of(batch: FlatBatch, cache: KVCache) -> ctypes.Array:
    """native.cpp's requests, of a whole batch."""
    requests = []
    for span in batch.spans:
        rows = (span.rows.stop - span.rows.start) // len(span.slots)
        first = range(span.rows.start, span.rows.stop, rows)
        requests += zip(first, [rows] * len(first), span.slots, span.contexts, strict=True)
    if isinstance(cache, PagedCache):
        assert cache.table.dtype == torch.int64 and cache.table.stride(1) == 1
        size = cache.memory.block_size
        at = cache.table.data_ptr()
        row = 8 * cache.table.stride(0)
        requests = [(*request, size, at + request[2] * row) for request in requests]
    return table(requests)


def table(requests: Sequence[tuple[int, ...]]) -> ctypes.Array:
    """native.cpp's requests: (first row, rows, slot, context) of each.

    In a cache of blocks, also the tokens of a block, and the address of its row of the table.
    """
    numbers = [(*request, 0, 0, 0)[:7] for request in requests]  # the last: what `step` fills in
    return (INTEGER * (7 * len(numbers)))(*chain.from_iterable(numbers))


class RMSNorm:
    """x (..., size), as the `nn.RMSNorm` that it is made from. For inference only."""

    def __init__(self, norm: nn.RMSNorm):
        self.weight = norm.weight.detach()
        self.size = len(norm.weight)
        self.eps = norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == self.weight.dtype and x.shape[-1] == self.size
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // self.size
        function("normalize", x.dtype)(
            x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), rows, self.size, self.eps
        )
        return out


def rotate(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """As `model.rotate`."""
    assert (
        x.is_contiguous()
        and cos.is_contiguous()
        and sin.is_contiguous()
        and x.dtype == cos.dtype == sin.dtype
    )
    rows, more, head_dim = x.shape
    function("rotate", x.dtype)(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, head_dim, more * head_dim
    )


def swiglu(inner: Tensor) -> Tensor:
    """As `model.swiglu`."""
    inner = inner.contiguous()
    rows = inner.shape[0]
    size = inner.shape[1] // 2
    out = torch.empty(rows, size, dtype=inner.dtype)
    function("gate", inner.dtype)(inner.data_ptr(), out.data_ptr(), rows, size)
    return out


def install(model: nn.Module) -> None:
    """Put the small operators into a `model.Transformer` that passed `check`, if sizes allow."""
    config = model.config
    if config.flavour != "llama" or config.hidden % LANES or config.linears["ffn_ln2"][0] % LANES:
        return
    install_small(model, RMSNorm, rotate, swiglu)
