"""It remembers the answers of earlier questions by their sizes alone."""

from configs import GPU, ModelConfig
from course.reference import iteration_floor as right

exercise = "1"
caught_by = "F4"
message = "Bytes or FLOPs, the longer"

seen: dict[tuple[int, int], float] = {}


def iteration_floor(rows: int, cached: int, model: ModelConfig, gpu: GPU) -> float:
    return seen.setdefault((rows, cached), right(rows, cached, model, gpu))
