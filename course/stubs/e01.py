"""E1, lesson 1: the floor of an iteration. About 6 lines.

An iteration reads and computes at the same time. It cannot be shorter than the longer of the two.

    bytes   all weights once, 2 bytes each; and K and V of every cached token
    FLOPs   2 for each weight and each row

Count the linear operators of all layers and the cache. Leave out the embedding and the head.
"""

from configs import GPU, ModelConfig


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    """Seconds that no iteration can beat (SARATHI, Sec 3.1).

    rows: tokens of the batch. cached: tokens in the KV cache that they attend to.
    model: use model.n_layer, model.layer_weights (weights of one layer), and
    model.kv_bytes_per_token() (bytes of K and V of one token, all layers).
    gpu: use gpu.bandwidth (bytes/s) and gpu.peak (FLOP/s).
    """
    raise NotImplementedError
