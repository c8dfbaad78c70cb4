"""The small operators of a layer on a GPU: four kernels of Triton's for PyTorch's seventeen.

With them, decodes of LLaMA-13B take 9 to 15 % less time on an H200 (docs/gpu.md). All compute in
float32, and round once.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from configs import ModelConfig
from kvcache import KVCache
from model import ResidualLinear, Transformer
from more.fast.packed import install_small, replace

WIDTH = 1024  # elements that a program gates
HEADS = 8  # that a program rotates or writes


@triton.jit
def _normalize(x, weight, out, size, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < size
    value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value) / size + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, value * scale * factor, mask=inside)


@triton.jit
def _gate(inner, out, size, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < size
    first = inner + 2 * row * size
    gate = tl.load(first + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _rotate(
    x, cos, sin, heads, stride, HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, WIDTH)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (pair < HALF)
    place = x + row * stride + head * 2 * HALF + pair
    left = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    tl.store(place, left * c - right * s, mask=inside)
    tl.store(place + HALF, right * c + left * s, mask=inside)


@triton.jit
def _write(
    k,
    v,
    keys,
    values,
    slots,
    positions,
    heads,
    stride,
    head_stride,
    slot_stride,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (column < DIM)
    source = row * stride + head * DIM + column
    place = tl.load(slots + row) * slot_stride + tl.load(positions + row) * DIM
    place += head.to(tl.int64) * head_stride + column
    tl.store(keys + place, tl.load(k + source, mask=inside), mask=inside)
    tl.store(values + place, tl.load(v + source, mask=inside), mask=inside)


class RMSNorm:
    """x (..., size), as the `nn.RMSNorm` that it is made from. For inference only."""

    def __init__(self, norm: nn.RMSNorm):
        self.weight = norm.weight.detach()
        self.size = len(norm.weight)
        self.eps = norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = triton.next_power_of_2(self.size)
        grid = (x.numel() // self.size,)
        warps = min(8, max(1, width // 512))
        _normalize[grid](x, self.weight, out, self.size, self.eps, width, num_warps=warps)
        return out


def swiglu(inner: Tensor) -> Tensor:
    """As `model.swiglu`."""
    rows = inner.shape[0]
    size = inner.shape[1] // 2
    out = inner.new_empty(rows, size)
    _gate[rows, triton.cdiv(size, WIDTH)](inner, out, size, WIDTH)
    return out


def rotate(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """As `model.rotate`."""
    rows = len(x)
    half = cos.shape[-1]
    grid = (rows, triton.cdiv(heads, HEADS))
    width = triton.next_power_of_2(half)
    _rotate[grid](x, cos, sin, heads, x.stride(0), half, width, HEADS)


def write(
    cache: KVCache, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor
) -> None:
    """As `KVCache.write`, with k and v parts of one qkv."""
    rows, heads, dim = k.shape
    keys, values = cache.layers[layer]
    grid = (rows, triton.cdiv(heads, HEADS))
    width = triton.next_power_of_2(dim)
    sizes = heads, k.stride(0), keys.stride(0), keys.stride(1)
    slots = slots.contiguous()
    positions = positions.contiguous()
    _write[grid](k, v, keys, values, slots, positions, *sizes, dim, width, HEADS)


def linear(module: ResidualLinear) -> Callable[[Tensor, Tensor], Tensor]:
    """As the module, but the product adds the residual itself: that saves a launch and a pass."""
    weight = module.weight.detach().t()
    return lambda y, residual: residual.addmm_(y, weight)  # nobody needs the old residual


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Run each kernel once. Raises what Triton raises where it cannot."""
    config = ModelConfig("any", 1, 1, 64, 16, 1, 1)
    cache = KVCache(config, 1, 1, dtype, device)
    number = torch.zeros(1, dtype=int, device=device)
    qkv = torch.zeros(1, 3, 64, dtype=dtype, device=device)
    rotate(qkv, 2, qkv[:, :1, :32], qkv[:, :1, 32:])
    write(cache, 0, number, number, qkv[:, 1:2], qkv[:, 2:])
    RMSNorm(nn.RMSNorm(64, 1e-5, dtype=dtype, device=device))(swiglu(qkv.view(1, -1)[:, :128]))


def install(model: Transformer) -> None:
    """Put the small operators into a model of LLaMA's kind, in float16 or bfloat16."""
    install_small(model, RMSNorm, rotate, swiglu)
    replace(model, ResidualLinear, linear)
