"""Only bytes count, however many rows."""

from configs import GPU, ModelConfig

exercise = "1"
caught_by = "F4"
message = "Bytes or FLOPs, the longer"


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    weights = model.n_layer * model.layer_weights
    size = 2 * weights + cached * model.kv_bytes_per_token()
    return size / gpu.bandwidth
