"""E10, lesson 8: bubbles of a pipeline. About 12 lines: two functions.

Iteration i belongs to micro-batch i % micro_batches. seconds[i][s]: how long it takes on stage s.
"""


def starts(seconds: list[list[float]], micro_batches: int) -> list[list[float]]:
    """When each iteration starts on each stage, as early as possible; the first at 0.0.

    A stage runs the iterations in order, one at a time. An iteration goes through the stages in
    order. It may begin when the tokens of its micro-batch's iteration before are known.
    """
    raise NotImplementedError


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    """Seconds that all stages together are idle, by cause.

    starts: as above, but perhaps later than the earliest.
    "start-up": before a stage's first work. "drain": from its last work to the end of all work.
    "bubble": all between.
    """
    raise NotImplementedError
