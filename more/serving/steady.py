"""Requests that are all alike, B at a time: the throughput of a steady state (SARATHI, Sec 5.1)."""

from dataclasses import dataclass

from batch import Request
from loop import Loop
from more.fast_forward import JUMPED, FastForward
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


def run_steady(loop: Loop, work: Workload) -> tuple[int, int]:
    """Run the workload until its window is known: `first` and `last` of `steady_window`.

    The window is that of 2 B requests, after as many others. But once a state comes back, the run
    repeats itself. If the window holds whole periods, the one that has been run says the same.
    """
    for request in work.requests(5 * work.batch_size):  # the last B keep all slots busy
        loop.add(request)
    begin, end = 2 * work.batch_size, 4 * work.batch_size
    ended = loop.trace.finished
    seen: dict[tuple, int] = {}  # by state: requests that had ended
    while (count := len(ended)) < end:
        if (state := state_of(loop)) is not None:
            first = seen.setdefault(state, count)
            if first < count and first <= begin and (end - begin) % (count - first) == 0:
                return first, count
        while len(ended) == count:
            loop.step()
    return begin, end


def state_of(loop: Loop) -> tuple | None:
    """All that the next iterations depend on, if requests that wait are alike. None: there is more.

    Without a memory to fill, that is how far each running request is. () where all end together.
    """
    waiting = loop.scheduler.waiting or loop.arriving
    # the first ones of a staggered workload have fewer decodes
    alike = waiting[0].max_tokens == waiting[-1].max_tokens
    known = isinstance(loop, FastForward) and type(loop.scheduler) in JUMPED
    if not known or not alike:
        return None
    loop.settle()
    return tuple(
        [
            (each.prefilled, each.context, each.chunks_run, each.max_tokens - len(each.output))
            for each in loop.scheduler.running
        ]
    )


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
