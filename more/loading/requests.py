"""Requests that a user hands in, or one line that says what is wrong with them. No torch."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from batch import Request
from command.checks import MOST_SEED, UserError, check_whole, shown
from configs import ModelConfig
from more.paged.prompts import stated

USUAL_LENGTH = 8192  # tokens of a request, at most, if nobody asks for more
PLACEHOLDER = 0  # a token of a priced run, whatever it would be
LEAST_LENGTH = 256  # tokens: what does not fit even so is refused


def usual_length(model: ModelConfig, slots: int, itemsize: int, memory: int | None) -> int:
    """How many tokens a request may have, if nobody says it.

    What the model allows, and 8192 at most; halved until the cache of `slots` requests takes at
    most half of what the weights leave of `memory` bytes (None: unknown).
    """
    length = min(model.longest, USUAL_LENGTH)
    left = None if memory is None else memory - model.parameters * itemsize
    each = slots * model.kv_bytes_per_token(itemsize)
    while left is not None and 2 * length * each > left and length >= 2 * LEAST_LENGTH:
        length //= 2
    return length


def listed(requests: Iterable[Request]) -> list[Request]:
    """The requests as a list, or a UserError if something else is among them."""
    try:
        each = iter(requests)
    except TypeError:  # a single request, for example
        each = iter([requests])
    found = []
    for request in each:  # an error of the user's own generator is shown as it is
        if not isinstance(request, Request):
            raise UserError(f"a list of requests is needed, and {shown(request)} is no Request")
        found.append(request)
    return found


def refuse_beams(requests: Iterable[Request], instead: str) -> None:
    """Raise a UserError if one is a beam search. instead: what a user should do, in words."""
    for request in requests:
        if hasattr(request, "beam_width"):
            raise UserError(f"request {request.request_id} is a beam search: {instead}")


def refuse_placeholders(requests: Iterable[Request]) -> None:
    """Raise a UserError if a request would end at the first token of a priced run."""
    for request in requests:
        if PLACEHOLDER in request.stop_ids:
            name = f"request {request.request_id}: stop_ids has {PLACEHOLDER}"
            raise UserError(f"{name}, which stands for each token of a priced run: leave it out")


def check_tokens(requests: Iterable[Request]) -> None:
    """Raise a UserError if a prompt has anything but token ids. (Prefix caching reads them.)"""
    for request in requests:
        for token in request.prompt[:]:
            if type(token) is not int or not 0 <= token <= MOST_SEED:
                name = f"request {request.request_id}: a token of its prompt"
                check_whole(name, token, 0, MOST_SEED)


def short_enough(requests: Sequence[Request], most: int, whose: str) -> list[Request]:
    """Those that need at most so many tokens. A line says how many others are left out.

    whose: what allows that, for the UserError if none is left.
    """
    found = [request for request in requests if request.most_cached <= most]
    if not found:
        raise UserError(f"no request is short enough: {whose} allows {most} tokens")
    if left := len(requests) - len(found):
        print(f"left out: {left} of {len(requests)} requests, which are longer than {most} tokens")
    return found


def check_requests(
    requests: Sequence[Request], most: int, whose: str, what: str = "request", instead: str = ""
) -> None:
    """Raise a UserError if two requests share an id, or one is too long for its slot.

    most: tokens of a slot. The last output token needs no place, because it is not fed back.
    whose, what, instead: words for the error: what sets the limit, what a request is called, and
    what to do.
    """
    ids: set[int] = set()
    for request in requests:
        name = f"{what} {request.request_id}"
        if getattr(request, "slot_tokens", request.most_cached) > most:  # of a beam search: fewer
            raise UserError(
                f"{name}: {len(request.prompt)} prompt tokens + max_tokens {request.max_tokens} - 1"
                f" exceed the {most} tokens that {whose} allows{instead}"
            )
        if request.request_id in ids:
            raise UserError(f"two requests have the id {request.request_id}: give each its own")
        ids.add(request.request_id)


def checked(
    requests: Iterable[Request], model: ModelConfig, tokens: bool, one_by_one: bool
) -> Iterator[Request]:
    """The requests in order of arrival, each of which the model can run; else a UserError.

    tokens: prompts must be token ids, because their prefixes are compared; `range(n)` gets tokens
    of its own, since it states nothing that another prompt could share. one_by_one: they come
    from a generator, in order of arrival already; each is taken only when it is asked for, and
    whether two share an id is not looked at.
    """
    last = 0.0
    for group in map(listed, ([each] for each in requests) if one_by_one else [requests]):
        refuse_beams(group, "price its batches with more.beam.cost.BeamCostModel")
        instead = "; more.loading.requests.short_enough leaves such requests out"
        check_requests(group, model.max_length, model.name, instead=instead)
        for request in group if tokens else ():
            request.prompt = stated(request.prompt)
        check_tokens(group if tokens else ())
        refuse_placeholders(group)
        for request in sorted(group, key=lambda request: request.arrival):
            if request.arrival < last:
                late = f"request {request.request_id}: arrival is {request.arrival} s"
                raise UserError(f"{late}, after one at {last} s: sort them by arrival")
            last = request.arrival
            yield request


class OneByOne(deque):
    """Requests that have not arrived. The next is made when the one before it arrives."""

    def __init__(self, requests: Iterator[Request]):
        super().__init__(islice(requests, 1))
        self.rest = requests

    def popleft(self) -> Request:
        self.extend(islice(self.rest, 1))
        return super().popleft()
