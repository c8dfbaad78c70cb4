"""It takes the requests out of the list that it was given."""

exercise = "11"
caught_by = "answer"
message = "changes its arguments"


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    size = min(most, -(-total // groups))
    takes = own[:size]
    while withheld and len(takes) < size:
        takes.append(withheld.pop(0))
    return takes, withheld + own[size:]
