"""The run is used up as it is looked at."""

from types import SimpleNamespace

exercise = "hunt"
caught_by = "answer"
message = "changes its arguments"


def bad(run: SimpleNamespace) -> bool:
    while run.batches:
        chunks, decodes = run.batches.pop(0)
        if chunks and sum(chunk[2] for chunk in chunks) + len(decodes) > run.chunk_size:
            return True
    return False
