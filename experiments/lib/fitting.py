"""How constants of the cost model are fitted: a search, and the line to paste into constants.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields

from configs.constants import EFFICIENCY, Efficiency

# of the data sheet, or of the time that SMs are idle
SHARES = {name for name in vars(Efficiency(1, 1, 1, 1)) if name.endswith("memory")}
SHARES |= {"compute", "attention", "elementwise", "waves"}


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
                # no GPU beats its data sheet, and no cache is slower than the memory
                if (name in SHARES and values[name] > 1) or values["cache"] < 1:
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


def rounded(efficiency: Efficiency) -> Efficiency:
    """With four significant digits."""
    values = asdict(efficiency).items()
    return Efficiency(**{n: float(f"{v:.4g}") if type(v) is float else v for n, v in values})


def print_constants(gpu: str, software: str, efficiency: Efficiency) -> None:
    """Print the row to paste into constants.EFFICIENCY. Defaults are left out."""
    given = [
        f"{each.name}={value!r}"
        for each in fields(efficiency)
        if (value := getattr(efficiency, each.name)) != each.default
    ]
    print(f'    ("{gpu}", "{software}"): Efficiency({", ".join(given)}),\n')


def check_constants(gpu: str, software: str, fitted: Efficiency) -> None:
    """Raise SystemExit where constants.py does not hold these constants, with this source."""
    held = EFFICIENCY.get((gpu, software))
    if fitted != held or fitted.source != held.source:
        raise SystemExit(
            "configs/constants.py holds other constants: paste the line above into EFFICIENCY"
        )
