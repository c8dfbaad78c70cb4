"""What the experiments run: workloads of more/serving/steady.py."""

from more.serving.steady import (  # noqa: F401
    Workload,
    balance,
    split,
    steady_window,
    tokens_per_second,
)

# What fitted the paper's A6000 with LLaMA-13B, L -> B: Sec 3.1 says 18 at 1K; at 2K and 3K requests
# are twice and three times as long.
BATCH_SIZES = {1024: 18, 2048: 9, 3072: 6}


def balanced(length: int, batch_size: int, chunk_size: int) -> Workload:
    """The workload of B requests of L tokens from which SARATHI gains most; see `balance`."""
    return Workload(length, batch_size, balance(chunk_size, batch_size))


def first_period(work: Workload, policy: str) -> tuple[int, int]:
    """`first` and `last` of the shortest window that holds a whole period.

    It is for runs that cost real time. Where all requests end together, as the baseline's do, the
    first B are like any others. Else slots fall free one by one from the first completion on. The
    window is then that of the next B, and 2 B + 1 requests keep all slots busy until it ends.
    """
    together = policy == "baseline" or (policy == "orca" and not work.staggered)
    return (0, work.batch_size) if together else (1, work.batch_size + 1)
