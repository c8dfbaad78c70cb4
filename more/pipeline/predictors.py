"""How many tokens will a request generate? TD-Pipe asks before it admits one (its Sec 3.3).

A predictor is a function: request -> output tokens, a number of at least 1. TD-Pipe's own is BERT
with a classifier of five classes of length (Fig 8). We have neither its data nor BERT. We offer:

    oracle          says max_tokens: this is exact, if nothing ends a request earlier
    Constant        says the same number for all requests
    Classes         finds the right one of the five classes with a given probability (Fig 14)
    PromptLength    says the mean output of other requests whose prompts were about as long
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from numbers import Real

from batch import Request
from command.checks import MOST, Range, UserError, check_number, check_whole, range_of, shown

Predictor = Callable[[Request], float]

SHARE = Range(0, 1, whole=False)
BINS = 20  # of `PromptLength`
PERCENTILES = (25, 50, 75, 99)  # between the five classes (TD-Pipe, Sec 3.3 and Fig 8)


def oracle(request: Request) -> int:
    """The true length, or an upper bound if a stop token may come earlier."""
    return request.ends_after


def predicted(predict: Predictor, request: Request) -> int:
    """What `predict` says, as a whole number. Raises UserError if this is no length."""
    tokens = predict(request)
    if not (isinstance(tokens, Real) and 1 <= tokens <= MOST):
        name = getattr(predict, "__name__", type(predict).__name__)
        raise UserError(
            f"request {request.request_id}: predictor {name} says {shown(tokens)} output tokens; it"
            f" must say a number from 1 to {MOST}"
        )
    return math.ceil(tokens)


class Constant:
    """The same length for all."""

    def __init__(self, tokens: float):
        self.tokens = tokens

    def __call__(self, request: Request) -> float:
        return self.tokens


def class_edges(lengths: Sequence[int]) -> list[int]:
    """The lengths at which classes [P25,P50) [P50,P75) [P75,P99) [P99,+) begin.

    lengths: output tokens of the requests to learn from.
    """
    if not lengths:
        raise UserError("lengths are empty; a predictor needs at least one to learn from")
    for length in lengths:
        check_whole("a length to learn from", length)
    ordered = sorted(lengths)
    return [ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES]


class Classes:
    """The true class with probability `accuracy`; else another class, drawn by frequency.

    The prediction is the mean length of the class (TD-Pipe, Sec 3.3). lengths: to learn from.
    The same request always gets the same answer.
    """

    def __init__(self, lengths: Sequence[int], accuracy: float, seed: int = 0):
        check_number("accuracy", accuracy, 0, 1)
        self.edges = class_edges(lengths)
        self.accuracy = accuracy
        self.seed = seed
        members: list[list[int]] = [[] for _ in range(len(self.edges) + 1)]
        for length in lengths:
            members[self.true_class(length)].append(length)
        overall = sum(lengths) / len(lengths)
        self.means = [sum(each) / len(each) if each else overall for each in members]
        self.counts = [len(each) for each in members]

    def true_class(self, length: int) -> int:
        return bisect_right(self.edges, length)

    def __call__(self, request: Request) -> float:
        draw = random.Random(f"{self.seed}/{request.request_id}")
        found = self.true_class(request.ends_after)
        others = [0 if i == found else count for i, count in enumerate(self.counts)]
        if draw.random() >= self.accuracy and any(others):
            found = draw.choices(range(len(others)), others)[0]
        return self.means[found]


class PromptLength:
    """The mean output of the requests whose prompts were about as long.

    pairs: (prompt tokens, output tokens) to learn from. They are sorted by prompt length and cut
    into BINS equal parts.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]]):
        if not pairs:
            raise UserError("pairs are empty; a predictor needs at least one to learn from")
        for size in (size for pair in pairs for size in pair):
            check_whole("a length to learn from", size)
        ordered = sorted(pairs)
        cuts = sorted({len(ordered) * i // BINS for i in range(BINS)})
        parts = [ordered[a:b] for a, b in zip(cuts, [*cuts[1:], len(ordered)], strict=True)]
        self.edges = [part[0][0] for part in parts[1:]]
        self.means = [sum(output for _, output in part) / len(part) for part in parts]

    def __call__(self, request: Request) -> float:
        return self.means[bisect_right(self.edges, len(request.prompt))]


def named(text: str, lengths: Sequence[int] = (), seed: int = 0) -> Predictor:
    """A predictor by its name: oracle, constant=N; with `lengths` to learn from, also classes=A."""
    name, _, number = text.partition("=")
    if text == "oracle":
        return oracle
    if name == "constant" and (tokens := range_of(1, MOST).read(number)) is not None:
        return Constant(tokens)
    if name == "classes" and lengths and (share := SHARE.read(number)) is not None:
        return Classes(lengths, share, seed)
    more = ", or classes=A with A from 0 to 1" if lengths else ""
    raise UserError(
        f"predictor {text!r}: it must be oracle, or constant=N with N from 1 to {MOST}{more}"
    )
