"""What happened in a run: one record per iteration, one per request, and the terms of serving.

Every run makes a trace, real or priced. So the same terms describe both. All times are seconds on
the engine's clock.

    TTFT                 time to first token: from a request's arrival to the end of the iteration
                         that yields its first token. It includes the wait in the queue and the
                         whole prefill.
    TBT                  time between tokens: the gaps between one request's consecutive tokens. We
                         keep all of them: a mean would hide a single long pause.
    generation stall     a gap longer than a bound that the caller gives. Prefills of other
                         requests cause it (Sarathi-Serve, Sec 3.2).
    normalised latency   (last token - arrival) / output tokens, in seconds per token (Orca, Sec
                         6.2; vLLM, Sec 6.1).
    scheduling delay     from a request's arrival to the start of its first iteration.
    useful tokens        each prompt token of a request that has finished, once;
                         and each output token, once. A request that is cancelled, or
                         ends with "error", has none.
    throughput           useful tokens per second, from the first arrival to the last token.
    recomputed tokens    those that a preemption lost, and that ran again. They are not useful.
    processed            tokens per second that iterations ran, recomputed ones too. SARATHI's
                         gains are ratios of it in a steady state (more/serving/steady.py).
    policy's own time    seconds in `schedule`, on this machine's clock. In a real run, they are
                         part of TTFT and latency. The virtual clock of a priced run has none.
    SLO                  an upper bound that must hold, such as one on the P99 of all TBTs.
    capacity             the largest request rate that still meets the SLO
                         (more/serving/capacity.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan

from batch import Batch, Request

# of `Trace.rows`, before the tags. All times are seconds
COLUMNS = (
    "request", "policy", "arrival", "scheduled", "first_token", "last_token", "ttft", "mean_tbt",
    "longest_tbt", "latency", "prompt_tokens", "output_tokens", "cached_tokens", "preemptions",
    "ended",
)  # fmt: skip


@dataclass(slots=True)
class Iteration:
    """One batch as it ran."""

    start: float  # s
    seconds: float
    num_prefill_tokens: int
    num_decodes: int
    num_chunks: int
    operators: dict[str, float] | None = None  # seconds per operator, where they were asked for
    chunks: tuple[tuple[int, int, int, int], ...] = ()  # see `contents`
    decodes: tuple[int, ...] = ()
    end: float = 0.0  # when its tokens came: in a real run, once the policy has taken them in

    def __post_init__(self) -> None:
        self.end = self.end or self.start + self.seconds

    @property
    def kind(self) -> str:
        if self.num_chunks and self.num_decodes:
            return "hybrid"
        return "prefill" if self.num_chunks else "decode"


def contents(batch: Batch) -> tuple[tuple, tuple]:
    """What a batch holds, as numbers.

    (request id, first token, tokens, tokens of the whole prefill) of each chunk, and the request
    ids of the decodes.
    """
    chunks = [
        (c.request.request_id, c.start, c.length, c.request.prefill_length) for c in batch.chunks
    ]
    return tuple(chunks), tuple([request.request_id for request in batch.decodes])


@dataclass(slots=True)
class Life:
    """The times of one request, in seconds on the engine's clock."""

    request_id: int
    arrival: float
    prompt_tokens: int
    scheduled: float  # start of its first iteration
    tokens: list[float] = field(default_factory=list)  # when each output token came
    finished: float | None = None
    preemptions: int = 0
    cached: int = 0  # prompt tokens that were in the cache when it was scheduled (more/paged/)
    tags: dict[str, str] = field(default_factory=dict)  # the request's
    recomputed: int = 0  # tokens that ran again
    reached: float = 0  # tokens of its prefill that are in the cache; infinity: it decodes
    lost: float = 0  # tokens that preemptions took from the cache, at most

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.tokens[0] - self.arrival

    @property
    def tbt(self) -> list[float]:
        """Times between tokens: one fewer than it has output tokens."""
        return [after - before for before, after in pairwise(self.tokens)]

    @property
    def scheduling_delay(self) -> float:
        return self.scheduled - self.arrival

    @property
    def latency(self) -> float:
        """From arrival to the last token."""
        return self.tokens[-1] - self.arrival

    def row(self, policy: str = "") -> dict[str, object]:
        """By COLUMNS, and a column tag_NAME for each tag. What it has not reached is None."""
        tokens = self.tokens
        gaps = self.tbt
        values = (
            self.request_id, policy, self.arrival, self.scheduled,
            *((tokens[0], tokens[-1], self.ttft) if tokens else (None,) * 3),
            *((sum(gaps) / len(gaps), max(gaps)) if gaps else (None,) * 2),
            self.latency if tokens else None, self.prompt_tokens, len(tokens), self.cached,
            self.preemptions, int(self.finished is not None),
        )  # fmt: skip
        tags = {f"tag_{name}": value for name, value in self.tags.items()}
        return dict(zip(COLUMNS, values, strict=True)) | tags


@dataclass
class Recorder:
    """What a loop writes down, in order.

    iterations: all of them. lives: by request id, in order of their first iteration.
    finished, preempted, cancelled, rejected (by the policy): (request id, time). In its next
    iteration, a preempted request starts its prefill again. guess: what to doubt in priced times:
    whose constants were borrowed, and what does not fit the memory; "" if nothing. policy: whose
    batches they were. schedules, policy_seconds, longest_schedule: how often the policy was asked,
    its own time in all, and the longest.
    """

    iterations: list[Iteration] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)
    finished: list[tuple[int, float]] = field(default_factory=list)
    preempted: list[tuple[int, float]] = field(default_factory=list)
    cancelled: list[tuple[int, float]] = field(default_factory=list)
    rejected: list[tuple[int, float]] = field(default_factory=list)
    guess: str = ""
    policy: str = ""
    schedules: int = 0
    policy_seconds: float = 0.0
    longest_schedule: float = 0.0

    def asked(self, seconds: float) -> None:
        """Write down the time that a call of the policy's `schedule` took."""
        self.schedules += 1
        self.policy_seconds += seconds
        self.longest_schedule = max(self.longest_schedule, seconds)

    def record(
        self,
        batch: Batch,
        start: float,
        seconds: float,
        operators: dict[str, float] | None,
        ended: Sequence[Request],
        end: float = 0.0,
    ) -> Iteration:
        """Append one iteration. Call it after `Scheduler.update`.

        ended: the requests that ended with it. end: see `Iteration`.
        """
        lives = self.lives
        chunks, decodes = contents(batch)
        tokens = batch.num_prefill_tokens
        iteration = Iteration(
            start, seconds, tokens, len(decodes), len(chunks), operators, chunks, decodes, end
        )
        end = iteration.end
        self.iterations.append(iteration)
        for chunk in batch.chunks:
            request = chunk.request
            request_id = request.request_id
            if request_id not in lives:
                lives[request_id] = Life(
                    request_id,
                    request.arrival,
                    len(request.prompt),
                    start,
                    cached=chunk.start,
                    tags=request.tags,
                )
            life = lives[request_id]
            reached = chunk.start + chunk.length
            if life.lost > chunk.start:
                life.recomputed += min(life.lost, reached) - chunk.start
            life.reached = reached
            if chunk.is_last:
                life.reached = inf
                life.tokens.append(end)
        for request_id in decodes:
            lives[request_id].tokens.append(end)
        for request in ended:
            if request.finish_reason == "error":  # its last token is none
                self.cancelled.append((request.request_id, end))
                continue
            lives[request.request_id].finished = end
            self.finished.append((request.request_id, end))
        return iteration

    def preempt(self, request: Request, moment: float) -> None:
        """A request has lost its place in the cache."""
        self.preempted.append((request.request_id, moment))
        life = self.lives[request.request_id]
        life.preemptions = request.preemptions
        held = life.prompt_tokens + len(life.tokens) - 1  # if it decodes: the last is not fed yet
        life.lost = max(life.lost, min(life.reached, held))
        life.recomputed += len(life.tokens) - len(request.output)
        del life.tokens[len(request.output) :]  # a beam search restarts, without its tokens

    @property
    def own_time(self) -> str:
        """The policy's own time, in words."""
        if not self.schedules:
            return "not measured"
        mean = 1e3 * self.policy_seconds / self.schedules
        return f"{mean:.3f} ms a call, {1e3 * self.longest_schedule:.2f} ms at most"


class Trace(Recorder):
    """What happened, and what it comes to: the terms above."""

    @property
    def seconds(self) -> float:
        """From the start of the first iteration to the end of the last.

        Without iterations (see `by_tag`): from the first `scheduled` to the last token.
        """
        spans = [(each.start, each.end) for each in self.iterations]
        spans = spans or [
            (own.scheduled, own.tokens[-1]) for own in self.lives.values() if own.tokens
        ]
        return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0

    @property
    def rates(self) -> str:
        """Throughput and recomputed tokens, in words."""
        return f"{self.throughput:.0f} useful tokens/s, {self.recomputed_tokens} recomputed"

    @property
    def num_prefill_tokens(self) -> int:
        return sum(iteration.num_prefill_tokens for iteration in self.iterations)

    @property
    def num_decodes(self) -> int:
        """Decodes run, one output token each.

        A request's first output token belongs to its prefill.
        """
        return sum(iteration.num_decodes for iteration in self.iterations)

    def times_of(self, request_id: int) -> tuple[float, float]:
        """Its TTFT and its latency, in s. NaN for a request that was rejected without a token."""
        life = self.lives.get(request_id)
        return (life.ttft, life.latency) if life and life.tokens else (nan, nan)

    def useful(self) -> list[Life]:
        """The lives of all requests that have a token and were not cancelled."""
        cancelled = {own for own, _ in (*self.cancelled, *self.rejected)}
        return [life for own, life in self.lives.items() if life.tokens and own not in cancelled]

    @property
    def useful_tokens(self) -> int:
        """See the terms above: what a user has got."""
        return sum(
            len(life.tokens) + (life.prompt_tokens if life.finished is not None else 0)
            for life in self.useful()
        )

    @property
    def recomputed_tokens(self) -> int:
        return sum(life.recomputed for life in self.lives.values())

    @property
    def span(self) -> tuple[float, float]:
        """The first arrival, and the last token, of the useful requests."""
        lives = self.useful()
        arrivals = [life.arrival for life in lives]
        ends = [life.tokens[-1] for life in lives]
        return min(arrivals, default=inf), max(ends, default=-inf)

    @property
    def throughput(self) -> float:
        """Useful tokens per second, from the first arrival to the last token."""
        first, last = self.span
        return self.useful_tokens / (last - first) if last > first else 0.0

    @property
    def processed(self) -> float:
        """Tokens per second that iterations ran: prompt tokens, recomputed ones, and decodes."""
        tokens = self.num_prefill_tokens + self.num_decodes
        return tokens / self.seconds if self.iterations else 0.0

    @property
    def mean_batch_size(self) -> float:
        """Requests in an iteration, on average."""
        work = sum(iteration.num_chunks + iteration.num_decodes for iteration in self.iterations)
        return work / len(self.iterations) if self.iterations else 0.0

    @property
    def ttfts(self) -> list[float]:
        """Every request's time to first token."""
        return [life.ttft for life in self.lives.values() if life.tokens]

    @property
    def tbts(self) -> list[float]:
        """All gaps between tokens, of all requests."""
        return [gap for life in self.lives.values() for gap in life.tbt]

    def stalls(self, bound: float) -> list[tuple[int, float, float]]:
        """Generation stalls: gaps between two tokens that are longer than `bound` seconds.

        Each is (request id, start, seconds).
        """
        return [
            (life.request_id, before, after - before)
            for life in self.lives.values()
            for before, after in pairwise(life.tokens)
            if after - before > bound
        ]

    def by_tag(self, name: str) -> dict[str, "Trace"]:
        """What became of the requests with each value of a tag, for any metric; no iterations.

        "" has those without the tag.
        """
        found: dict[str, Trace] = {}
        for own, life in self.lives.items():
            value = life.tags.get(name, "")
            found.setdefault(value, Trace(policy=self.policy, guess=self.guess)).lives[own] = life
        for part in found.values():
            for event in ("finished", "preempted", "cancelled", "rejected"):
                events = [each for each in getattr(self, event) if each[0] in part.lives]
                setattr(part, event, events)
        return dict(sorted(found.items()))

    def rows(self) -> list[dict[str, object]]:
        """A row for each request that has run, for a table (`command.cli.write_table`)."""
        return [life.row(self.policy) for life in self.lives.values()]
