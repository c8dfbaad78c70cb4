"""Imported first by every script of this folder: see command/enter.py.

Python looks for modules in this folder, then in its environment. That may have none of ours, or
belong to another clone. So the root comes first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import command.enter  # noqa: F401
