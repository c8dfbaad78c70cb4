"""What happened in a run: one record per iteration, and the times at which requests started to speak and ended.

A trace comes out of every run, real or priced, so that both are read with the same words. All times are seconds on the engine's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler import Batch, Request


@dataclass(slots=True)
class Iteration:
    start: float  # s
    seconds: float
    num_prefill_tokens: int
    num_decodes: int
    num_chunks: int
    operators: dict[str, float] | None = None  # seconds per operator, where they were asked for

    @property
    def kind(self) -> str:
        if self.num_chunks and self.num_decodes:
            return "hybrid"
        return "prefill" if self.num_chunks else "decode"


@dataclass
class Trace:
    """iterations: in order. finished: (request id, time), in order of completion. first_token: time by request id."""

    iterations: list[Iteration] = field(default_factory=list)
    finished: list[tuple[int, float]] = field(default_factory=list)
    first_token: dict[int, float] = field(default_factory=dict)

    def record(self, batch: Batch, start: float, seconds: float, operators: dict[str, float] | None, ended: Sequence[Request]) -> None:
        """Append one iteration; `ended` are the requests that it completed."""
        chunks, end = batch.chunks, start + seconds
        self.iterations.append(Iteration(start, seconds, batch.num_prefill_tokens, len(batch.decodes), len(chunks), operators))
        for chunk in chunks:
            if chunk.is_last:
                self.first_token[chunk.request.request_id] = end
        for request in ended:
            self.finished.append((request.request_id, end))

    @property
    def seconds(self) -> float:
        """From the first iteration's start to the last one's end."""
        return self.iterations[-1].start + self.iterations[-1].seconds - self.iterations[0].start if self.iterations else 0.0

    @property
    def num_prefill_tokens(self) -> int:
        return sum(iteration.num_prefill_tokens for iteration in self.iterations)

    @property
    def num_decodes(self) -> int:
        """Decodes run, one output token each; a request's first output token belongs to its prefill."""
        return sum(iteration.num_decodes for iteration in self.iterations)

    @property
    def throughput(self) -> float:
        """Tokens processed per second, prefill and decode together."""
        return (self.num_prefill_tokens + self.num_decodes) / self.seconds if self.iterations else 0.0

    @property
    def mean_batch_size(self) -> float:
        """Requests in an iteration, on average."""
        work = sum(iteration.num_chunks + iteration.num_decodes for iteration in self.iterations)
        return work / len(self.iterations) if self.iterations else 0.0
