"""Imported first by every script of this folder: see command/enter.py.

Python looks for modules in this folder, then in its environment. That may have none of ours, or
belong to another clone. So the root comes first.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# PyTorch's profiler writes two lines to stderr for each run ("USDT"), at level 5: above its errors.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import command.enter  # noqa: F401
