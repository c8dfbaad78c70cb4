"""What every policy must keep: no request is forgotten, and a batch is checked before it runs."""

from batch import Batch
from scheduler import Scheduler


def has_work(scheduler: Scheduler) -> bool:
    """What the policy says. Raise a UserError if it denies work while requests wait or run."""
    if scheduler.has_work:
        return True
    if scheduler.waiting or scheduler.running:
        raise scheduler.broken("has_work is False, while requests wait or run")
    return False


def check_batch(scheduler: Scheduler, batch: Batch) -> None:
    """Raise a UserError, before the batch runs, if it breaks a rule of all policies."""
    chunks, decodes, broken = batch.chunks, batch.decodes, scheduler.broken
    members = {chunk.request for chunk in chunks}.union(decodes)
    if not members:
        raise broken("the batch is empty; return None where there is nothing to run")
    if len(members) < len(chunks) + len(decodes):
        raise broken("a request is in the batch twice")
    if not members.issubset(scheduler.running):
        stray = min(r.request_id for r in members.difference(scheduler.running))
        raise broken(
            f"request {stray} is in the batch but not running: take it in with `admit`, and call"
            " `decodes` first, because that may preempt"
        )
    if len(members) > scheduler.max_batch_size:
        raise broken(
            f"the batch exceeds B: {len(members)} requests, and {scheduler.max_batch_size} may run"
        )
    for chunk in chunks:
        request, end = chunk.request, chunk.start + chunk.length
        if not chunk.start == request.prefilled < end <= request.prefill_length:
            raise broken(
                f"request {request.request_id} has prefilled {request.prefilled} of"
                f" {request.prefill_length} tokens, and its chunk is {chunk.start} to {end - 1}:"
                " prompt tokens run exactly once and in order"
            )
    for request in decodes:
        if request.prefilled < request.prefill_length:
            raise broken(
                f"request {request.request_id} decodes, but has prefilled {request.prefilled} of"
                f" {request.prefill_length} tokens"
            )
    memory = scheduler.memory
    if memory.capacity is not None and not memory.holds(scheduler.next_tokens(decodes)):
        need = memory.taken + memory.flying + scheduler.next_tokens(decodes)
        raise broken(
            f"the cache overflows: {need} tokens, and it holds {memory.capacity}; `decodes`"
            " preempts until they fit"
        )
