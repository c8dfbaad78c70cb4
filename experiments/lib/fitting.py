"""How constants of the cost model are fitted: a search, and the line to paste into costmodel.py."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

from costmodel import Efficiency

# decimals of the printed constants; the overhead is in seconds
DIGITS = {"compute": 4, "memory": 4, "attention": 4, "p": 4, "overhead": 7}


def compass_search(
    loss: Callable[[Efficiency], float],
    start: Efficiency,
    names: Sequence[str],
    least_step: float = 1e-6,
) -> Efficiency:
    """The constants with the least loss: try each a step up and a step down, and keep what helps.

    names: of the constants that may move. The step, a share of the constant, halves when nothing
    helps, down to `least_step`.
    """
    best, least, step = start, loss(start), 0.1
    while step > least_step:
        improved = False
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                values = asdict(best)
                values[name] *= factor
                if name != "p" and values[name] > 1:  # no GPU beats its data sheet
                    continue
                trial = Efficiency(**values)
                if (error := loss(trial)) < least:
                    best, least, improved = trial, error, True
        if not improved:
            step /= 2
    return best


def rounded(efficiency: Efficiency) -> Efficiency:
    """As they are printed, and as costmodel.py holds them."""
    values = asdict(efficiency)
    return Efficiency(**{name: round(values[name], digits) for name, digits in DIGITS.items()})


def line_to_paste(gpu: str, software: str, efficiency: Efficiency) -> str:
    """The row of costmodel.EFFICIENCY. An overhead of 0 is the default, and left out."""
    named = ", ".join(f"{name}={value}" for name, value in asdict(efficiency).items() if value)
    return f'    ("{gpu}", "{software}"): Efficiency({named}),'
