"""Weights of one layer, not of all."""

from configs import GPU, ModelConfig

exercise = "1"
caught_by = "F1"
message = "reads all weights once"


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    weights = model.n_layer * model.layer_weights
    size = 2 * model.layer_weights + cached * model.kv_bytes_per_token()
    compute = 2 * rows * weights / gpu.peak
    return max(size / gpu.bandwidth, compute)
