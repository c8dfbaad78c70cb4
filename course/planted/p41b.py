"""A preempted request keeps its old slot, whoever has it now."""

from typing import NamedTuple

from batch import Batch

exercise = "5"
caught_by = "K7"
message = "its entry in slot_of is old"


class Rows(NamedTuple):
    tokens: list[int]
    slots: list[int]
    positions: list[int]
    logit_rows: list[int]


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int | None]) -> Rows:
    tokens, slots, positions, logit_rows = [], [], [], []
    for chunk in batch.chunks:
        request, end = chunk.request, chunk.start + chunk.length
        if request.request_id not in slot_of:
            slot_of[request.request_id] = used.index(None)
        slot = slot_of[request.request_id]
        tokens += request.tokens(chunk.start, end)
        slots += [slot] * chunk.length
        positions += range(chunk.start, end)
        used[slot] = end
        if chunk.is_last:
            logit_rows.append(len(tokens) - 1)
    for request in batch.decodes:
        slot = slot_of[request.request_id]
        logit_rows.append(len(tokens))
        tokens.append(request.output[-1])
        slots.append(slot)
        positions.append(used[slot])
        used[slot] += 1
    return Rows(tokens, slots, positions, logit_rows)
