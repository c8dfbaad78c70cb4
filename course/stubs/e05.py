"""E5, lesson 4: a hybrid batch as rows. About 15 lines."""

from typing import NamedTuple

from batch import Batch


class Rows(NamedTuple):
    """One iteration, one entry for each row (T of them): first all chunks, then all decodes."""

    tokens: list[int]  # what is fed
    slots: list[int]  # the cache slot of each row
    positions: list[int]  # the place of each row in its request
    logit_rows: list[int]  # the rows that a token is sampled from, in this order


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int | None]) -> Rows:
    """Lay a batch out as rows, and take its places in the cache.

    batch.chunks: each has request, start, length, is_last; batch.decodes: requests.
    request.tokens(start, end) gives tokens of what is prefilled: of its prompt, and after a
    preemption of its output, too. request.output is what came out so far.

    slot_of: request id -> slot. used: tokens in each slot, None where it is free. Update both: the
    first chunk of a request (start 0) takes the lowest free slot, and used[slot] grows with each
    token that is stored. Someone else frees the slot when the request ends or is preempted. A
    preempted request starts again at 0; slot_of may still hold its old slot.

    A decode feeds the newest output token. Its position is the number of tokens in its slot.
    """
    raise NotImplementedError
