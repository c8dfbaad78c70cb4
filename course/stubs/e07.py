"""E7, lesson 5: the cost of a batch. About 14 lines.

The shares say how much of its data sheet an A6000 reaches. They were fitted to SARATHI's Table 2
and Fig 7 under this short law. costmodel.py prices more: waves, masks, hybrid batches.
"""

from batch import Batch
from configs import GPU, ModelConfig

COMPUTE, MEMORY, ATTENTION, P = 0.7739, 0.7483, 0.557, 2.1587


def roofline(flops: float, size: float, gpu: GPU, share: float) -> float:
    """Seconds of one operator: compute and memory overlap, though not perfectly. It is given.

    flops: that it computes, at `share` of the peak. size: bytes that it moves.
    """
    compute, memory = flops / (gpu.peak * share), size / (gpu.bandwidth * MEMORY)
    return (compute**P + memory**P) ** (1 / P)


def padded(rows: int) -> int:
    """Rows that a matrix product really computes: whole tiles of 128 (SARATHI, Fig 7).

    Few rows take one smaller tile: of 16, 32 or 64 rows. 65 rows take 128.
    """
    raise NotImplementedError


def seconds(batch: Batch, model: ModelConfig, gpu: GPU) -> float:
    """Seconds of an iteration. Numbers have 2 bytes. Use `roofline` for each operator.

    linears    model.linears.values(): (inputs, outputs) of each of a layer's four products; there
               are model.n_layer layers. A product of T rows does 2 FLOPs per weight and padded row.
               It moves its weights, T inputs and T outputs: real rows, not padded ones. Share:
               COMPUTE. T: batch.num_tokens.
    head       one more product: model.hidden inputs, model.vocab_size outputs, and as many rows as
               len(batch.sampled). None if there are no such rows.
    chunks     each is an operator: 4 FLOPs per new token, token that it attends to (start +
               length), and channel (n_layer * n_head * head_dim). It moves K and V of start +
               length tokens, and per new token 2 numbers per channel. Share: ATTENTION.
    decodes    only bytes count: K and V of request.context + 1 tokens each, at gpu.bandwidth *
               MEMORY. One token has model.kv_bytes_per_token() bytes.
    """
    raise NotImplementedError
