"""What every file needs of a user's values: one error, tables by name, ranges of numbers."""

import difflib
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MOST = 10**9  # of whole numbers: far more than any model has of anything
MOST_SEED = 2**63 - 1
WHY_BROKEN = "the model's logits are NaN or infinite: look at --check, and at other dtypes"
LONGEST_SHOWN = 100  # letters of a value that an error repeats
LONGEST_WORD = 60  # letters of a word of the command line that an error repeats


class UserError(ValueError):
    """A mistake that the user can mend: shown as one line, without a traceback."""


def name_of(value: str) -> str:
    """The text itself. Of a value that is no text: how an error message shows it."""
    return value if isinstance(value, str) else shown(value)


def shown(value: object, as_text: Callable[[object], str] = repr) -> str:
    """A value as an error shows it: cut short, whatever it is."""
    try:
        text = as_text(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of too many digits to be shown"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def by_name(entries: Iterable) -> dict:
    """A table of entries that have a `name`."""
    return {entry.name: entry for entry in entries}


def lookup(table: dict, key: str, kind: str) -> Any:
    """`table[key]`, or a UserError that names the value and what is allowed."""
    if not isinstance(key, str) or key not in table:
        near = did_you_mean(key, table)
        raise UserError(f"unknown {kind} {shown(key)}: choose from {', '.join(table)}{near}")
    return table[key]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of an error: "; did you mean 'a100-80gb'?" for "a100". "" if no name is near."""
    if not isinstance(word, str) or not 0 < len(word) < 100:
        return ""
    names = list(names)
    word = word.lower()
    near = [name for name in names if name.lower().startswith(word)]
    near = near or difflib.get_close_matches(word, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; its text says so. As a type of argparse, it reads them.

    whole: whole numbers alone. above: `least` itself is too small. noun: what a number is called.
    """

    least: float
    most: float
    whole: bool = True
    above: bool = False
    noun: str = ""

    def __str__(self) -> str:
        noun = self.noun or ("whole number" if self.whole else "number")
        least, most = (str(end) if self.whole else f"{end:g}" for end in (self.least, self.most))
        return f"a {noun} {f'above {least}, at most' if self.above else f'from {least} to'} {most}"

    def __contains__(self, value: object) -> bool:
        """NaN and True do not count. 1.0 is not a whole number."""
        known = type(value) is int or (isinstance(value, float) and not self.whole)
        inside = known and self.least <= value <= self.most
        return inside and not (self.above and value == self.least)

    def check(self, name: str, value: float) -> None:
        """A UserError unless `value` is in this range. name: what the error calls it."""
        if value not in self:
            raise UserError(f"{name} is {shown(value)}; it must be {self}")

    def read(self, word: str) -> float | None:
        """The number that a word says; None if it says none of this range."""
        if self.whole and not word.isdecimal():  # int() also takes "1_000" and " 1"
            return None
        try:
            value = int(word) if self.whole else float(word)
        except ValueError:  # int() refuses 5,000 digits, too
            return None
        return value if value in self else None

    def __call__(self, word: str) -> float:
        """The number that a word of the command line says."""
        value = self.read(word)
        if value is None:
            raise ArgumentTypeError(f"{word[:LONGEST_WORD]!r} is not {self}")
        return value


range_of = lru_cache(Range)  # checks that run often make none anew

# What a user may ask of the sampling: of the engine, the command line and the server alike.
SEED = Range(0, MOST_SEED)
TEMPERATURE = Range(0, 1e6, whole=False)  # all tokens are equally likely far below the highest
TOP_P = Range(1e-9, 1, whole=False)  # the likeliest token alone reaches the smallest
LENGTH_PENALTY = Range(-10, 10, whole=False)


def check_whole(name: str, value: int, least: int = 1, most: int = MOST) -> None:
    """A UserError unless `value` is a whole number from `least` to `most`. True is not one."""
    range_of(least, most).check(name, value)


def check_flag(name: str, value: bool) -> None:
    """A UserError unless `value` is True or False."""
    if type(value) is not bool:
        raise UserError(f"{name} is {shown(value)}; it must be True or False")


def check_number(name: str, value: float, least: float, most: float, what: str = "number") -> None:
    """A UserError unless `value` is a number from `least` to `most`. NaN and True do not count.

    what: the noun of the message, such as "number of seconds".
    """
    range_of(least, most, whole=False, noun=what).check(name, value)


def check_tags(name: str, tags: dict[str, str]) -> None:
    """A UserError unless `tags` is a dict of texts."""
    texts = [*tags, *tags.values()] if isinstance(tags, dict) else [tags]
    if not all(isinstance(text, str) for text in texts):
        allowed = "a dict of texts, such as {'priority': '1'}"
        raise UserError(f"{name} is {shown(tags)}; it must be {allowed}")


def tag_number(owner: Any, tag: str, allowed: Range, usual: float = 0.0) -> float:
    """The number that a tag says, such as "12", "12.0" or "1e2"; `usual` if it is not there or "".

    owner: a Request or a Life. A UserError for anything else, such as "soon" or "nan".
    """
    word = owner.tags.get(tag, "")
    if not word:
        return usual
    value = allowed.read(word)
    if value is None:
        allowed.check(f"request {owner.request_id}: the tag {tag}", word)
    return value


def check_stop_ids(name: str, stop_ids: Iterable[int]) -> None:
    """A UserError unless `stop_ids` is a list, tuple or set of whole numbers from 0.

    Below 0 are marks that stand in place of a token, such as `batch.BROKEN`.
    """
    listed = isinstance(stop_ids, list | tuple | set | frozenset)
    if not listed or not all(type(token) is int and token >= 0 for token in stop_ids):
        allowed = "a list of whole numbers, such as [46], from 0"
        raise UserError(f"{name} is {shown(stop_ids)}; it must be {allowed}")
