"""A table of all masks, up to 64 tokens."""

import torch
from torch import Tensor

exercise = "3"
caught_by = "M1"
message = "shape"

ALL = torch.ones(64, 64, dtype=torch.bool).tril()


def chunk_mask(start: int, length: int) -> Tensor:
    return ALL[start : start + length, : start + length]
