"""The first promise, for all lengths: a chunked prefill is the full prefill.

    python -m course prove          it needs z3: pip install z3-solver

The engine's own functions run on *symbols*: `start` is no number, but any whole number. Then z3, a
solver, looks for numbers that make a claim false. If there are none, the claim is proved. Else it
prints the smallest counterexample.

Only torch is replaced, by a few lines that say which keys a row sees. Where the code asks `if`
about a symbol, it runs twice, once each way (`paths`).

From these claims the promise follows in two sentences. In one layer, a row of a chunk sees the same
keys and values as in the full prefill, so attention gives it the same; all other operators take
each row alone. So the rows that enter the next layer are the same, and by induction those that
leave the last one.

What is not proved: floats round (tests compare to 1e-10), and the fast code of more/fast/, which
tests compare with the plain one. The sums of softmax are taken as exact, and exp(a - b) as
exp(a) / exp(b).
"""

import inspect
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from z3 import (
    And,
    ArithRef,
    BoolRef,
    ExprRef,
    If,
    Implies,
    Ints,
    Not,
    Or,
    Real,
    Reals,
    Solver,
    is_bool,
    is_int,
    sat,
    unsat,
)

import attention
import loop
import scheduler
from batch import Batch, Chunk, Request
from command.checks import UserError
from more.beam import attention as beams
from more.loading import variants

PLAIN_FILE = attention  # whose functions `near` calls, whatever file is tried

Path = tuple[list[BoolRef], Any]
"""What holds on one way through the code, and what came out: an outcome, or the UserError."""
Counterexample = dict[str, str] | None


# -------------------------------------------------------------------------------- code on symbols


def paths(code: Callable[[], Any], *given: BoolRef) -> list[Path]:
    """Run `code` once for each way through its `if`s that numbers can take, where `given` holds."""
    found: list[Path] = []
    begun: list[list[bool]] = [[]]  # the answers with which a path begins
    while begun:
        answers = begun.pop()
        known = [*given]
        asked = iter(tuple(answers))

        def answer(question: ExprRef, answers=answers, known=known, asked=asked) -> bool:
            """What `if question:` does."""
            if not is_bool(question):
                question = question != 0
            yes = next(asked, None)
            if yes is None:
                yes = possible(*known, question)
                if yes and possible(*known, Not(question)):
                    begun.append([*answers, False])
                answers.append(yes)
            known.append(question if yes else Not(question))
            return yes

        with patch.object(ExprRef, "__bool__", answer):
            try:
                outcome = code()
            except UserError as error:
                outcome = error
        found.append((known, outcome))
    return found


def possible(*claims: BoolRef) -> bool:
    solver = Solver()
    solver.add(*claims)
    return solver.check() != unsat  # where z3 does not know, the path is taken


def counterexample(found: list[Path], claim: Callable[[Any], Any]) -> Counterexample:
    """Numbers for which the claim about an outcome is false, small ones; None: it is proved."""
    for known, outcome in found:
        solver = Solver()
        solver.add(*known, Not(claim(outcome)))
        if (answer := solver.check()) == unsat:
            continue
        assert answer == sat, "z3 does not know: nothing is proved"
        symbols = [each() for each in solver.model() if each.arity() == 0]
        for symbol in filter(is_int, sorted(symbols, key=place)):
            small = (number for size in count() for number in (size, -size))
            number = next(each for each in small if solver.check(symbol == each) == sat)
            solver.add(symbol == number)
        solver.check()
        return {str(each): str(solver.model()[each]) for each in sorted(symbols, key=place)}
    return None


def place(symbol: ExprRef) -> tuple[int, str]:
    """Where it stands in a counterexample; those of softmax come last."""
    name = str(symbol)
    return NAMES.index(name) if name in NAMES else len(NAMES), name


def run(function: Callable, *arguments: Any, files: Sequence[ModuleType] = (), **names: Any) -> Any:
    """Call a function with other things behind some names of its file, such as torch.

    files: whose functions it calls; there, these names are others, too.
    """
    function = inspect.unwrap(function)  # without a cache
    with ExitStack() as stack:
        for known in (function.__globals__, *map(vars, files)):
            stack.enter_context(patch.dict(known, names))
        return function(*arguments)


def entrywise(of_numbers: Callable) -> Callable:
    """+ or <= of two tables, entry by entry; a side of size None has the other's size."""

    def of_tables(self: "Table", other: Any) -> "Table":
        if not isinstance(other, Table):
            other = Table(None, None, lambda row, column, value=other: value)
        return Table(
            other.rows if self.rows is None else self.rows,
            other.columns if self.columns is None else self.columns,
            lambda row, column: of_numbers(self.at(row, column), other.at(row, column)),
        )

    return of_tables


@dataclass(eq=False)
class Table:
    """A tensor of rows x columns, whose sizes may be symbols: `at(row, column)` is an entry."""

    rows: Any
    columns: Any
    at: Callable[[Any, Any], Any]

    __add__ = entrywise(operator.add)
    __sub__ = entrywise(operator.sub)
    __le__ = entrywise(operator.le)
    __lt__ = entrywise(operator.lt)
    __ge__ = entrywise(operator.ge)
    __gt__ = entrywise(operator.gt)
    __eq__ = entrywise(operator.eq)
    __ne__ = entrywise(operator.ne)
    __and__ = entrywise(And)
    __or__ = entrywise(Or)

    def __getitem__(self, index: tuple) -> "Table":
        """[None, :] is a row, as `arange` makes it; [:, None] a column."""
        if index[0] is None:
            return self
        return Table(self.columns, self.rows, lambda row, column: self.at(column, row))

    def __invert__(self) -> "Table":
        return Table(self.rows, self.columns, lambda row, column: Not(self.at(row, column)))

    def triu(self, diagonal: Any) -> "Table":
        """Only from this diagonal on."""
        return Table(
            self.rows,
            self.columns,
            lambda row, column: And(self.at(row, column), column - row >= diagonal),
        )

    def shows(self, row: Any, key: Any) -> BoolRef:
        """Whether this row may see this key."""
        inside = 0 <= row, row < self.rows, 0 <= key, key < self.columns
        return And(*inside, self.at(row, key))


def arange(first: Any, end: Any = None, device: Any = None) -> Table:
    if end is None:
        end = first
        first = 0
    return Table(None, end - first, lambda row, column: first + column)


# What changes neither which keys are seen, nor a number.
VIEWS = {
    "device", "dtype", "expand", "flatten", "permute", "repeat_interleave", "reshape", "softmax",
    "to", "transpose", "unflatten", "view",
}  # fmt: skip


class Viewed:
    """A stand-in for a tensor whose views are itself."""

    def __getattr__(self, name: str) -> Callable:
        if name not in VIEWS:
            raise AttributeError(name)
        return lambda *_, **__: self


@dataclass(eq=False)
class Reader(Viewed):
    """Any tensor inside attention. It remembers what it read of the cache, and which mask."""

    shape: tuple = ()
    keys: tuple = ()  # of the cache: slot, first, end
    values: tuple = ()
    mask: Table | None = None  # rows x keys; None: all may be seen
    causal: Any = False

    def __getitem__(self, index: Any) -> "Reader":
        if isinstance(index, tuple) and len(index) == 3:  # [heads, slot, first:end]
            _, slot, places = index
            return Reader(self.shape, (slot, places.start or 0, places.stop))
        return self

    def __setitem__(self, index: Any, value: "Reader") -> None:
        self.keys = value.keys
        self.values = value.values
        self.mask = value.mask
        self.causal = value.causal

    def __truediv__(self, number: float) -> "Reader":
        return self

    def __matmul__(self, other: "Reader") -> "Reader":
        """A query by keys, or weights by values."""
        if not self.keys:
            return Reader((), other.keys)
        return Reader((), self.keys, other.keys, self.mask)

    def masked_fill(self, hidden: Table, value: float) -> "Reader":
        return Reader((), self.keys, mask=~hidden)

    def shows(self, row: Any, key: Any) -> BoolRef:
        """Whether the result of this row depends on this key of the cache."""
        _, first, end = self.keys
        masked = self.mask is None or self.mask.shows(row, key - first)
        return And(first <= key, key < end, masked, Implies(self.causal, key - first <= row))


def fused(query: Reader, key: Reader, value: Reader, attn_mask=None, is_causal=False) -> Reader:
    """PyTorch's fused attention. is_causal: row i sees the keys up to the i-th that were read."""
    return Reader((), key.keys, value.keys, attn_mask, is_causal)


TORCH = SimpleNamespace(
    arange=arange, empty_like=lambda like: Reader(), promote_types=lambda *_: None, float32=None
)
FUSED = SimpleNamespace(scaled_dot_product_attention=fused)


# ------------------------------------------------------------------------------------- the claims

NAMES = [
    "prompt", "prefilled", "room", "slot", "window", "start", "length", "row", "key", "token",
    "times",
]  # fmt: skip
whole, done, room, slot, window, start, length, row, key, token, times = Ints(NAMES)
A_ROW = start >= 0, 0 <= row, row < length  # of a chunk


def mask_is_a_part(mask: Callable) -> Counterexample:
    """Row i of any chunk's mask is row start + i of the lower triangle.

    With start = 0, it is a whole prompt. So chunks of any lengths have the full prefill's rows.
    """
    right = And(0 <= key, key <= start + row)
    return counterexample(
        paths(lambda: run(mask, start, length, torch=TORCH), *A_ROW),
        lambda chunk: chunk.shows(row, key) == right,
    )


def attention_sees(
    attend: Callable, attention: ModuleType, *windows: ArithRef, least: int = 0
) -> Counterexample:
    """A row sees itself, all keys before it, and no other: in a window, only the last ones.

    least: the smallest window that `attend` takes; 0 stands for none.
    """

    def code() -> Reader:
        q = Reader((1, length, 4, 64))
        keys = Reader((2,))
        return run(
            attend,
            q,
            keys,
            keys,
            [slot],
            [start + length],
            *windows,
            files=[attention],
            torch=TORCH,
            F=FUSED,
            chunk_mask=inspect.unwrap(attention.chunk_mask),
        )

    def claim(seen: Reader) -> BoolRef:
        near = [Implies(each > 0, key > start + row - each) for each in windows]
        right = And(0 <= key, key <= start + row, *near)
        own = And(seen.keys[0] == slot, *map(operator.eq, seen.keys, seen.values))
        return And(own, seen.shows(row, key) == right)

    given = [*A_ROW, *(each >= least for each in windows)]
    return counterexample(paths(code, *given), claim)


def in_prefill(scheduler: ModuleType) -> tuple[Any, Request]:
    """A policy with one request, of any length, of which any part has run."""
    request = Request(0, range(1), max_tokens=2)
    request.prefilled = done
    request.prefill_length = whole
    policy = scheduler.Scheduler(max_batch_size=1)
    policy.running.append(request)
    return policy, request


A_PREFILL = 0 <= done, done < whole


def next_chunk_is_legal(scheduler: ModuleType, check_batch: Callable) -> Counterexample:
    """`check_batch` lets each chunk of `next_chunk` pass; it fills the room, or ends the prompt."""

    def code() -> Chunk:
        policy, request = in_prefill(scheduler)
        chunk = scheduler.next_chunk(request, room)
        check_batch(policy, Batch([chunk], []))
        return chunk

    def claim(chunk: Chunk | UserError) -> Any:
        if isinstance(chunk, UserError):
            return False
        return chunk.length == If(room <= whole - done, room, whole - done)

    return counterexample(paths(code, *A_PREFILL, room >= 1), claim)


def each_token_runs_once(scheduler: ModuleType, check_batch: Callable) -> Counterexample:
    """Whatever chunk a policy makes, if `check_batch` lets it pass: an induction over iterations.

    token: any one of the prompt; times: how often it has run. If each token before `prefilled` has
    run once, and no other, then this holds after the batch, too, and `prefilled` has grown. The
    first output token comes exactly when the prompt ends.
    """

    def code() -> tuple[Request, list[Request]]:
        policy, request = in_prefill(scheduler)
        batch = Batch([Chunk(request, start, length)], [])
        check_batch(policy, batch)
        sampled = batch.sampled
        policy.update(batch, [0] * len(sampled))
        return request, sampled

    def once(times: Any, end: Any) -> BoolRef:
        return times == If(And(0 <= token, token < end), 1, 0)

    def claim(outcome: Any) -> Any:
        if isinstance(outcome, UserError):  # it is refused, and nothing runs
            return True
        request, sampled = outcome
        end = request.prefilled
        after = times + If(And(start <= token, token < start + length), 1, 0)
        ends = (end == whole) == bool(sampled)
        return And(Implies(once(times, done), once(after, end)), done < end, end <= whole, ends)

    return counterexample(paths(code, *A_PREFILL, 0 <= token, token < whole), claim)


@dataclass(eq=False)
class Value(Viewed):
    """One entry of a tensor, in exact arithmetic."""

    of: Any
    shape: tuple = (1, 1, 1)  # one beam, one head, one channel

    def __mul__(self, other: "Value") -> "Value":
        return Value(self.of * other.of)

    def __radd__(self, other: float) -> "Value":
        """A sum begins with 0."""
        return Value(other + self.of)

    def __add__(self, other: "Value") -> "Value":
        return Value(self.of + other.of)

    def __truediv__(self, other: Any) -> "Value":
        return Value(self.of / other.of) if isinstance(other, Value) else self


@dataclass(eq=False)
class Score:
    """A score, or a difference of scores: what we know of it is its exponential."""

    exponential: Any

    def __sub__(self, other: "Score") -> "Score":
        return Score(self.exponential / other.exponential)

    def exp(self) -> Value:
        return Value(self.exponential)


@dataclass(eq=False)
class Segment:
    """Any number of keys, or their values."""

    name: str
    shape: tuple = (1,)  # one KV head

    def __getitem__(self, index: Any) -> "Segment":
        return self

    def to(self, dtype: Any) -> "Segment":
        return self


@dataclass(eq=False)
class Scores:
    """Those of a segment's keys, all less the same score."""

    name: str
    less: Score | None = None
    shape: tuple = (1,)  # there are keys; a part without any is left out

    def amax(self, **_: Any) -> Score:
        return Score(Real(f"exp_of_most_{self.name}"))

    def __sub__(self, other: Score) -> "Scores":
        return Scores(self.name, other)

    def exp(self) -> "Weights":
        return Weights(self.name, self.less.exponential if self.less else 1)


@dataclass(eq=False)
class Weights:
    """Of a segment's keys: exp(score) / scale each."""

    name: str
    scale: Any

    def sum(self, **_: Any) -> Value:
        return Value(Real(f"sum_{self.name}") / self.scale)


def einsum(how: str, left: Value | Weights, right: Segment) -> Scores | Value:
    """A query by keys gives their scores; weights by values, the weighted sum of these."""
    if isinstance(left, Weights):
        return Value(Real(f"values_{right.name}") / left.scale)
    return Scores(right.name)


def maximum(one: Score, other: Score) -> Score:
    return one if one.exponential >= other.exponential else other


def two_parts_are_the_whole(two_segments: Callable) -> Counterexample:
    """Softmax over two parts of the keys, put together, is softmax over all of them."""
    sums = Reals("sum_prompt sum_response")
    values = Reals("values_prompt values_response")
    largest = Reals("exp_of_most_prompt exp_of_most_response")
    prompt = Segment("prompt")
    response = Segment("response")
    torch = SimpleNamespace(
        **vars(TORCH) | {"arange": lambda *_, **__: None}, einsum=einsum, maximum=maximum
    )

    def code() -> Value:
        table = SimpleNamespace(shape=(1, 1))
        parts = prompt, prompt, response, response
        return run(two_segments, Value(Real("query")), *parts, table, torch=torch)

    positive = [each > 0 for each in (*sums, *largest)]
    return counterexample(
        paths(code, *positive), lambda y: y.of * (sums[0] + sums[1]) == values[0] + values[1]
    )


def claims(
    attention: ModuleType = attention,
    scheduler: ModuleType = scheduler,
    loop: ModuleType = loop,
    beams: ModuleType = beams,
    variants: ModuleType = variants,
) -> Iterator[tuple[str, Counterexample]]:
    """What is proved of these files, and None, or what refutes it."""
    yield (
        "rows of a chunk's mask are rows of the lower triangle, the full prefill's mask",
        mask_is_a_part(attention.chunk_mask),
    )
    yield (
        "`reference` of attention.py shows a row itself and all before it",
        attention_sees(attention.reference, attention),
    )
    yield (
        "`sdpa` of attention.py shows a row itself and all before it, on all its branches",
        attention_sees(attention.sdpa, attention),
    )
    yield (
        "`near` (layers with a window) shows the last keys alone, as many as the window",
        attention_sees(variants.near, PLAIN_FILE, window, least=1),
    )
    yield (
        "`next_chunk` fills the room or ends the prompt, and `check_batch` lets it pass",
        next_chunk_is_legal(scheduler, loop.check_batch),
    )
    yield (
        "any policy: what `check_batch` lets pass runs each token once and in order",
        each_token_runs_once(scheduler, loop.check_batch),
    )
    yield (
        "two parts of a softmax, merged by `two_segments` of more/beam/, are the whole",
        two_parts_are_the_whole(beams.two_segments),
    )


def shown(numbers: dict[str, str]) -> str:
    return ", ".join(f"{name} = {number}" for name, number in numbers.items())


def prove() -> None:
    """Prints each claim, and ends with status 1 and the counterexamples if one is false."""
    refuted = []
    began = time.perf_counter()
    print(
        "To prove, for all prompts, chunks and windows: a row of a chunk sees the same keys as in"
    )
    print("the full prefill, and each token runs once. z3 looks for numbers that refute it.")
    for claim, found in claims():
        seconds = time.perf_counter() - began
        print(f"{'FAILS' if found else 'proved':6}  {seconds:5.2f} s  {claim}")
        if found:
            refuted.append(f"not so, {claim}: {shown(found)}")
        began = time.perf_counter()
    if refuted:
        raise SystemExit("\n".join(refuted))
    print(
        "So, layer by layer, a chunked prefill is the full prefill. Not proved: that floats round,"
    )
    print("and the fast code of more/fast/. Tests compare these.")
