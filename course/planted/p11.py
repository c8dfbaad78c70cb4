"""A token does not see itself: column < row."""

import torch
from torch import Tensor

exercise = "3"
caught_by = "M1"
message = "softmax of -inf is NaN"


def chunk_mask(start: int, length: int) -> Tensor:
    row = torch.arange(start, start + length)[:, None]
    return torch.arange(start + length)[None, :] < row
