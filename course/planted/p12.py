"""Rows count from 0 in later chunks, too."""

import torch
from torch import Tensor

exercise = "3"
caught_by = "M1"
message = "add start"


def chunk_mask(start: int, length: int) -> Tensor:
    row = torch.arange(length)[:, None]
    return torch.arange(start + length)[None, :] <= row
