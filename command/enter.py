"""Imported first by every script, before what may be missing or slow. See `cli.begin`.

Some folders of scripts have an enter.py of their own: outside the environment, a script finds only
the files beside it. Where such a script is imported, as tests do, its `import enter` is this file.
"""

import os
import sys

from command import cli  # noqa: F401

# Where stages cannot meet, or one has ended, PyTorch's warnings would hide the one line of ours.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.modules.setdefault("enter", sys.modules[__name__])
