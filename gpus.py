"""GPUs and what joins them, by name: pure data, each number with its source.

Only the priced half uses them. Add an entry, and every script knows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One accelerator, from its data sheet."""

    name: str
    memory: float  # bytes
    peak: float  # dense fp16/bf16 tensor FLOP/s (no sparsity)
    bandwidth: float  # bytes/s
    source: str = ""


@dataclass(frozen=True)
class Link:
    """What joins GPUs. One message of `size` bytes takes latency + size / bandwidth seconds."""

    name: str
    bandwidth: float  # bytes/s of one GPU in one direction, from the data sheet
    latency: float  # s: of a small message, or of a small all-reduce over up to eight GPUs
    source: str = ""


def by_name(entries: Iterable) -> dict:
    return {entry.name: entry for entry in entries}


A6000 = "NVIDIA RTX A6000 data sheet: 309.7 TFLOPS with sparsity, half of it dense"
GPUS: dict[str, GPU] = by_name(
    [
        GPU("a6000", 48e9, 154.8e12, 768e9, A6000),
        GPU("a40", 48e9, 149.7e12, 696e9, "NVIDIA A40 data sheet"),
        GPU("l20", 48e9, 119.5e12, 864e9, "NVIDIA L20 data sheet"),
        GPU("a100-80gb", 80e9, 312e12, 2039e9, "NVIDIA A100 80GB SXM data sheet"),
        GPU("h100", 80e9, 989.4e12, 3350e9, "NVIDIA H100 SXM data sheet"),
        GPU("h200", 141e9, 989.4e12, 4800e9, "NVIDIA H200 SXM data sheet"),
    ]
)

LINKS: dict[str, Link] = by_name(
    [
        # Latencies: NCCL's own tuning model (src/graph/tuning.cc): 3.6 to 8.4 us for a ring
        # all-reduce, and 0.5 to 3.4 us for each of its steps.
        Link("nvlink-a100", 300e9, 10e-6, source="A100 data sheet: 600 GB/s both ways"),
        Link("nvlink-h100", 450e9, 10e-6, source="H100 data sheet: 900 GB/s both ways"),
        Link("pcie4", 32e9, 15e-6, source="PCIe 4.0 x16: 64 GB/s both ways"),
        Link(
            "infiniband-hdr", 25e9, 15e-6, "InfiniBand HDR: 200 Gb/s each way, a port for each GPU"
        ),
    ]
)
