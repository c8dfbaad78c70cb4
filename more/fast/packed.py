"""Linear operators with packed weights, on a CPU.

A plain weight lies row by row, and a core multiplies tiles. So `F.linear` sorts the weight into
tiles in every call.
`pack_linears` sorts it once, into the layout that oneDNN chooses for this machine, and drops the
plain weight. Small batches gain most: sorting is most of their work (docs/performance.md).

oneDNN comes with PyTorch. `torch.compile` uses the two operators, too, but they are not part of a
documented API. If they do not exist, or do not fit (CUDA, other dtypes, other machines), the plain
operators stay.

The layout is not documented either. On CPUs with AVX2 or more, most weights are in *panels* of 64
outputs: (outputs / 64, inputs, 64), where two neighbouring inputs of bfloat16 make one word of 32
bits. `panels_of` compares values with those of the plain weight. What lies in panels can be read in
place: by `step` (more/fast/step.py), and as the embedding of a tied head.
"""

from command.first import X86

import ctypes
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from model import Transformer, swiglu
from more.loading.device import cpu_multiplies_bfloat16

PANEL = 64  # outputs
COMPARED = 8  # one of so many panels is compared: all of them take as long as packing


class PackedLinear:
    """x (T, inputs) -> (T, outputs), plus `residual` if given: a linear operator, packed.

    It is for inference only: a packed weight cannot be trained. It is not an `nn.Module`, because
    calling one takes as long as a small product. panels: see `panels_of`.
    """

    def __init__(self, linear: nn.Linear | nn.Embedding):
        weight = linear.weight.detach()
        bias = getattr(linear, "bias", None)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.panels = panels_of(self.packed, weight)
        self.bias = None if bias is None else bias.detach()
        self.multiply = torch.ops.mkldnn._linear_pointwise.default
        self.multiply_and = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return self.multiply(x, self.packed, self.bias, "none", [], "")
        return self.multiply_and(x, residual, self.packed, self.bias, "add")


class PackedEmbedding:
    """tokens (T,) -> (T, H): rows of a head that lies in panels."""

    def __init__(self, head: PackedLinear, dtype: torch.dtype):
        self.head = head
        self.dtype = dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.head.panels[tokens // PANEL, :, tokens % PANEL].view(self.dtype)


def panels_of(packed: Tensor, weight: Tensor) -> Tensor | None:
    """A packed weight as it lies in memory: (panels, words of the inputs, PANEL), int32.

    What fills the last panel up is no output. None if it does not lie in panels. Keep `packed` as
    long as this.
    """
    outputs, inputs = weight.shape
    words = inputs * weight.itemsize // 4
    panels = -(-outputs // PANEL)
    count = panels * words * PANEL
    operators = torch.ops.mkldnn
    if not hasattr(operators, "data_ptr") or inputs * weight.itemsize % 64:
        return None
    if operators._nbytes(packed) != 4 * count:
        return None
    memory = (ctypes.c_int32 * count).from_address(int(operators.data_ptr(packed)))
    found = torch.frombuffer(memory, dtype=torch.int32).view(panels, words, PANEL)
    rows = weight.contiguous().view(torch.int32)  # (outputs, words)
    whole = outputs // PANEL * PANEL
    plain = rows[:whole].view(-1, PANEL, words).transpose(1, 2)  # (whole panels, words, PANEL)
    same = torch.equal(found[: len(plain)][::COMPARED], plain[::COMPARED])
    rest = rows[whole:].T  # (words, outputs of the last panel)
    return found if same and torch.equal(found[-1, :, : outputs - whole], rest) else None


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
        pack_tied_head(model)
    elif model.device.type == "cpu" and model.dtype == torch.bfloat16:
        slow = "a prefill may take several times as long as with dtype float32"
        print(f"this CPU emulates bfloat16, or has no packed operators: {slow}", file=sys.stderr)


def pack_tied_head(model: nn.Module) -> None:
    """Pack a head that is the embedding, too. It stays in memory once: in panels, or plain."""
    if model.head is not None or model.embed is None or model.norm is None:
        return
    head = PackedLinear(model.embed)
    if head.panels is not None:
        del model.embed
        model.embed = PackedEmbedding(head, model.dtype)
        model.head = head


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
