"""The scale is right for heads of four channels alone."""

from collections.abc import Sequence

from torch import Tensor

from attention import reference

exercise = "4"
caught_by = "A1"
message = "the scale is"


def attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    return reference(q * (q.shape[-1] ** 0.5 / 2), keys, values, slots, contexts)
