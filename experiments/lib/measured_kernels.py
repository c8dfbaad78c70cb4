"""Measured kernels of today's vLLM, and what the cost model says of each.

experiments/vllm_kernels.csv is a thinned copy of public measurements. Its head names their source.
`thin(read_tables(Path(DIR)))` made it, from the full tables.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from command.checks import UserError
from configs import GPUS, ModelConfig
from configs.constants import EFFICIENCY, AllReduce, Efficiency, reduce_seconds
from configs.experts import EXPERTS, FP8, Experts
from costmodel import CostModel
from experiments.lib.common import ROOT, read_table, write_table

PATH = ROOT / "experiments" / "vllm_kernels.csv"
# What a shape holds. All heads have 128 channels, all values 2 bytes; in fp8, weights have one.
SHAPES = {
    "product": ("rows", "outputs", "inputs"),
    "prefill": ("batch", "prompt", "heads", "KV heads"),
    "decode": ("batch", "context", "heads", "KV heads"),
    "all-reduce": ("GPUs", "bytes"),
    "fp8 product": ("rows", "outputs", "inputs"),
    "experts": ("rows", "hidden", "width", "experts", "chosen"),
    "fp8 experts": ("rows", "hidden", "width", "experts", "chosen"),
}


class Kernel(NamedTuple):
    """One measured kernel."""

    gpu: str
    kind: str  # of SHAPES
    shape: tuple[int, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Rows of a product or of experts, prompt tokens of a prefill, keys that decodes read."""
        return self.shape[0] if self.of_weights else self.shape[0] * self.shape[1]

    @property
    def of_weights(self) -> bool:
        return SHAPES[self.kind][0] == "rows"


@cache
def one_layer(heads: int, kv_heads: int) -> ModelConfig:
    """A layer with this attention; its products are never asked for."""
    return ModelConfig("kernel", 1, heads, 128 * heads, 1, 1, 1, n_kv_head=kv_heads)


def predicted(kernels: Iterable[Kernel], gpu: str, efficiency: Efficiency | Experts) -> list[float]:
    """Seconds of kernels of one GPU that are no all-reduces, with these constants of their kind."""
    models: dict[tuple[int, int], CostModel] = {}
    seconds = []
    for kernel in kernels:
        shape, fp8 = kernel.shape, kernel.kind.startswith("fp8")
        if kernel.kind.endswith("experts"):
            seconds.append(efficiency.seconds(GPUS[gpu], *shape, fp8))
            continue
        heads = shape[2:] if not kernel.of_weights else (1, 1)
        if heads not in models:
            models[heads] = CostModel(one_layer(*heads), GPUS[gpu], efficiency)
            models[heads].fp8 = efficiency
        cost = models[heads]
        if kernel.of_weights:
            rows, outputs, inputs = shape
            seconds.append(cost.linear(rows, inputs, outputs, fp8))
        elif kernel.kind == "prefill":
            seconds.append(cost.prefill_attention([(0, shape[1])] * shape[0]))
        else:
            seconds.append(cost.decode_attention(shape[0], shape[0] * shape[1]))
    return seconds


def of_kind(gpu: str, kind: str) -> Efficiency | Experts:
    """The constants of a kind of kernels in today's vLLM."""
    weights = "fp8" if kind.startswith("fp8") else "bf16"
    if kind.endswith("experts"):
        return EXPERTS[gpu, weights]
    own = EFFICIENCY[gpu, "vllm"]
    return replace(own, **FP8[gpu]) if weights == "fp8" else own


def predicted_reduces(
    kernels: Iterable[Kernel], ways: dict[int, tuple[AllReduce, ...]]
) -> list[float]:
    """Seconds of all-reduces."""
    return [reduce_seconds(ways[gpus], size, gpus) for *_, (gpus, size), _ in kernels]


# By what errors are told apart: the kind, the place in its shape, and where each group begins.
SIZES = (
    ("product", 0, (1, 64, 256, 1024, 4096, 8192)),
    ("prefill", 1, (1, 256, 1024, 4096)),
    ("decode", 0, (1, 2, 16, 64)),
    ("decode", 3, (1, 2, 4, 8)),
    ("all-reduce", 1, (0, 2**16, 2**19, 2**23)),
    *((kind, 0, (1, 64, 256, 1024, 4096)) for kind in ("fp8 product", "experts", "fp8 experts")),
)


def by_size(kind: str, kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels of one kind by the beginning of the group that they belong to, such as "rows 64"."""
    groups = {}
    for _, place, begins in (each for each in SIZES if each[0] == kind):
        what = SHAPES[kind][place]
        for begin, end in pairwise([*begins, math.inf]):
            own = [each for each in kernels if begin <= each.shape[place] < end]
            name = f"{begin // 2**10} KiB" if kind == "all-reduce" else f"{what} {begin}"
            groups |= {name: own} if own else {}
    return groups


def read_kernels() -> list[Kernel]:
    """The committed, thinned copy."""
    return [
        Kernel(row["gpu"], row["kind"], parsed(row["shape"]), 1e-6 * float(row["us"]))
        for row in read_table(PATH)
    ]


def by_kind(kernels: Sequence[Kernel], gpu: str) -> dict[str, list[Kernel]]:
    """Those of one GPU."""
    own = [each for each in kernels if each.gpu == gpu]
    return {kind: [each for each in own if each.kind == kind] for kind in kinds_of(gpu)}


def kinds_of(gpu: str) -> list[str]:
    """Of a GPU's kernels. An A100 computes no fp8."""
    return [kind for kind in SHAPES if not (gpu == "a100-80gb" and kind.startswith("fp8"))]


def parsed(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def halves(kernels: Sequence[Kernel]) -> tuple[list[Kernel], list[Kernel]]:
    """Those of one kind to fit to, and those to test on. Shapes alternate as on a chessboard.

    A shape's colour is the parity of the sum of its places among the sizes that occur. All rows of
    one weight matrix have one colour.
    """
    colours: tuple[list[Kernel], list[Kernel]] = ([], [])
    own = [kernel.shape[kernel.of_weights :] for kernel in kernels]
    places = [
        {size: place for place, size in enumerate(sorted(set(sizes)))}
        for sizes in zip(*own, strict=True)
    ]
    for kernel, shape in zip(kernels, own, strict=True):
        colour = sum(place[size] for place, size in zip(places, shape, strict=True))
        colours[colour % 2].append(kernel)
    return colours


# ------------------------------------------------------------------------------- the full tables

FOLDERS = {"a100": "a100-80gb", "h100": "h100", "l40s": "l40s"}
FILES = {
    "gemm": ("product", ("m", "n", "k")),
    "prefill_attention": ("prefill", ("batch_size", "prompt", "num_heads", "num_kv_heads")),
    "decode_attention": ("decode", ("batch_size", "context", "num_heads", "num_kv_heads")),
    "all_reduce": ("all-reduce", ("num_gpus", "bytes")),
    "gemm_fp8": ("fp8 product", ("m", "n", "k")),
    "experts": ("experts", ("num_tokens", "hidden_size", "width", "num_experts", "topk")),
    "experts_fp8": ("fp8 experts", ("num_tokens", "hidden_size", "width", "num_experts", "topk")),
}
VALUE_BYTES = 2  # what the tables call bytes of an all-reduce are values


def read_tables(directory: Path) -> list[Kernel]:
    """All rows of DIR/GPU/*.csv, in the columns of FILES. Raises UserError where one is missing."""
    kernels = []
    for folder, gpu in FOLDERS.items():
        for name, (kind, columns) in FILES.items():
            if kind not in kinds_of(gpu):
                continue
            path = directory / folder / f"{name}.csv"
            try:
                for row in read_table(path):
                    if row.get("backend", "vllm_graph") != "vllm_graph":
                        continue  # eager: the CPU is slower than the kernel
                    shape = tuple(int(row[column]) for column in columns)
                    if kind == "all-reduce":
                        shape = shape[0], shape[1] * VALUE_BYTES
                    kernels.append(Kernel(gpu, kind, shape, 1e-3 * float(row["ms"])))
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}") from None
            except (KeyError, ValueError) as error:
                raise UserError(f"{path}: {error}") from None
    return kernels


HEAD = """\
# Measured kernels of vLLM, one a line: a random part of the tables in NVIDIA's AIConfigurator 0.12
# (github.com/ai-dynamo/aiconfigurator), (c) NVIDIA Corporation & Affiliates, Apache License 2.0.
# vLLM 0.14 on an A100 SXM 80GB, 0.24 on an H100 SXM and an L40S; bf16, heads of 128 channels.
# shape: rows x outputs x inputs of a product; batch x prompt, or context, x heads x KV heads of
# attention; GPUs x bytes of an all-reduce in a CUDA graph; rows x hidden x H2 of an expert on this
# GPU x experts x experts of a token. fp8 products: Cutlass; inputs turned to fp8 first. Experts:
# Triton; gated; in fp8, a scale for each block of 128; tokens by a power law of 1.01.
"""
KEPT = 600  # of each kind on each GPU, at most


def thin(kernels: Sequence[Kernel]) -> None:
    """Write the committed copy: a seeded draw of each kind on each GPU."""
    draws = [
        random.Random(0),
        random.Random(1),
    ]  # the kinds of the first draw; those that came later
    rows = []
    for gpu in FOLDERS.values():
        for kind in kinds_of(gpu):
            own = [each for each in kernels if (each.gpu, each.kind) == (gpu, kind)]
            draw = draws["fp8" in kind or "experts" in kind]
            for kernel in sorted(draw.sample(own, min(KEPT, len(own)))):
                rows.append([gpu, kind, "x".join(map(str, kernel.shape)), 1e6 * kernel.seconds])
    write_table(PATH, ["gpu", "kind", "shape", "us"], rows, HEAD)
