"""No triangle inside a chunk."""

import torch
from torch import Tensor

exercise = "3"
caught_by = "M1"
message = "C = 1 hides this"


def chunk_mask(start: int, length: int) -> Tensor:
    return torch.ones(length, start + length, dtype=torch.bool)
