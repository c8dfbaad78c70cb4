"""An iteration starts before its tokens are known."""

exercise = "10"
caught_by = "B2"
message = "needs the tokens of iteration"


def starts(seconds: list[list[float]], micro_batches: int) -> list[list[float]]:
    free, found = [0.0] * len(seconds[0]), []
    for work in seconds:
        row = []
        now = 0.0
        for stage, length in enumerate(work):
            row.append(max(now, free[stage]))
            now = free[stage] = row[-1] + length
        found.append(row)
    return found


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    ends = [start + work for start, work in zip(starts[-1], seconds[-1], strict=True)]
    early, late = sum(starts[0]), sum(max(ends) - end for end in ends)
    whole = len(ends) * max(ends) - sum(map(sum, seconds))
    return {"start-up": early, "drain": late, "bubble": whole - early - late}
