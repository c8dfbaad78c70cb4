"""What some families have that model.py does not: a reader of model.py need not know it.

- Constants of config.json become part of the weights. Each is a factor on a matrix that is there
  anyway (`folds_of`: Granite, Gemma 3).
- OLMo 2 and Gemma 3 have layers of their own (`adapt`).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from configs import ModelConfig
from model import Layer, Transformer

PIECE = 4096  # rows that are computed in float64 at once


def folds_of(raw: dict, config: ModelConfig) -> dict[str, tuple[float, float]]:
    """By the end of a tensor's name: what is added to it, and then its factor. raw: config.json.

    Attention divides scores by the root of head_dim: q takes that back. A head that is the
    embedding has its factor, too: the last norm takes that back.
    """
    if raw.get("model_type") == "granite":
        keys = "embedding", "attention", "residual"
        embed, scores, branch = (raw.get(f"{key}_multiplier", 1) for key in keys)
        logits = 1 / raw.get("logits_scaling", 1)
        return {
            ".embed_tokens.weight": (0, embed),
            ".q_proj.weight": (0, scores * config.head_dim**0.5),
            ".o_proj.weight": (0, branch),
            ".down_proj.weight": (0, branch),
            ".norm.weight": (0, logits / embed if config.tied else logits),
        }
    if config.variant == "gemma3":
        embed = config.hidden**0.5
        scores = (config.head_dim / raw.get("query_pre_attn_scalar", 256)) ** 0.5
        return {
            ".embed_tokens.weight": (0, embed),
            "layernorm.weight": (1, 1),
            ".q_norm.weight": (1, scores),
            ".k_norm.weight": (1, 1),
            ".norm.weight": (1, 1 / embed if config.tied else 1),
        }
    return {}


def copy_folded(target: Tensor, tensor: Tensor, added: float, factor: float) -> None:
    """target = (tensor + added) * factor, computed in float64: so it is rounded once."""
    for piece, own in zip(tensor.split(PIECE), target.split(PIECE), strict=True):
        own.copy_((piece.double() + added) * factor)


class ThenNorm(nn.Module):
    """The end of a branch, with a norm of what it adds: x + norm(linear(y))."""

    def __init__(self, linear: nn.Linear, norm: nn.Module):
        super().__init__()
        self.linear, self.norm = nn.Linear(*linear.weight.shape[::-1], bias=False), norm

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(y))


class AllHeads(nn.Module):
    """One norm over all heads together. x: (T, heads, head_dim)"""

    def __init__(self, heads: int, config: ModelConfig):
        super().__init__()
        self.norm = nn.RMSNorm(heads * config.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)).view_as(x)


def geglu(inner: Tensor) -> Tensor:
    """As `model.swiglu`, with GELU in place of SiLU."""
    gate, up = inner.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def adapt(model: Transformer) -> Transformer:
    """Make the layers of a fresh model those of its family."""
    for layer in model.layers if model.config.variant else ():
        (gemma3 if model.config.variant == "gemma3" else olmo2)(layer, model.config)
    return model


def gemma3(layer: Layer, config: ModelConfig) -> None:
    """Norms before each branch, and after it."""
    for name in ("postproj", "ffn_ln2"):
        norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        setattr(layer, name, ThenNorm(getattr(layer, name), norm))
    layer.activate = geglu


def olmo2(layer: Layer, config: ModelConfig) -> None:
    """No norms before the branches: they come after."""
    layer.postproj = ThenNorm(layer.postproj, layer.norm_1)
    layer.ffn_ln2 = ThenNorm(layer.ffn_ln2, layer.norm_2)
    layer.norm_1 = layer.norm_2 = nn.Identity()
    layer.norm_q, layer.norm_k = AllHeads(config.n_head, config), AllHeads(config.n_kv_head, config)
