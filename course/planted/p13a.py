"""The keys of earlier chunks are hidden."""

import torch
from torch import Tensor

exercise = "3"
caught_by = "M1"
message = "earlier chunks are"


def chunk_mask(start: int, length: int) -> Tensor:
    mask = torch.zeros(length, start + length, dtype=torch.bool)
    mask[:, start:] = torch.ones(length, length, dtype=torch.bool).tril()
    return mask
