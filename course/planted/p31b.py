"""Every row reads the weights again."""

from configs import GPU, ModelConfig

exercise = "1"
caught_by = "F2"
message = "not once per row"


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    weights = model.n_layer * model.layer_weights
    size = 2 * rows * weights + cached * model.kv_bytes_per_token()
    compute = 2 * rows * weights / gpu.peak
    return max(size / gpu.bandwidth, compute)
