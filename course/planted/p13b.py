"""The mask has columns for the chunk alone."""

import torch
from torch import Tensor

exercise = "3"
caught_by = "M1"
message = "Keys of earlier chunks"


def chunk_mask(start: int, length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()
