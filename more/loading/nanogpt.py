"""nanoGPT's own checkpoint: `ckpt.pt`, as its train.py writes it.

https://github.com/karpathy/nanoGPT. The file holds the shape (`model_args`), the weights, and what
only training needs. It is read without running any code that may be in it: so `meta.pkl`, which
has the characters of nanoGPT's small data sets, is not read. tokenizer.py reads characters.json.
"""

from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from command.checks import UserError, check_flag, check_whole, shown
from configs import ModelConfig
from more.loading.files import NANOGPT, existing

SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
OTHERS = ("bias", "dropout")  # of model_args: dropout is for training
LINEARS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASK = ".attn.bias"  # where PyTorch is old
NORMS = ("ln_1.weight", "ln_2.weight", "ln_f.weight")


def load_config(directory: Path, name: str | None) -> ModelConfig:
    """GPT-2's shape, but for the exact GELU. Raises UserError for what is not of train.py.

    Forks add arguments, and a head of its own. That head counts, and their arguments are refused:
    nobody knows here what they would change.
    """
    path = existing(directory, NANOGPT)
    args, weights = _read(path)
    for key, value in args.items():
        if key not in SIZES + OTHERS:
            raise UserError(
                f"{path}: model_args has {key} = {shown(value)}, which nanoGPT's train.py does not"
                f" write; only {', '.join(SIZES + OTHERS)} are supported"
            )
    for key in SIZES:
        check_whole(f"{path}: {key}", args.get(key))
    check_flag(f"{path}: bias", args.get("bias", True))
    return ModelConfig(
        name or directory.resolve().name,
        args["n_layer"],
        args["n_head"],
        args["n_embd"],
        4 * args["n_embd"],
        args["vocab_size"],
        args["block_size"],
        flavour="gpt2",
        gelu="none",
        tied=_is_tied(weights),
        source=str(path),
    )


def _is_tied(weights: dict[str, Tensor]) -> bool:
    """Whether there is no head but the embedding. If that is missing, it is refused later."""
    heads = [each for name, each in weights.items() if name.endswith("lm_head.weight")]
    tables = [each for name, each in weights.items() if name.endswith("wte.weight")]
    pairs = product(heads, tables)
    return all(head.dtype == table.dtype and torch.equal(head, table) for head, table in pairs)


def weights_of(path: Path) -> dict[str, Tensor]:
    """As GPT-2's files have them: linear ones transposed; and with biases, if only of zeros."""
    args, found = _read(path)
    weights = {}
    for name, tensor in found.items():
        if name.endswith(MASK):
            if tensor.dim() != 4 or not torch.equal(tensor, torch.ones_like(tensor).tril()):
                raise UserError(f"{path}: {name} is not train.py's causal mask; no other is run")
            continue
        weights[name] = tensor.T if name.endswith(LINEARS) and tensor.dim() == 2 else tensor
        if name.endswith(LINEARS + NORMS) and not args.get("bias", True):
            weights.setdefault(name.removesuffix("weight") + "bias", torch.zeros(len(tensor)))
    return weights


def _read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """model_args, and the weights: they stay in the file until they are used."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        args = found["model_args"]
        weights = found["model"]
        named = all(isinstance(name, str) for name in weights)
        good = isinstance(args, dict) and named and all(map(torch.is_tensor, weights.values()))
    except Exception:  # noqa: BLE001 (torch's errors, of many lines, tell how to run the code)
        good = False
    if not good:
        raise UserError(
            f"{path}: not a checkpoint of nanoGPT's train.py, or not whole, or with code in it"
        )
    return args, weights
