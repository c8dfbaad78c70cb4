"""Imported first by every script, before what may be missing or slow. See `cli.begin`.

The folders of scripts have an enter.py of their own: outside the environment, a script finds only
the files beside it. This one is for scripts at the root, and for tests.
"""

import cli  # noqa: F401
