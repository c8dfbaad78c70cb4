"""What tests share stands in shared.py. It loads torch, which takes seconds.

So where xdist runs the tests in other processes, the one that hands out the files goes without.
"""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", None):  # in one of those, it is None
        config.pluginmanager.import_plugin("shared")
