"""The search for a capacity, and percentiles. They need no package: the browser runs them, too."""

import math
from collections.abc import Callable, Sequence

from command.checks import UserError, check_number

FASTEST = 1e9  # requests per second: as good as all at once
# The search ends when a rate that is served and a rate that is not differ by less than this factor
# (2.5 %, as in the artefact of Sarathi-Serve).
PRECISION = 1.025


def percentile(values: Sequence[float], percent: float) -> float:
    """What `numpy.percentile` gives for them, to the last bit; 0 where there are no values.

    Between a value and an infinite one, it is infinite.
    """
    check_number("percent", percent, 0, 100)
    if len(values) == 0:
        return 0.0
    ordered = sorted(values)
    place = percent / 100 * (len(values) - 1)
    below = int(place)
    rest = place % 1
    low = ordered[below]
    high = ordered[min(below + 1, len(ordered) - 1)]
    if high == math.inf:
        return high if rest else low
    return low + (high - low) * rest if rest < 0.5 else high - (high - low) * (1 - rest)


class AlwaysServed(UserError):
    """All requests are served in time, even if all of them arrive at once."""


def largest_rate(
    served: Callable[[float], bool],
    precision: float = PRECISION,
    start: float = 1.0,
    factor: float = 2.0,
) -> float:
    """The largest rate that is served, in requests per second, within a factor of `precision`.

    start: the first rate. The search multiplies or divides it by `factor`, until one rate is served
    and one is not. Each further step is the square of the one before, up to 2. If `start` is good,
    a small factor needs fewer runs. All rates that it tries are powers of one number. So searches
    from several starts, and for several SLOs, try the same rates, and find the same answer.

    Returns 0 if not even 1/1000 of `start` is served. Raises UserError if every rate is served.
    """
    check_number("start", start, 1 / FASTEST, FASTEST, "number of requests per second")
    # steps from a rate to its double: halved again and again, they are those of a bisection
    octave = 2 ** math.ceil(math.log2(max(1.0, math.log(2) / math.log(precision))))
    first = round(octave * math.log2(start))
    far = 10 * octave

    def rate(place: int) -> float:
        return 2.0 ** (place / octave)

    low = high = first
    step = max(1, round(octave * math.log2(factor)))
    largest = max(step, octave)
    if served(rate(first)):
        while served(rate(high := high + step)):
            low = high
            step = min(2 * step, largest)
            if high > first + far:
                raise AlwaysServed(
                    "too few requests to find a capacity: the SLO is met even if all of them arrive"
                    " at once; give more or longer ones"
                )
    else:
        while not served(rate(low := low - step)):
            high = low
            step = min(2 * step, largest)
            if low < first - far:
                return 0.0
    while high - low > 1:
        middle = (low + high) // 2
        if served(rate(middle)):
            low = middle
        else:
            high = middle
    return rate(low)
