"""Linear operators with packed weights, on a CPU.

On a CPU, the order of the weights in memory matters as much as the schedule. A plain weight lies
row by row, and a core multiplies tiles. So `F.linear` sorts the weight into tiles in every call.
`pack_linears` sorts it once, into the layout that oneDNN chooses for this machine, and drops the
plain weight. Small batches gain most: sorting is most of their work (docs/performance.md).

A CPU without instructions for bfloat16 emulates it, and products take 3 to 6 times as long as in
float32. There, the packed copy of a bfloat16 weight is float32. It takes twice the memory. The
result is the same: sums are float32 in any case, and are rounded once.

oneDNN comes with PyTorch. `torch.compile` uses the two operators, too, but they are not part of a
documented API. If they do not exist, or do not fit (CUDA, other dtypes, other machines), the plain
operators stay.
"""

from fast.first import X86

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from loading.device import cpu_multiplies_bfloat16, free_memory
from model import Transformer, swiglu


class PackedLinear:
    """x (T, inputs) -> (T, outputs), plus `residual` if given: a linear operator, packed.

    It is for inference only: a packed weight cannot be trained. It is not an `nn.Module`, because
    calling one takes as long as a small product.
    """

    def __init__(self, linear: nn.Linear):
        weight, self.dtype = linear.weight.detach(), linear.weight.dtype
        inside = multiplied_in(self.dtype)
        self.widened = inside != self.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(inside))
        self.bias = None if linear.bias is None else linear.bias.detach().to(inside)
        self.multiply = torch.ops.mkldnn._linear_pointwise.default
        self.multiply_and = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.widened:
            x, residual = x.float(), None if residual is None else residual.float()
        if residual is None:
            y = self.multiply(x, self.packed, self.bias, "none", [], "")
        else:
            y = self.multiply_and(x, residual, self.packed, self.bias, "add")
        return y.to(self.dtype) if self.widened else y


def multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the packed weight: float32 for a bfloat16 that this CPU emulates."""
    if dtype != torch.bfloat16:
        return dtype
    native = cpu_multiplies_bfloat16() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has packed linears in this dtype.

    It needs an x86 CPU, and float32 or bfloat16.
    """
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    if device.type != "cpu" or not X86 or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    return dtype in (torch.float32, torch.bfloat16)


def pack_linears(model: nn.Module) -> None:
    """Replace each `nn.Linear` in a model by a packed one.

    It packs one at a time, so that at most one weight is in memory twice. On a CPU that emulates
    bfloat16, the packed weights need more memory (`multiplied_in`). If it is not there, or if
    nothing can be packed, the plain ones stay, and a line says what that costs.
    """
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    count = sum(linear.weight.numel() for linear in linears)  # no list: it would keep each one
    device, dtype = model.device, model.dtype
    possible = can_pack(device, dtype)
    if device.type == "cpu" and multiplied_in(dtype) != dtype:
        more = count * (4 - dtype.itemsize)  # bytes
        free = free_memory()
        why = None if possible else "its weights cannot be packed in float32 here"
        if possible and free is not None and more > free:
            why = f"float32 weights need {more / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
        if why:
            slow = "a prefill may take several times as long as with dtype float32"
            print(f"this CPU emulates bfloat16, and {why}: {slow}", file=sys.stderr)
            return
    if possible:
        replace(model, nn.Linear, PackedLinear)


def replace(model: nn.Module, kind: type[nn.Module], by: Callable[[nn.Module], Callable]) -> None:
    """Replace each module of a kind by by(module), which need not be a module itself."""
    # A list of names: a list of modules would keep every plain weight in memory until the end.
    for path in [path for path, module in model.named_modules() if isinstance(module, kind)]:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        operator = by(getattr(owner, name))
        delattr(owner, name)
        setattr(owner, name, operator)


def install_small(
    model: Transformer, norm: Callable, rotate_heads: Callable, gate: Callable
) -> None:
    """Put these in the places of nn.RMSNorm, of `model.rotate` and of `model.swiglu`."""
    replace(model, nn.RMSNorm, norm)
    for layer in model.layers:
        layer.rotate = rotate_heads
        if layer.activate is swiglu:  # Gemma 3 has another
            layer.activate = gate
