"""NaN for the idle seconds of each cause."""

from course import reference

exercise = "10"
caught_by = "answer"
message = "NaN or infinity"
starts = reference.starts


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    return dict.fromkeys(("start-up", "drain", "bubble"), float("nan"))
