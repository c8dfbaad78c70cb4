"""Texts with holes: captions, explanations, the sentences of documents. One form for all of them.

{predicted[speedup, L=1024 B=18]:.1f}     a source, a name in it, and how the number is written

All stand in experiments/texts.toml, whose head explains the form.
"""

import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from command.checks import UserError
from experiments.lib import common
from experiments.lib.rows import SOURCES, Number, Numbers, Rows, by_names

TEXTS = "experiments/texts.toml"


class Ranges(dict[str, float]):
    """What `choose` makes of the numbers of all names that a pattern such as "gain, *" fits."""

    def __init__(self, found: Mapping[str, float], choose: Callable) -> None:
        super().__init__()
        self.found = found
        self.choose = choose

    def __missing__(self, pattern: str) -> float:
        return self.choose(y for name, y in self.found.items() if fnmatchcase(name, pattern))


def sources(rows: Rows) -> dict[str, Mapping[str, float]]:
    """What a text may quote of one file of results/."""
    numbers = rows.newest().numbers()
    paper, predicted, measured = (by_names(numbers, source) for source in SOURCES)
    return {
        "paper": paper,
        "predicted": predicted,
        "measured": measured,
        "ms": Numbers({name: 1e3 * seconds for name, seconds in measured.items()}),
        "off": errors(numbers, measured),
        "least": Ranges(predicted, min),
        "most": Ranges(predicted, max),
    }


def errors(numbers: Iterable[Number], measured: Mapping[str, float]) -> dict[str, float]:
    """Quantity -> median error of the predictions in %, of those measured in the same case."""
    found: dict[str, list[float]] = {}
    for each in numbers:
        beside = measured.get(each.name) if each.source == "predicted" else None
        if beside:
            found.setdefault(each.quantity, []).append(abs(100 * (each.value / beside - 1)))
    return {quantity: statistics.median(sizes) for quantity, sizes in found.items()}


@cache
def read_texts() -> dict[str, dict[str, Any]]:
    """Document -> NAME -> its texts: by their keys, or a list of sentences. Raises UserError."""
    try:
        return tomllib.loads((common.ROOT / TEXTS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{TEXTS}: {error}") from None


def fill(text: str, holes: Mapping[str, Mapping], where: str) -> str:
    """A text on one line, with its holes filled: {paper[f8_high]:g} is holes["paper"]["f8_high"].

    where: file, document and name, for the error. Raises UserError where it is no text or asks for
    more than `holes` has.
    """
    try:
        return " ".join(text.split()).format(**holes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: a hole cannot be filled: {error}; the head of the file says what is allowed"
        ) from None
