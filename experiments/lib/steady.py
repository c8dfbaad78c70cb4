"""What the experiments run: batches of a chosen shape, and workloads in a steady state.

It also holds what the cost model says of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from batch import Batch, Request
from configs import GPUS, MODELS
from costmodel import CostModel
from loop import Loop, Result
from scheduler import make_scheduler
from simulate import CostExecutor, run_all, simulate
from timeline import Trace

# What fitted the paper's A6000 with LLaMA-13B, L -> B: Sec 3.1 says 18 at 1K; at 2K and 3K requests
# are twice and three times as long.
BATCH_SIZES = {1024: 18, 2048: 9, 3072: 6}

# ---------------------------------------------------------------------------------------- workloads


def split(length: int, ratio: float) -> tuple[int, int]:
    """P and D, whole and at least 1, with P + D = length and P:D nearest to `ratio`."""
    decodes = min(length - 1, max(1, round(length / (1 + ratio))))
    return length - decodes, decodes


def balance(chunk_size: int, batch_size: int) -> float:
    """The P:D at which the chunks of a prompt carry all decodes and none is left over.

    SARATHI gains most there. A chunk holds C - (B-1) prompt tokens beside B - 1 decodes (Sec 4.4),
    so that P / (C - (B-1)) = D / (B-1), or P:D = C/(B-1) - 1. The paper calls it C/(B-1), and its
    example is this one: 14 for C = 256 and B = 18 (Sec 5.1.3).
    """
    return chunk_size / (batch_size - 1) - 1


@dataclass(frozen=True)
class Workload:
    """Requests that are all alike: P prompt tokens and D decodes, P + D = L.

    B of them run at a time, and there are always more.

    staggered: the first B get fewer decodes, in B even steps. From then on slots fall free one
    after the other and not all at once. Nothing else separates Orca's best case from its worst
    (SARATHI, Sec 5.2); the policy is the same.
    """

    length: int  # L
    batch_size: int  # B
    ratio: float  # P:D, before rounding to whole tokens
    staggered: bool = False

    def requests(self, count: int) -> list[Request]:
        """The prefill yields the first token, so that D decodes make D + 1 output tokens."""
        prompt, decodes = split(self.length, self.ratio)
        early = (
            [-(-(i + 1) * decodes // self.batch_size) for i in range(self.batch_size)]
            if self.staggered
            else []
        )
        return [
            Request(i, range(prompt), (early[i] if i < len(early) else decodes) + 1)
            for i in range(count)
        ]


def balanced(length: int, batch_size: int, chunk_size: int) -> Workload:
    """The workload of B requests of L tokens from which SARATHI gains most; see `balance`."""
    return Workload(length, batch_size, balance(chunk_size, batch_size))


# -------------------------------------------------------------------------- steady-state throughput


def steady_window(trace: Trace, first: int, last: int) -> tuple[float, float]:
    """The moments at which request number `first` and number `last` were completed.

    Requests are counted from 1 in order of completion; 0 is the start.

    Start-up and drain stay outside, and the window holds whole periods, under three conditions. The
    requests are identical; `first` and `last` are multiples of the batch size B; at least B
    requests are still to come after `last`. (The baseline completes B requests at a time, SARATHI
    one.)
    """
    assert 0 <= first < last <= len(trace.finished), (first, last, len(trace.finished))
    begin = trace.finished[first - 1][1] if first else trace.iterations[0].start
    return begin, trace.finished[last - 1][1]


def steady_operators(trace: Trace, first: int, last: int) -> dict[str, float]:
    """Seconds of each operator in the window."""
    begin, end = steady_window(trace, first, last)
    inside = [i.operators for i in trace.iterations if begin <= i.start < end]
    return {name: sum(operators[name] for operators in inside) for name in inside[0]}


def tokens_per_second(trace: Trace, length: int, first: int, last: int) -> float:
    """Prompt tokens and decodes per second in the window, for requests of `length` tokens each."""
    begin, end = steady_window(trace, first, last)
    return (last - first) * length / (end - begin)


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


def predicted_gain(
    work: Workload, policy: str, chunk_size: int = 256, model: str = "llama-13b", gpu: str = "a6000"
) -> float:
    """Throughput over the baseline's."""
    baseline = predicted_throughput(work, "baseline", 1, model, gpu)
    return predicted_throughput(work, policy, chunk_size, model, gpu) / baseline


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
