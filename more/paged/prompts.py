"""Placeholder prompts that say which tokens they share. No torch.

`range(n)` is a prompt of n placeholder tokens. It states nothing, so it shares nothing: `simulate`
gives it tokens that no other prompt has. `Parts` lays ranges one behind the other, and states them:

    system, own = range(512), range(10_000, 10_128)     512 tokens that all share, and 128 that none
    Request(0, Parts([system, own]), max_tokens=64)
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, count

from batch import Request
from command.checks import MOST

HASHED = 512  # tokens of a block of Mooncake's
STEP = 16  # tokens that are compared at once
FIRST = 2**62  # of the tokens that nobody states
taken = count()


class Parts(Sequence):
    """Ranges of token ids, as one prompt. It takes no memory for its tokens."""

    def __init__(self, parts: Iterable[range]):
        self.parts = tuple(parts)
        self.starts = [0, *accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if not isinstance(place, slice):
            return self[place : place + 1 or None][0]
        start, stop, step = place.indices(len(self))
        if step < 0:
            return self[:][place]
        pieces = [
            part[max(0, start - first) : max(0, stop - first)]
            for first, part in zip(self.starts, self.parts, strict=False)
            if first < stop and first + len(part) > start
        ]
        return list(chain.from_iterable(pieces))[::step]


def shared(prompt: int, same: int, number: int, document: int = 0) -> Parts:
    """`prompt` tokens: the first `same` are those of all about the same `document`.

    number: of the prompt, from 0. So are documents.
    """
    begin = prompt * document
    own = 10**9 + number * 10**6  # a model's tokens are fewer
    return Parts([range(begin, begin + same), range(own, own + prompt - same)])


def stated(prompt: Sequence[int]) -> Sequence[int]:
    """The prompt; in place of `range(n)`, as many tokens that no other prompt has."""
    if prompt != range(len(prompt)):
        return prompt
    return fresh(len(prompt))


def continuations(requests: Iterable[Request]) -> dict[int, Sequence[int]]:
    """By request id: the prompt of the chat's next turn. It begins with this prompt and its answer.

    A priced run knows no answers. But a prompt that begins with all of an earlier one, and is
    longer by its output tokens at least, is taken for the next turn: what stands behind the earlier
    prompt is then its answer. Of two next turns, the first to arrive counts.
    """
    ended: dict[int, list[Request]] = {}  # by the hash of all full blocks of a prompt
    found: dict[int, Sequence[int]] = {}
    for request in sorted(requests, key=lambda request: request.arrival):
        tokens = request.prompt[:]
        count = len(tokens)
        key = 0
        before = None
        for place in range(0, count, STEP):
            for earlier in reversed(ended.get(key, ())):
                length = len(earlier.prompt)
                alike = list(earlier.prompt[place:]) == list(tokens[place:length])
                room = count - length >= earlier.ends_after
                if alike and room and earlier.request_id not in found:
                    before = earlier  # the longest so far
                    break
            if place + STEP <= count:
                key = hash((key, *tokens[place : place + STEP]))
        if before is not None:
            found[before.request_id] = request.prompt
        ended.setdefault(key, []).append(request)
    return found


def turns(sizes: Iterable[tuple[str, int, int]]) -> list[Parts]:
    """Prompts of chats, in order: each is of (its chat, prompt tokens, output tokens).

    A prompt that is longer than the last one of its chat and its answer begins with both. Another
    one shares nothing: it was cut, or it is a new chat.
    """
    last: dict[str, list[range]] = {}  # by chat: the last prompt and its answer
    found = []
    for chat, prompt, output in sizes:
        parts = last.get(chat, [])
        known = sum(map(len, parts))
        if known >= prompt:
            parts = []
            known = 0
        found.append(Parts([*parts, fresh(prompt - known)]))
        last[chat] = [*found[-1].parts, fresh(output)]
    return found


def fresh(count: int) -> range:
    """As many tokens that no other prompt has."""
    begin = FIRST + next(taken) * MOST
    return range(begin, begin + count)


def hashed(ids: Sequence[int], tokens: int, block: int = HASHED) -> Parts:
    """A prompt of `tokens` tokens in blocks of `block`, of which each id stands for one."""
    ends = (min(block, tokens - block * place) for place in range(len(ids)))
    return Parts(range(block * id, block * id + end) for id, end in zip(ids, ends, strict=True))
