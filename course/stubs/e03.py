"""E3, lesson 3: the mask of a chunk. About 3 lines."""

import torch
from torch import Tensor


def chunk_mask(start: int, length: int) -> Tensor:
    """Which keys the rows of a chunk may see (SARATHI, Fig 6).

    The chunk is prompt tokens start .. start + length - 1. The keys are those of all tokens up to
    the chunk's end: tokens 0 .. start + length - 1.

    Returns torch.bool (length, start + length); True: the row sees the key. A token sees itself
    and all tokens before it.
    """
    raise NotImplementedError
