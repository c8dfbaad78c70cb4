"""A property that looks at the chunks' number alone."""

from types import SimpleNamespace

exercise = "hunt"
caught_by = "H2"
message = "Which rule of K0 to K6"


def bad(run: SimpleNamespace) -> bool:
    return any(len(chunks) > 1 for chunks, _ in run.batches)
