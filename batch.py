"""What is scheduled: requests, chunks of their prompts, and batches. Pure data, no torch.

A request of P prompt tokens first runs as *chunks*: its prefill, whole or in parts. Then it runs as
one *decode* per iteration. The last chunk already yields the first output token. So D decodes yield
D + 1 output tokens, and at the end P + D tokens have their keys and values in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from command.checks import UserError, check_number, check_stop_ids, check_tags, check_whole, shown

LATEST = 1e10  # s: later, a clock of 64 bits no longer tells two iterations apart

BROKEN = -1  # in place of a token, if the logits are NaN or infinite


@dataclass(eq=False, slots=True)  # eq=False: equal only to itself, so that it can be in a set
class Request:
    """One prompt on its way through the engine.

    prompt: token ids. `range(n)` serves as n placeholder tokens in a simulation, shared with none.
    max_tokens: output tokens after which the request ends with finish_reason "length".
    ends_after: output tokens after which it ends in fact, as a trace knows (None: max_tokens). With
        fewer than max_tokens, it ends with "stop". Simulations need it. No policy may read it.
    stop_ids: output tokens that end it at once, with finish_reason "stop".
    arrival: seconds on the engine's clock. No scheduler sees the request before that.
    tags: labels for policies that read them (more/policies/), such as {"priority": "1"}.
    A request that is cancelled ends with "abort", vLLM's word; one that its policy refuses to
    serve, with "reject"; after a BROKEN token, with "error".
    """

    request_id: int
    prompt: Sequence[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    prefilled: int = 0  # tokens of its prefill whose K and V are in the cache
    context: int = 0  # all tokens whose K and V are in the cache
    chunks_run: int = 0  # chunks of its prefill that have run
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_length: int = field(init=False)  # the prompt; after a preemption also the output so far
    preemptions: int = 0
    sampler: object = None  # the executor draws this request's tokens with it
    tags: dict[str, str] = field(default_factory=dict)
    ends_after: int | None = None

    def __post_init__(self) -> None:
        check_whole("the id of a request", self.request_id, -(2**63), 2**63)
        name = f"request {self.request_id}"
        if not isinstance(self.prompt, Sequence):
            raise UserError(f"{name}: the prompt {shown(self.prompt)} is not a list of token ids")
        if len(self.prompt) == 0:
            raise UserError(f"{name}: the prompt is empty; it needs at least one token")
        check_whole(f"{name}: max_tokens", self.max_tokens)
        if self.ends_after is None:
            self.ends_after = self.max_tokens
        check_whole(f"{name}: ends_after", self.ends_after, most=self.max_tokens)
        check_number(f"{name}: arrival", self.arrival, 0, LATEST, "number of seconds")
        check_stop_ids(f"{name}: stop_ids", self.stop_ids)
        check_tags(f"{name}: tags", self.tags)
        self.prefill_length = len(self.prompt)

    def check_new(self) -> None:
        """A UserError if it has run before."""
        if self.context or self.output or self.finish_reason:
            raise UserError(
                f"request {self.request_id} has run before: make a new Request for each run"
            )

    @property
    def in_prefill(self) -> bool:
        return self.prefilled < self.prefill_length

    @property
    def most_cached(self) -> int:
        """The most tokens it will have in the cache. The last output token is not fed back."""
        return len(self.prompt) + self.max_tokens - 1

    def take(self, token: int) -> bool:
        """Add an output token. True: the request ends with it, and `finish_reason` says why."""
        self.output.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif token == BROKEN:
            self.finish_reason = "error"
        elif len(self.output) >= self.max_tokens:
            self.finish_reason = "length"
        elif len(self.output) >= self.ends_after:
            self.finish_reason = "stop"
        return self.finish_reason is not None

    def restart(self) -> None:
        """After a preemption: the next prefill runs the prompt, and then the output so far."""
        self.prefilled = self.context = self.chunks_run = 0
        self.prefill_length = len(self.prompt) + len(self.output)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Tokens start .. end - 1 of what is prefilled."""
        length = len(self.prompt)
        if end <= length:
            return self.prompt[start:end]
        from_prompt = self.prompt[start:]  # may be empty
        from_output = self.output[max(0, start - length) : end - length]
        return [*from_prompt, *from_output]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens start .. start + length - 1 of a request, prefilled together (SARATHI, 4.2)."""

    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """The last chunk of a prefill: an output token is sampled from its last row."""
        return self.start + self.length == self.request.prefill_length


@dataclass(slots=True)
class Batch:
    """What one iteration runs. With chunks and decodes, it is a hybrid batch."""

    chunks: list[Chunk]
    decodes: list[Request]

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.length for chunk in self.chunks])

    @property
    def num_tokens(self) -> int:
        """T: rows of every fused linear operator."""
        return self.num_prefill_tokens + len(self.decodes)

    @property
    def sampled(self) -> list[Request]:
        """Requests that get a token from this batch, in the order in which executors return it."""
        return [chunk.request for chunk in self.chunks if chunk.is_last] + self.decodes
