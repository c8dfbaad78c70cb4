"""A micro-batch gives nobody away."""

exercise = "11"
caught_by = "W2"
message = "Who has more gives some away"


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    more = max(0, min(most, -(-total // groups)) - len(own))
    return own + withheld[:more], withheld[more:]
