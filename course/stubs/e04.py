"""E4, lesson 3: attention over the cache, every step written out. About 9 lines.

You may use `chunk_mask(start, length)` of attention.py: your E3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention import chunk_mask


def attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Sequence[int], contexts: Sequence[int]
) -> Tensor:
    """Attention of n requests with Tq new rows each: a chunk (n = 1) or decodes (Tq = 1).

    q         (n, Tq, n_head, head_dim)
    keys      (n_kv_head, slots, length, head_dim)   the whole cache of a layer; values: the same
    slots     n slot numbers: the place of each request in the cache
    contexts  n token counts, the new rows included: row i of a request is token context - Tq + i

    Returns (n, Tq, n_head, head_dim). With n_kv_head < n_head, query head h reads key head
    h // (n_head / n_kv_head). The scale is 1 / sqrt(head_dim). K and V of the new rows are in the
    cache already. What lies outside a request's own tokens is old, or NaN: do not read it.
    """
    raise NotImplementedError
