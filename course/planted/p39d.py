"""The newest of the withheld come along first."""

exercise = "11"
caught_by = "W4"
message = "the first comes along first"


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    size = min(most, -(-total // groups))
    keep = own[:size]
    more = size - len(keep)
    return keep + withheld[::-1][:more], withheld[::-1][more:] + own[size:]
