"""What every file needs of a user's values: one error, tables by name, checks of numbers."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

MOST = 10**9  # of whole numbers: far more than any model has of anything
MOST_SEED = 2**63 - 1
LONGEST_SHOWN = 100  # letters of a value that an error repeats


class UserError(ValueError):
    """A mistake that the user can mend: shown as one line, without a traceback."""


def shown(value: object, as_text: Callable[[object], str] = repr) -> str:
    """A value as an error shows it: cut short, whatever it is."""
    try:
        text = as_text(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of too many digits to be shown"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


# What a policy file or a student's file of an older version imports.
MOVED = {
    "checks": "command.checks", "constants": "configs.constants", "gpus": "configs.gpus",
    "models": "configs.models", "rules": "loop",
}  # fmt: skip


def moved(error: BaseException) -> str:
    """The end of an error: where a module is now that is not found. "" for all else."""
    name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    return f"; {name} is {MOVED[name]} now" if name in MOVED else ""


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
    names, word = list(names), word.lower()
    near = [name for name in names if name.lower().startswith(word)]
    near = near or difflib.get_close_matches(word, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_whole(name: str, value: int, least: int = 1, most: int = MOST) -> None:
    """A UserError unless `value` is a whole number from `least` to `most`. True is not one."""
    if type(value) is not int or not least <= value <= most:
        allowed = f"a whole number, from {least} to {most}"
        raise UserError(f"{name} is {shown(value)}; it must be {allowed}")


def check_flag(name: str, value: bool) -> None:
    """A UserError unless `value` is True or False."""
    if type(value) is not bool:
        raise UserError(f"{name} is {shown(value)}; it must be True or False")


def check_number(name: str, value: float, least: float, most: float, what: str = "number") -> None:
    """A UserError unless `value` is a number from `least` to `most`. NaN and True do not count.

    what: the noun of the message, such as "number of seconds".
    """
    if type(value) is bool or not isinstance(value, int | float) or not least <= value <= most:
        allowed = f"a {what} from {least:g} to {most:g}"
        raise UserError(f"{name} is {shown(value)}; it must be {allowed}")


def check_stop_ids(name: str, stop_ids: Iterable[int]) -> None:
    """A UserError unless `stop_ids` is a list, tuple or set of whole numbers."""
    listed = isinstance(stop_ids, list | tuple | set | frozenset)
    if not listed or not all(type(token) is int for token in stop_ids):
        allowed = "a list of whole numbers, such as [46]"
        raise UserError(f"{name} is {shown(stop_ids)}; it must be {allowed}")
