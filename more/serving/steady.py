"""Requests that are all alike, B at a time: the throughput of a steady state (SARATHI, Sec 5.1)."""

from dataclasses import dataclass

from batch import Request
from timeline import Trace


def split(length: int, ratio: float) -> tuple[int, int]:
    """P and D, whole and at least 1, with P + D = length and P:D nearest to `ratio`."""
    decodes = min(length - 1, max(1, round(length / (1 + ratio))))
    return length - decodes, decodes


def balance(chunk_size: int, batch_size: int) -> float:
    """The P:D at which the chunks of a prompt carry all decodes and none is left over.

    SARATHI gains most there. A chunk holds C - (B-1) prompt tokens beside B - 1 decodes (Sec 4.4),
    so that P / (C - (B-1)) = D / (B-1), or P:D = C/(B-1) - 1. The paper counts P/C chunks, and so
    has the rule P:D = C/(B-1). But its peak is ours: 14 for C = 256 and B = 18 (Sec 5.1.3).
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


def tokens_per_second(trace: Trace, length: int, first: int, last: int) -> float:
    """Prompt tokens and decodes per second in the window, for requests of `length` tokens each."""
    begin, end = steady_window(trace, first, last)
    return (last - first) * length / (end - begin)
