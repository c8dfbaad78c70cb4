"""Imported first by every script of this folder: see command/enter.py.

Outside the environment, Python looks for modules in this folder alone. So add the root.
"""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.append(ROOT)

import command.enter  # noqa: F401
