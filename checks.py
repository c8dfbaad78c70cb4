"""What every file needs of a user's values: one error, tables by name, checks of numbers."""

import difflib
from collections.abc import Iterable
from typing import Any

MOST = 10**9  # of whole numbers: far more than any model has of anything


class UserError(ValueError):
    """A mistake that the user can mend: shown as one line, without a traceback."""


def by_name(entries: Iterable) -> dict:
    """A table of entries that have a `name`."""
    return {entry.name: entry for entry in entries}


def lookup(table: dict, key: str, kind: str) -> Any:
    """`table[key]`, or a UserError that names the value and what is allowed."""
    if not isinstance(key, str) or key not in table:
        near = did_you_mean(key, table)
        raise UserError(f"unknown {kind} {key!r}: choose from {', '.join(table)}{near}")
    return table[key]


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of an error: "; did you mean 'a100-80gb'?" for "a100". "" if no name is near."""
    if not isinstance(word, str) or not 0 < len(word) < 100:
        return ""
    names, word = list(names), word.lower()
    near = [name for name in names if name.lower().startswith(word)]
    near = near or difflib.get_close_matches(word, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_whole(name: str, value: int, least: int = 1, most: int | None = None) -> None:
    """A UserError unless `value` is a whole number from `least` to `most`. True is not one."""
    if type(value) is not int or value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"{name} is {value!r}; it must be a whole number, {allowed}")


def check_flag(name: str, value: bool) -> None:
    """A UserError unless `value` is True or False."""
    if type(value) is not bool:
        raise UserError(f"{name} is {value!r}; it must be True or False")


def check_number(name: str, value: float, least: float, most: float, what: str = "number") -> None:
    """A UserError unless `value` is a number from `least` to `most`. NaN and True do not count.

    what: the noun of the message, such as "number of seconds".
    """
    if type(value) is bool or not isinstance(value, int | float) or not least <= value <= most:
        raise UserError(f"{name} is {value!r}; it must be a {what} from {least:g} to {most:g}")
