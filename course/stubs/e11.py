"""E11, lesson 9: the window of work stealing. About 5 lines.

In TD-Pipe's decode phase, requests end, and micro-batches become uneven. Then the longest one makes
all others wait. So a micro-batch that comes back gives some of its requests away, or takes some.
"""


def share_out(own: list, withheld: list, total: int, groups: int, most: int) -> tuple[list, list]:
    """What a micro-batch runs next, and who is withheld for the next one (TD-Pipe, Sec 3.4).

    own: its requests that have not ended. withheld: requests in no micro-batch, the oldest first.
    total: all requests in memory. groups: the number of micro-batches. most: B, of one of them.

    It takes the average (total over groups, rounded up), and never more than B: its own requests
    first, in order, then withheld ones. Its own surplus goes to the end of those withheld.
    """
    raise NotImplementedError
