"""Settings that PyTorch and libgomp read once, when they are loaded: so this is imported first.

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

# How often a thread that waits for another looks again before it sleeps. libgomp's own 300,000 take
# milliseconds. Beside a busy program, which may hold the other thread's core for that long, each of
# thousands of waits lasts them all. 2,000 last about as long as Python does between two operators,
# so that on an idle machine few threads fall asleep (docs/performance.md).
SPINS = "2000"

# oneDNN keeps what it has prepared for each shape of a product, and PyTorch keeps it a second time:
# 1024 of each, which grow to several times the demo's own memory where no two batches are alike.
# 64 hold those of about ten sizes of a batch. A size that comes back later is prepared anew.
KEPT = "64"

# Large pages for large tensors, where Linux gives them to those who ask: reading the weights, a CPU
# then looks up a 500th of the addresses.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT)
os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
