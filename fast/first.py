"""Environment variables that PyTorch and libgomp read when they are loaded. Import this first.

Variables that you have set yourself are kept.
"""

import os
import sys
from importlib.util import find_spec

if find_spec("torch") is None:
    NEEDED = "this needs torch: make install, or pip install -r requirements.txt"
    if hasattr(sys.modules["__main__"], "__file__"):  # a script: one line, no traceback
        print(f"error: {NEEDED}", file=sys.stderr)
        raise SystemExit(2)
    raise ModuleNotFoundError(NEEDED)

# A thread that waits for another one looks so many times ("spins") before it sleeps. libgomp's own
# number, 300,000, takes milliseconds. If a busy program has the other thread's core, each of
# thousands of waits takes that long. 2,000 spins last about as long as Python's work between two
# operators. So on an idle machine, few threads fall asleep (docs/performance.md).
SPINS = "2000"

# oneDNN keeps what it has prepared for each shape of a product, and PyTorch keeps it a second time:
# 1024 of each. Where no two batches are alike, these grow to several times the demo's own memory.
# 64 hold those of about ten sizes of a batch. A size that comes back later is prepared again.
KEPT = "64"

# Ask Linux for large pages for large tensors. While it reads the weights, a CPU then looks up one
# address instead of 500.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT)
os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
