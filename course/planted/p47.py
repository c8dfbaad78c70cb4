"""The start-up is that of the earliest starts, whatever the given ones."""

exercise = "10"
caught_by = "B1"
message = "Before its first work a stage has start-up"


def starts(seconds: list[list[float]], micro_batches: int) -> list[list[float]]:
    free, found = [0.0] * len(seconds[0]), []
    for number, work in enumerate(seconds):
        back, row = number - micro_batches, []
        now = found[back][-1] + seconds[back][-1] if back >= 0 else 0.0
        for stage, length in enumerate(work):
            row.append(max(now, free[stage]))
            now = free[stage] = row[-1] + length
        found.append(row)
    return found


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    ends = [start + work for start, work in zip(starts[-1], seconds[-1], strict=True)]
    early = sum(sum(seconds[0][:stage]) for stage in range(len(ends)))
    late = sum(max(ends) - end for end in ends)
    whole = len(ends) * max(ends) - sum(map(sum, seconds))
    return {"start-up": early, "drain": late, "bubble": whole - early - late}
