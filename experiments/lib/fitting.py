"""How constants of the cost model are fitted: a search, and the line to paste into costmodel.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from costmodel import EFFICIENCY, Efficiency

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


def log_loss(modelled: Mapping[object, float], measured: Mapping[object, float]) -> float:
    """Sum of squared log ratios, modelled over measured."""
    return sum(math.log(value / measured[name]) ** 2 for name, value in modelled.items())


def print_constants(gpu: str, software: str, efficiency: Efficiency) -> Efficiency:
    """Print the row to paste into costmodel.EFFICIENCY, and return its rounded constants.

    An overhead of 0 is the default, and left out.
    """
    values = {name: round(value, DIGITS[name]) for name, value in asdict(efficiency).items()}
    named = ", ".join(f"{name}={value}" for name, value in values.items() if value)
    print(f'    ("{gpu}", "{software}"): Efficiency({named}),\n')
    return Efficiency(**values)


def check_constants(gpu: str, software: str, fitted: Efficiency) -> None:
    """Raise SystemExit where costmodel.py does not hold these constants."""
    if fitted != EFFICIENCY[gpu, software]:
        raise SystemExit("costmodel.py holds other constants: paste the line above into EFFICIENCY")
