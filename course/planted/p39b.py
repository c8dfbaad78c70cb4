"""The average is rounded down."""

exercise = "11"
caught_by = "W3"
message = "Round up"


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    size = min(most, total // groups)
    keep = own[:size]
    more = size - len(keep)
    return keep + withheld[:more], withheld[more:] + own[size:]
