"""Environment variables that PyTorch and libgomp read when they are loaded. Import this first.

Variables that you have set yourself are kept.
"""

import os
import platform
from importlib.util import find_spec

if find_spec("torch") is None:
    # in a script of ours, `cli.say_what_is_missing` makes one line of it
    needed = "this needs torch: make install, or pip install -r requirements.txt"
    raise ModuleNotFoundError(needed, name="torch")

# A thread that waits for another one looks so many times ("spins") before it sleeps. libgomp's own
# number, 300,000, takes milliseconds, where a busy program has the other thread's core. 2,000 spins
# last about as long as Python's work between two operators (docs/performance.md).
SPINS = "2000"

# oneDNN keeps what it has prepared for each shape of a product, and PyTorch keeps it a second time:
# up to 1024 each. If no two batches are alike, these take several times the demo's memory. 64 are
# enough for about ten batch sizes.
KEPT = "64"

# ATEN_CPU_CAPABILITY keeps PyTorch's own operators to the instructions of an older CPU. oneDNN, MKL
# (which obeys on Intel's CPUs only) and the compiler of native.cpp must keep to them, too. So one
# variable shows what an older CPU computes (`make cpus`). avx512 leaves out the
# instructions for bfloat16.
LEVELS = {
    "default": ("SSE41", "SSE4_2", "x86-64-v2"),
    "avx2": ("AVX2", "AVX2", "x86-64-v3"),
    "avx512": ("AVX512_CORE", "AVX512", "x86-64-v4"),
}
X86 = platform.machine() in ("x86_64", "AMD64")
LIMIT = os.environ.get("ATEN_CPU_CAPABILITY")
LIMIT = LIMIT if X86 and LIMIT in LEVELS else None  # PyTorch ignores other values
ARCHITECTURE = "native"  # for a compiler
if LIMIT:
    onednn, mkl, ARCHITECTURE = LEVELS[LIMIT]
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", onednn)
    os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", mkl)

# Ask Linux for large pages for large tensors. Then a CPU that reads the weights looks up one
# address instead of 500.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT)
os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
