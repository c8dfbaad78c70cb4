"""Placeholder prompts that say which tokens they share. No torch.

`range(n)` is a prompt of n placeholder tokens. It states nothing, so it shares nothing: `simulate`
gives it tokens that no other prompt has. `Parts` lays ranges one behind the other, and states them:

    system, own = range(512), range(10_000, 10_128)     512 tokens that all share, and 128 that none
    Request(0, Parts([system, own]), max_tokens=64)
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, count

from command.checks import MOST

HASHED = 512  # tokens of a block of Mooncake's
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
    own = FIRST + next(taken) * MOST
    return range(own, own + len(prompt))


def hashed(ids: Sequence[int], tokens: int, block: int = HASHED) -> Parts:
    """A prompt of `tokens` tokens in blocks of `block`, of which each id stands for one."""
    ends = (min(block, tokens - block * place) for place in range(len(ids)))
    return Parts(range(block * id, block * id + end) for id, end in zip(ids, ends, strict=True))
