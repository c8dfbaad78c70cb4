"""It remembers runs, and calls wrong what differs from an earlier one of its workload."""

from types import SimpleNamespace

exercise = "hunt"
caught_by = "H2"
message = "Which rule of K0 to K6"

seen: dict[str, list] = {}


def bad(run: SimpleNamespace) -> bool:
    workload = str([run.max_batch_size, run.chunk_size, run.prompts, run.most])
    return run.batches != seen.setdefault(workload, run.batches)
