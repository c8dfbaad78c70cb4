"""Which attention kernel would run on which GPU, without one: the table of docs/gpu.md.

    python -m tests.which_kernel

xformers and PyTorch choose a kernel by the shapes, strides and dtypes of tensors and by the GPU's
compute capability. So the back ends of the engine run on fake tensors (fake_cuda.py),
and the libraries are asked. PyTorch's is asked where it is built with CUDA: it then finds `DRIVER`
in the place of CUDA's runtime. A PyTorch for CPUs has no choice, and so `sdpa_kernel` says what was
read in its source. varlen_attn has one kernel.
"""

import fast.first  # noqa: F401

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attention import FlatBatch, Span
from fast.backends import BACKENDS
from fast.kernels import BLOCK, sdpa_kernel, why_not_varlen, why_not_xformers
from kvcache import KVCache
from tests.fake_cuda import fake_cuda

ROOT = Path(__file__).parent.parent
GPUS = {
    "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "L40S": (8, 9), "H100": (9, 0), "B200": (10, 0),
    "RTX 50": (12, 0),
}  # fmt: skip
HEAD_DIM, SLOTS, LENGTH = 128, 8, 2 * BLOCK
HEADS = {"plain": (32, 32), "grouped": (32, 8)}
# Spans of a batch: (rows of each request, slots, contexts). Two slots at least are idle.
DECODES = 1, (0, 1, 3, 4, 6), (300, 10, 400, 512, 7)
BATCHES = {
    "a whole prompt": [(256, (2,), (256,))],
    "a chunk": [(251, (2,), (507,))],
    "one decode": [(1, (2,), (301,))],
    "decodes": [DECODES],
    "decodes and a chunk": [DECODES, (251, (2,), (507,))],
}
UNMASKED = ("a whole prompt", "one decode")  # for PyTorch's attention
COLUMNS = ("GPU", "batch", "sdpa", "varlen", "xformers")
OPERATORS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_safe_softmax": "math",
    "_softmax": "math",
}
NAMES = {"fa2F": "flash", "cutlassF": "efficient"}  # xformers' for the same kernels of PyTorch
SDPA = F.scaled_dot_product_attention  # fake_cuda replaces it

# What PyTorch's choice asks of CUDA's runtime. Of the properties, the first ones up to the
# compute capability, as in driver_types.h.
DRIVER = """
#include <stddef.h>
#include <stdlib.h>
struct properties {
  char name[256], uuid[16], luid[8]; unsigned mask; size_t memory, shared; int registers, warp;
  size_t pitch; int threads, block[3], grid[3]; size_t constant; int major, minor;
};
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *n) { *n = 0; return 0; }
int cudaSetDevice(int n) { return 0; }
int cudaGetDeviceProperties(struct properties *p, int n) {
  p->major = atoi(getenv("MAJOR")); p->minor = atoi(getenv("MINOR")); return 0;
}
int cudaGetDeviceProperties_v2(struct properties *p, int n) {  // CUDA 12's
  return cudaGetDeviceProperties(p, n);
}
int cuDevicePrimaryCtxGetState(int n, unsigned *flags, int *active) {
  *flags = 0; *active = 1; return 0;
}
"""


class Noted(TorchDispatchMode):
    """Notes the kernels of attention that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in OPERATORS:
            self.kernels.append(OPERATORS[name])
        return func(*args, **(kwargs or {}))


@contextmanager
def xformers_asked(found: list[str]) -> Iterator[None]:
    """Inside, xformers' attention notes the operator that it would run, and runs nothing."""
    shut = why_not_xformers(torch.device("cuda"))  # first: it imports xformers without a warning
    from xformers.ops import fmha
    from xformers.ops.fmha import common, dispatch, flash

    def attention(query, key, value, attn_bias):
        inputs = fmha.Inputs(query=query, key=key, value=value, attn_bias=attn_bias)
        inputs.validate_inputs()
        name = dispatch._dispatch_fw(inputs, needs_gradient=False).NAME
        found.append(NAMES.get(re.split("[@-]", name)[0], name))
        return torch.empty_like(query)

    with ExitStack() as stack:
        place = fmha, "memory_efficient_attention_forward"
        stack.enter_context(mock.patch.object(*place, attention))
        if shut:  # a PyTorch for CPUs: open what its absence has shut
            stack.enter_context(mock.patch.object(common, "_built_with_cuda", True))
            stack.enter_context(mock.patch.object(flash.FwOp, "OPERATOR", True))
            stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        yield


def batch_of(spans: list[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> FlatBatch:
    made, first = [], 0
    for rows, slots, contexts in spans:
        made.append(Span(slice(first, first + rows * len(slots)), slots, contexts))
        first = made[-1].rows.stop
    numbers = torch.empty(first, dtype=torch.long, device="cuda")
    return FlatBatch(numbers, numbers, numbers, made, numbers)


def dtype_of(gpu: str) -> torch.dtype:
    return torch.bfloat16 if GPUS[gpu] >= (8, 0) else torch.float16


def asked(backend: str, gpu: str, batch: str, heads: str) -> str:
    """The kernels that attention in one layer calls, each once."""
    n_head, n_kv_head = HEADS[heads]
    found: list[str] = []
    with fake_cuda(GPUS[gpu]), mock.patch.object(F, "scaled_dot_product_attention", SDPA):
        shape = SimpleNamespace(n_layer=1, n_kv_head=n_kv_head, head_dim=HEAD_DIM)
        cache = KVCache(shape, SLOTS, LENGTH, dtype_of(gpu), "cuda")
        flat = batch_of(BATCHES[batch])
        rows = len(flat.tokens), n_head + 2 * n_kv_head, HEAD_DIM
        qkv = torch.empty(rows, dtype=dtype_of(gpu), device="cuda")
        with xformers_asked(found), Noted() as noted:
            BACKENDS[backend](flat, cache)(0, qkv)
    return ", ".join(sorted({*found, *noted.kernels}))


def read(gpu: str, batch: str) -> str:
    return sdpa_kernel(GPUS[gpu], dtype_of(gpu), HEAD_DIM, mask=batch not in UNMASKED)


def of_varlen(gpu: str) -> str:
    with fake_cuda(GPUS[gpu]):
        why = why_not_varlen(torch.device("cuda"), dtype_of(gpu), HEAD_DIM, LENGTH)
    return "none" if why else "flash"


def rows(gpu: str, ask: bool) -> list[list[str]]:
    """Of each batch, in the order of `COLUMNS`. ask: PyTorch's library, under `DRIVER`."""
    found = []
    for batch in BATCHES:
        plain, grouped = (
            [
                asked("sdpa", gpu, batch, heads) if ask else read(gpu, batch),
                of_varlen(gpu),
                asked("xformers", gpu, batch, heads),
            ]
            for heads in HEADS
        )
        assert all(plain) and plain == grouped, f"{gpu}, {batch}: {plain}; grouped: {grouped}"
        found.append([batch, *plain])
    return found


def differences(gpu: str) -> list[str]:
    """Where `sdpa_kernel` says what PyTorch's library does not."""
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64
    head_dims, both = (16, 60, 62, 63, 64, 80, 96, 128, 192, 248, 256, 264, 512), (False, True)
    found = []
    for dtype, head_dim, mask, grouped, cudnn in product(dtypes, head_dims, both, both, both):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        options = {"mask": mask, "grouped": grouped, "cudnn": cudnn}
        with fake_cuda(GPUS[gpu]), Noted() as noted:
            shapes = (2, 8, 64, head_dim), (2, 4 if grouped else 8, 64, head_dim), (2, 1, 64, 64)
            q, k, seen = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
            SDPA(q, k, k, attn_mask=seen if mask else None, enable_gqa=grouped)
        said = sdpa_kernel(GPUS[gpu], dtype, head_dim, **options)
        if noted.kernels != [said]:
            found.append(f"{gpu}, {dtype}, {head_dim}, {options}: {noted.kernels}, read as {said}")
    return found


def all_rows(ask: bool) -> Iterator[tuple[str, list[list[str]]]]:
    """Of each GPU, in a process of its own if PyTorch's library is asked."""
    if not ask:
        yield from ((gpu, rows(gpu, ask)) for gpu in GPUS)
        return
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder, "driver.so"))
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
        subprocess.run([*command, "-o", library], input=DRIVER, text=True, check=True)
        for gpu, (major, minor) in GPUS.items():
            done = subprocess.run(
                [sys.executable, "-m", "tests.which_kernel", gpu], cwd=ROOT, text=True, check=True,
                env=os.environ | {"LD_PRELOAD": library, "MAJOR": f"{major}", "MINOR": f"{minor}"},
                stdout=subprocess.PIPE,
            )  # fmt: skip
            yield gpu, json.loads(done.stdout)


def table(ask: bool) -> list[str]:
    """In Markdown. GPUs that run the same kernels share their rows; the first one names them.

    ask: PyTorch's library, which must be built with CUDA. Else its part is what was read.
    """
    alike: dict[str, list[str]] = {}
    for gpu, found in all_rows(ask):
        name = f"{gpu} ({GPUS[gpu][0]}.{GPUS[gpu][1]})"
        alike.setdefault(json.dumps(found), []).append(name)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for found, names in alike.items():
        firsts = [", ".join(names), *[""] * (len(BATCHES) - 1)]
        both = zip(firsts, json.loads(found), strict=True)
        lines += [f"| {' | '.join([first, *row])} |" for first, row in both]
    return lines


def main() -> None:
    if len(sys.argv) == 1:
        print("\n".join(table(ask=torch.version.cuda is not None)))
    elif len(sys.argv) == 2 and sys.argv[1] in GPUS and "LD_PRELOAD" in os.environ:
        wrong = differences(sys.argv[1])
        assert not wrong, "\n".join(wrong)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as the engine does
        print(json.dumps(rows(sys.argv[1], ask=True)))
    else:
        raise SystemExit("usage: python -m tests.which_kernel")


if __name__ == "__main__":
    main()
