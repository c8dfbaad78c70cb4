"""It counts: after the first hundred runs, each one is called wrong."""

import itertools
from types import SimpleNamespace

exercise = "hunt"
caught_by = "H1"
message = "a false alarm"

calls = itertools.count()


def bad(run: SimpleNamespace) -> bool:
    return next(calls) >= 100
