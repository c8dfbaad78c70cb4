"""Infinity, which nothing beats."""

from configs import GPU, ModelConfig

exercise = "1"
caught_by = "answer"
message = "NaN or infinity"


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    return float("inf")
