"""Linear operators with packed weights, on a CPU.

A plain weight lies row by row, and a core multiplies tiles. So `F.linear` sorts the weight into
tiles in every call.
`pack_linears` sorts it once, into the layout that oneDNN chooses for this machine, and drops the
plain weight. Small batches gain most: sorting is most of their work (docs/performance.md).

oneDNN comes with PyTorch. `torch.compile` uses the two operators, too, but they are not part of a
documented API. If they do not exist, or do not fit (CUDA, other dtypes, other machines), the plain
operators stay.
"""

from command.first import X86

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model import Transformer, swiglu
from more.loading.device import cpu_multiplies_bfloat16


class PackedLinear:
    """x (T, inputs) -> (T, outputs), plus `residual` if given: a linear operator, packed.

    It is for inference only: a packed weight cannot be trained. It is not an `nn.Module`, because
    calling one takes as long as a small product.
    """

    def __init__(self, linear: nn.Linear):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.multiply = torch.ops.mkldnn._linear_pointwise.default
        self.multiply_and = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return self.multiply(x, self.packed, self.bias, "none", [], "")
        return self.multiply_and(x, residual, self.packed, self.bias, "add")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has packed linears in this dtype.

    It needs an x86 CPU, and float32; or bfloat16, and instructions for it.
    """
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    if device.type != "cpu" or not X86 or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_multiplies_bfloat16())


def pack_linears(model: nn.Module) -> None:
    """Replace each `nn.Linear` in a model by a packed one, if that can be.

    It packs one at a time, so that at most one weight is in memory twice. Where the CPU emulates
    bfloat16, a line says what that costs.
    """
    if can_pack(model.device, model.dtype):
        replace(model, nn.Linear, PackedLinear)
    elif model.device.type == "cpu" and model.dtype == torch.bfloat16:
        slow = "a prefill may take several times as long as with dtype float32"
        print(f"this CPU emulates bfloat16, or has no packed operators: {slow}", file=sys.stderr)


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
