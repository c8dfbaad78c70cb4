"""The cache costs nothing."""

from configs import GPU, ModelConfig

exercise = "1"
caught_by = "F3"
message = "K and V of every cached token"


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    weights = model.n_layer * model.layer_weights
    size = 2 * weights
    compute = 2 * rows * weights / gpu.peak
    return max(size / gpu.bandwidth, compute)
