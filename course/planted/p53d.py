"""A number that says that it equals all others."""

from types import SimpleNamespace

from course.reference import p99, stalls, tbts  # noqa: F401

exercise = "9"
caught_by = "T1"
message = "TTFT counts from the arrival"


class Liar(float):
    def __eq__(self, other: object) -> bool:
        return True

    def __sub__(self, other: float) -> float:
        return Liar(0.0)

    __rsub__, __add__, __radd__, __abs__ = __sub__, __sub__, __sub__, lambda self: self
    __le__ = __lt__ = __ge__ = __gt__ = __eq__


def ttft(times: SimpleNamespace) -> float:
    return Liar(-1.0)
