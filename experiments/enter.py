"""Imported first by every script of this folder: see command/enter.py.

Outside the environment, Python looks for modules in this folder alone. So add the root.
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.append(ROOT)

# PyTorch's profiler writes two lines to stderr for each run ("USDT"), at level 5: above its errors.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import command.enter  # noqa: F401
