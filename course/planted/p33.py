"""A property that calls every batch below C rows wrong."""

from types import SimpleNamespace

exercise = "hunt"
caught_by = "H1"
message = "a false alarm"


def bad(run: SimpleNamespace) -> bool:
    rows = [sum(chunk[2] for chunk in chunks) + len(decodes) for chunks, decodes in run.batches]
    return any(count != run.chunk_size for count in rows)
