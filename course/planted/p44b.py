"""The heads are taken to be as wide as the hidden state."""

from batch import Batch
from configs import GPU, ModelConfig
from costmodel import padded as whole_tiles

exercise = "7"
caught_by = "Q9"
message = "heads of 256 channels"


COMPUTE, MEMORY, ATTENTION, P = 0.7739, 0.7483, 0.557, 2.1587


def roofline(flops: float, size: float, gpu: GPU, share: float) -> float:
    compute, memory = flops / (gpu.peak * share), size / (gpu.bandwidth * MEMORY)
    return (compute**P + memory**P) ** (1 / P)


def padded(rows: int) -> int:
    return whole_tiles(rows)


def seconds(batch: Batch, model: ModelConfig, gpu: GPU) -> float:
    def product(rows: int, inputs: int, outputs: int) -> float:
        size = 2 * (inputs * outputs + rows * (inputs + outputs))
        return roofline(2 * padded(rows) * inputs * outputs, size, gpu, COMPUTE)

    kv, channels = model.kv_bytes_per_token(), model.n_layer * model.hidden
    total = (
        sum(product(batch.num_tokens, *shape) for shape in model.linears.values()) * model.n_layer
    )
    if batch.sampled:
        total += product(len(batch.sampled), model.hidden, model.vocab_size)
    for chunk in batch.chunks:
        seen = chunk.start + chunk.length
        size = seen * kv + 4 * chunk.length * channels
        total += roofline(4 * chunk.length * seen * channels, size, gpu, ATTENTION)
    read = sum(request.context + 1 for request in batch.decodes)
    return total + read * kv / (gpu.bandwidth * MEMORY)
