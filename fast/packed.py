"""Linear operators with packed weights, on a CPU.

How the weights lie in memory is worth as much there as the schedule. `F.linear` reads a weight row
by row. A core multiplies tiles: it would rather find each tile's values side by side, and with a
plain weight it re-sorts them in every call. `pack_linears` sorts them once, into the layout that
oneDNN chooses for this machine, and drops the plain ones. Fewest rows gain most, for with few rows
the sorting is most of the work: see docs/performance.md.

oneDNN comes with PyTorch. The two operators are what `torch.compile` itself uses, but not part of
its documented API: where they do not exist, or do not fit (CUDA, other dtypes, other machines), the
plain operators stay.
"""

import platform
from collections.abc import Callable

import torch
from torch import Tensor, nn


class PackedLinear:
    """x (T, inputs) -> (T, outputs), plus `residual` if given: a linear operator, packed.

    It is for inference only, since an opaque weight cannot be trained. It is no `nn.Module`, whose
    calls take as long as a small product.
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

    It needs an x86 CPU, and float32, or bfloat16 that the CPU multiplies natively.
    """
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    if (
        device.type != "cpu"
        or platform.machine() not in ("x86_64", "AMD64")
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linears(model: nn.Module) -> None:
    """Replace each `nn.Linear` in a model by a packed one.

    It packs one at a time, so that at most one weight is in memory twice.
    """
    replace(
        model,
        nn.Linear,
        lambda linear: (
            PackedLinear(linear) if can_pack(linear.weight.device, linear.weight.dtype) else linear
        ),
    )


def replace(model: nn.Module, kind: type[nn.Module], by: Callable[[nn.Module], Callable]) -> None:
    """Put by(module), which need not be a module, in the place of each module of a kind."""
    # Their names, because a list of the modules themselves would keep every plain weight until the
    # end.
    for path in [path for path, module in model.named_modules() if isinstance(module, kind)]:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        operator = by(getattr(owner, name))
        delattr(owner, name)
        setattr(owner, name, operator)
