"""Whatever the GPU, it is an A6000."""

from batch import Batch
from configs import GPU, GPUS, ModelConfig
from course.reference import padded  # noqa: F401
from course.reference import seconds as right

exercise = "7"
caught_by = "Q9"
message = "Of this model, on this GPU?"


def seconds(batch: Batch, model: ModelConfig, gpu: GPU) -> float:
    return right(batch, model, GPUS["a6000"])
