"""What the experiments run: batches of a chosen shape, and workloads of more/serving/steady.py.

It also holds what the cost model says of them.
"""

from collections.abc import Iterable

from batch import Batch, Request
from configs import GPUS, MODELS
from costmodel import CostModel
from loop import Loop, Result
from more.serving.steady import (  # noqa: F401
    Workload,
    balance,
    split,
    steady_window,
    tokens_per_second,
)
from scheduler import make_scheduler
from simulate import CostExecutor, run_all, simulate
from timeline import Trace

# What fitted the paper's A6000 with LLaMA-13B, L -> B: Sec 3.1 says 18 at 1K; at 2K and 3K requests
# are twice and three times as long.
BATCH_SIZES = {1024: 18, 2048: 9, 3072: 6}


def balanced(length: int, batch_size: int, chunk_size: int) -> Workload:
    """The workload of B requests of L tokens from which SARATHI gains most; see `balance`."""
    return Workload(length, batch_size, balance(chunk_size, batch_size))


# -------------------------------------------------------------------------- steady-state throughput


def steady_operators(trace: Trace, first: int, last: int) -> dict[str, float]:
    """Seconds of each operator in the window."""
    begin, end = steady_window(trace, first, last)
    inside = [i.operators for i in trace.iterations if begin <= i.start < end]
    return {name: sum(operators[name] for operators in inside) for name in inside[0]}


def first_period(work: Workload, policy: str) -> tuple[int, int]:
    """`first` and `last` of the shortest window that holds a whole period.

    It is for runs that cost real time. Where all requests end together, as the baseline's do, the
    first B are like any others. Else slots fall free one by one from the first completion on. The
    window is then that of the next B, and 2 B + 1 requests keep all slots busy until it ends.
    """
    together = policy == "baseline" or (policy == "orca" and not work.staggered)
    return (0, work.batch_size) if together else (1, work.batch_size + 1)


# ---------------------------------------------------------------------------------------- predicted


def predicted_throughput(
    work: Workload, policy: str, chunk_size: int = 256, model: str = "llama-13b", gpu: str = "a6000"
) -> float:
    """Tokens per second, prompts and decodes together, in the steady state."""
    requests = work.requests(5 * work.batch_size)
    trace = simulate(
        requests, model, gpu, policy=policy, chunk_size=chunk_size, max_batch_size=work.batch_size
    )
    return tokens_per_second(trace, work.length, 2 * work.batch_size, 4 * work.batch_size)


class OperatorCostExecutor(CostExecutor):
    """A `CostExecutor` that also tells the seconds of each operator: slower."""

    def execute(self, batch: Batch) -> Result:
        result = super().execute(batch)
        result.operators = self.cost_model.operators(batch)
        return result


def run_priced(
    executor: CostExecutor,
    requests: Iterable[Request],
    policy: str,
    chunk_size: int,
    batch_size: int,
) -> Trace:
    """`simulate` with any cost model, such as that of a calibrated machine."""
    return run_all(Loop(make_scheduler(policy, batch_size, chunk_size), executor), requests)


def simulate_operators(
    requests: Iterable[Request], policy: str, chunk_size: int, batch_size: int, model: str, gpu: str
) -> Trace:
    """`simulate`, with the seconds of each operator in the trace."""
    executor = OperatorCostExecutor(CostModel(MODELS[model], GPUS[gpu]))
    return run_priced(executor, requests, policy, chunk_size, batch_size)
