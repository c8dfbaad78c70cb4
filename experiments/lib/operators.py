"""What PyTorch's profiler says a piece of code ran: operators by name and kind.

experiments/segment_operators.py counts those of one layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

LAYER = "the last layer"  # what the profiler shows it as
KINDS = ("products", "attention", "norms, element-wise", "copies", "views")
# Short names of operators. VIEWS touch no data, or not always: then what they call tells.
VIEWS = {
    "alias", "as_strided", "chunk", "contiguous", "detach", "dropout", "empty", "empty_like",
    "empty_strided", "expand", "flatten", "narrow", "new_empty", "permute", "promote_types",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose",
    "unbind", "unflatten", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
}  # fmt: skip
COPIES = {
    "cat", "clone", "contiguous", "copy_", "flatten", "gather", "index", "index_put_",
    "index_select", "repeat", "repeat_interleave", "reshape", "stack", "to",
}  # fmt: skip
ATTENTION = {"attend", "attend_beams", "bmm", "scaled_dot_product_attention", "softmax"}
PRODUCTS = {"addmm", "linear", "mm", "_linear_pointwise"}


class Operator(NamedTuple):
    name: str  # aten::cat
    kind: str  # one of KINDS
    calls: int  # operators that it calls, and those that they call


class Watched(NamedTuple):
    """In the order in which they ran."""

    every: list[Operator]
    layer: list[Operator]  # those inside the last event that is called LAYER


def short(name: str) -> str:
    return name.partition("::")[2]


def is_operator(event: Any) -> bool:
    return event.name.startswith(("aten::", "mkldnn::", "native::"))


def described(event: Any) -> Operator:
    """Its kind follows from its name, and from the names of all that it calls."""
    below, waiting = [], [event]
    while waiting:
        below.append(waiting.pop())
        waiting += below[-1].cpu_children
    called = {short(each.name) for each in below}
    kind = "copies" if short(event.name) in COPIES else "norms, element-wise"
    if called & PRODUCTS:
        kind = "products"
    if called & ATTENTION:
        kind = "attention"
    if called <= VIEWS:
        kind = "views"
    return Operator(event.name, kind, sum(map(is_operator, below)) - 1)


def watch(run: Callable[[], object]) -> Watched:
    """The operators that `run` runs, without those that another operator calls."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from beam import native as of_beams
    from fast import native

    def function(name: str, *dtype: object) -> Callable[..., None]:
        return record_function(f"native::{name}")(unmarked(name, *dtype))

    unmarked, profiler = native.function, profile(activities=[ProfilerActivity.CPU])
    with (
        patch.object(native, "function", function),
        patch.object(of_beams, "function", function),
        profiler,
    ):
        run()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    last = [event for event in events if event.name == LAYER][-1:]
    found = Watched([], [])
    for event in filter(is_operator, events):
        above, caller = [], event
        while (caller := caller.cpu_parent) is not None:
            above.append(caller)
        if not any(map(is_operator, above)):
            found.every.append(described(event))
            if any(each in last for each in above):
                found.layer.append(found.every[-1])
    return found
