"""A beam search as a request: its parameters, and how much cache it takes. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from batch import Request
from command.checks import LENGTH_PENALTY, Range, UserError, check_stop_ids, check_whole, shown
from scheduler import Memory, Scheduler

STEP = 16  # response tokens by which a segment grows (segment KV, Sec 3.2)
CACHES = ("segment", "standard")
ENDED = -2  # the executor returns it when a search is over; no model has such a token


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search. The names are vLLM's; scores, penalty and stopping are transformers'.

    beam_width: beams that are kept at each step. max_tokens: output tokens at most. n: how many
    sequences to return, the best first; None: beam_width. length_penalty: a sequence of n tokens
    has the score cum_logprob / n ** length_penalty. Above 0, this favours long sequences.
    early_stopping: when to end, once beam_width sequences have finished. True: at once. False: when
    the best running beam, scored at its present length, is no better than the worst finished one.
    "never": as False, but scored at length max_tokens if length_penalty is above 0. stop_ids:
    tokens that end a sequence. ignore_eos: go on after the end-of-text token.
    """

    beam_width: int = 4
    max_tokens: int = 64
    n: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    stop: None = None
    tags: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        def check(name: str, fine: Callable, allowed: str) -> None:
            value = getattr(self, name)
            if not fine(value):
                raise UserError(f"{name} is {shown(value)}; it must be {allowed}")

        check_whole("beam_width", self.beam_width)
        check_whole("max_tokens", self.max_tokens)
        if self.n is not None:
            check_whole("n", self.n, 1, self.beam_width)
        LENGTH_PENALTY.check("length_penalty", self.length_penalty)
        fine = (True, False, "never")
        check("early_stopping", lambda e: type(e) in (bool, str) and e in fine, f"one of {fine}")
        check_stop_ids("stop_ids", self.stop_ids)
        check("ignore_eos", lambda e: isinstance(e, bool), "True or False")
        check("temperature", lambda t: t in Range(0, 0, False), "0: a beam search draws nothing")
        check("stop", lambda s: s is None, "None: a beam ends at tokens only, so give stop_ids")


def cached_tokens(cache: str, beam_width: int, prompt: int, response: int) -> int:
    """Tokens in the cache of one search: formulas (2) and (3) of segment KV, for BS = 1.

    prompt, response: tokens whose keys and values are there; a prefill alone has response 0.
    """
    if response == 0:
        return prompt
    if cache == "standard":
        return beam_width * (prompt + response)
    return prompt + beam_width * segment_length(response)


def segment_length(response: int) -> int:
    """N_step: the places of a response segment that holds `response` tokens of each beam."""
    return -(-response // STEP) * STEP


@dataclass(eq=False, slots=True)
class BeamRequest(Request):
    """A request whose decode runs `beam_width` rows, one for each beam.

    `output` has one token for each step. The sequences are known only at the end. If the request is
    preempted, its search restarts.
    """

    beam_width: int = 4
    cache: str = "segment"
    make_search: Callable[[], object] | None = None  # a BeamSearch, where the model really runs
    search: object = None  # the one that is running

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        self.stop_ids = frozenset((ENDED,))  # those of a user end its beams

    @property
    def decode_size(self) -> tuple[int, int]:
        """Its rows, and tokens of cache. The first decode writes response token 1."""
        after = max(1, len(self.output))
        held = max(self.context, self.prefill_length)
        return self.beam_width, self.tokens_at(after) - held

    @property
    def most_cached(self) -> int:
        return self.tokens_at(self.max_tokens - 1)

    @property
    def slot_tokens(self) -> int:
        return len(self.prompt)

    def tokens_at(self, response: int) -> int:
        return cached_tokens(self.cache, self.beam_width, len(self.prompt), response)

    def restart(self) -> None:
        self.output.clear()
        self.search = None
        Request.restart(self)


class BeamMemory(Memory):
    """The memory where some decodes are those of searches. It takes over from `before`."""

    def __init__(self, before: Memory):
        super().__init__(before.capacity, before.taken)

    def holds(self, decodes: Sequence[Request], newcomer: Request | None = None) -> bool:
        prefill = 0 if newcomer is None else newcomer.prefill_length + next_tokens([newcomer])
        return next_tokens(decodes) + prefill <= self.room

    def grow(self, decodes: Sequence[Request]) -> None:
        self.taken += next_tokens(decodes)
        for request in decodes:  # the scheduler adds one, as for all decodes
            request.context += size_of(request)[1] - 1


def count_beams(scheduler: Scheduler) -> None:
    """Let a scheduler count the rows and the tokens of searches. Call it before one is added."""
    scheduler.memory = BeamMemory(scheduler.memory)
    scheduler.rows = rows


def rows(decodes: Sequence[Request]) -> int:
    """As `Scheduler.rows`, where some decodes are those of searches."""
    return sum([size_of(request)[0] for request in decodes])


def next_tokens(decodes: Sequence[Request]) -> int:
    """Tokens of cache that the next decodes of these requests take."""
    return sum([size_of(request)[1] for request in decodes])


def size_of(request: Request) -> tuple[int, int]:
    """Rows of a batch and tokens of cache that its next decode takes."""
    return request.decode_size if isinstance(request, BeamRequest) else (1, 1)
