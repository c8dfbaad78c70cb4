"""Imported first by every script, before what may be missing or slow. See `cli.begin`.

Some folders of scripts have an enter.py of their own: outside the environment, a script finds only
the files beside it. Where such a script is imported, as tests do, its `import enter` is this file.
"""

import sys

from command import cli  # noqa: F401

sys.modules.setdefault("enter", sys.modules[__name__])
